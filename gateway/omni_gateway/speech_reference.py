"""Whose voice speaks: one of the pipeline's own, an uploaded one, or that of a sound which came with the request.

A pipeline clones voices if its `speech` task has an `audio` input; to all others the fields for it are unsupported.
"""

import asyncio
from dataclasses import dataclass

from omni_common.errors import OmniError, invalid
from omni_common.pipeline import Pipeline
from omni_gateway.chat_schema import InputAudio, VoiceRef
from omni_gateway.endpoint import own_voice, unknown_voice
from omni_gateway.errors import quoted
from omni_gateway.media.decode import decode_audio
from omni_gateway.media.fetch import Fetcher
from omni_gateway.media.graph import Samples
from omni_gateway.media.inline import decode_base64, decode_data_url
from omni_gateway.speech_schema import SpeechFields
from omni_gateway.voice_store import StoredVoice, VoiceStore

#: Seconds that a sound must have for its voice to be cloned, decoded.
SHORTEST_S, LONGEST_S = 1.0, 30.0
#: Clients whose library insists on a voice say so when they want none.
UNSET = "default"
#: From anywhere in the open Internet.
_PUBLIC = Fetcher()
_FETCH_S = 30.0
#: Of one request, which may be a batch: fetched and decoded at a time.
_READ_AT_ONCE = 4
#: Fields that say who is to be cloned, and those for which there is no pipeline at all.
_CLONING = ("ref_audio", "ref_text", "references")
_NOWHERE = ("ref_audio_2", "speaker_embedding", "x_vector_only_mode")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the sound to clone is: one of the three."""

    #: The field to blame.
    param: str
    #: `http:`, `https:` or `data:`.
    url: str | None = None
    #: Base64 of a whole file.
    data: str = ""
    stored: StoredVoice | None = None


@dataclass(frozen=True, slots=True)
class Speaker:
    #: Id of one of the pipeline's own voices; empty: its usual one, or a cloned one.
    voice: str = ""
    #: What the voice is to be like, and what is said there.
    source: Source | None = None
    ref_text: str = ""


def clones(pipeline: Pipeline) -> bool:
    task = pipeline.tasks.get("speech")
    return task is not None and "audio" in task.input


class References:
    """Finds the speakers of one HTTP request and reads their sounds; a sound that several items share is read once."""

    def __init__(self, store: VoiceStore, fetcher: Fetcher = _PUBLIC) -> None:
        self._store = store
        self._fetcher = fetcher
        self._reading: dict[tuple[Source, int], asyncio.Task[Samples]] = {}
        self._turns = asyncio.Semaphore(_READ_AT_ONCE)

    async def speaker(self, request: SpeechFields, pipeline: Pipeline) -> Speaker:
        """Who speaks `request`. Raises OmniError 400 with the field; nothing is fetched or decoded yet."""
        _refuse_unsupported(request, pipeline)
        source, text = _reference(request)
        name = request.voice.id if isinstance(request.voice, VoiceRef) else request.voice
        unset = name is None or name.casefold() == UNSET
        voice = None
        if name is not None and not (unset and source):
            voice = own_voice(pipeline, name)
            stored = None if voice or unset else await self._uploaded(pipeline, name)
            if source and (voice or stored):
                message = f"voice and {source.param} exclude each other; leave voice out, or say {quoted(UNSET)}"
                raise invalid(message, "voice")
            if stored:
                source, text = Source("voice", stored=stored), stored.ref_text if text is None else text
        if text is not None and source is None:
            raise invalid("ref_text goes with ref_audio, or with an uploaded voice", "ref_text")
        speaker = Speaker(voice or "", source, text or "")
        _check_task_type(request.task_type, speaker, pipeline)
        return speaker

    async def samples(self, source: Source, pipeline: Pipeline) -> Samples:
        """float32 [n], mono, at the pipeline's audio rate, 1 to 30 s.

        Raises OmniError with the field of `source`, as the fetcher and the decoder do, and 400 `audio_too_short`.
        """
        key = (source, pipeline.audio_rate)
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.create_task(self._read(source, pipeline))
        return await task

    async def _uploaded(self, pipeline: Pipeline, name: str) -> StoredVoice:
        stored = await asyncio.to_thread(self._store.find, name) if clones(pipeline) else None
        if stored is None:
            raise unknown_voice(pipeline, name, "voice")
        return stored

    async def _read(self, source: Source, pipeline: Pipeline) -> Samples:
        param, rate = source.param, pipeline.audio_rate
        async with self._turns:
            data, max_bytes = await self._load(source, pipeline)
            samples = await decode_audio(data, max_seconds=LONGEST_S, max_bytes=max_bytes, rate=rate, param=param)
        check_length(len(samples) / rate, param)
        return samples

    async def _load(self, source: Source, pipeline: Pipeline) -> tuple[bytes, int]:
        """A file, and how many bytes it may have: what comes with a request as many as the pipeline's limits say."""
        param, max_bytes = source.param, pipeline.limits.audio_mib << 20
        if source.stored is not None:
            kept = await asyncio.to_thread(self._store.sound, source.stored)
            if kept is None:
                raise unknown_voice(pipeline, source.stored.name, param)
            return kept, len(kept)
        if source.url is None:
            data = await decode_base64(source.data, "audio", max_bytes, param)
        elif source.url[:5].lower() == "data:":
            data = await decode_data_url(source.url, "audio", max_bytes, param)
        else:
            data = await self._fetcher.fetch(source.url, "audio", max_bytes=max_bytes, within_s=_FETCH_S, param=param)
        return data, max_bytes


def check_length(seconds: float, param: str) -> None:
    """Raises OmniError 400 `audio_too_short`; the decoder refuses what is too long."""
    if seconds < SHORTEST_S:
        text = f"{param}: the audio has {seconds:.2f} s; a voice is cloned from {SHORTEST_S:g} to {LONGEST_S:g} s"
        raise invalid(text, param, code="audio_too_short")


def _refuse_unsupported(request: SpeechFields, pipeline: Pipeline) -> None:
    for name in _NOWHERE:
        if getattr(request, name) not in (None, False):
            raise _unsupported(name, "is not supported here")
    if not clones(pipeline):
        for name in _CLONING:
            if getattr(request, name) is not None:
                raise _unsupported(name, f"is not supported: {pipeline.name} clones no voices")


def _reference(request: SpeechFields) -> tuple[Source | None, str | None]:
    """The sound that came with the request, and what is said there."""
    if request.references is None:
        given = request.ref_audio
        if given is None:
            return None, request.ref_text
        if isinstance(given, InputAudio):
            return Source("ref_audio.data", data=given.data), request.ref_text
        return Source("ref_audio", url=given), request.ref_text
    for name in ("ref_audio", "ref_text"):
        if getattr(request, name) is not None:
            raise invalid(f"{name} and references exclude each other", "references")
    [entry] = request.references
    if entry.audio is not None and entry.audio_path is not None:
        raise invalid("references[0]: audio and audio_path mean the same; give one", "references[0].audio")
    url = entry.audio_path if entry.audio is None else entry.audio
    if url is None:
        message = "references[0].audio_path is missing"
        raise invalid(message, "references[0].audio_path", code="missing_required_parameter")
    return Source(f"references[0].{'audio_path' if entry.audio is None else 'audio'}", url=url), entry.text


def _check_task_type(task_type: str | None, speaker: Speaker, pipeline: Pipeline) -> None:
    """`Base` is the peer's word for a cloned voice, `CustomVoice` for one by name."""
    if task_type is None:
        return
    if task_type == "Base":
        if not clones(pipeline):
            raise _unsupported("task_type", f"Base is not supported: {pipeline.name} clones no voices")
        if speaker.source is None:
            raise invalid("task_type Base needs ref_audio, or an uploaded voice", "task_type")
    elif task_type == "CustomVoice" and pipeline.voices:
        if speaker.source is not None:
            raise invalid("task_type CustomVoice goes with one of the model's own voices", "task_type")
    else:
        raise _unsupported("task_type", f"{quoted(task_type)} is not supported by {pipeline.name}")


def _unsupported(name: str, why: str) -> OmniError:
    return invalid(f"{name} {why}", name, code="unsupported_parameter")
