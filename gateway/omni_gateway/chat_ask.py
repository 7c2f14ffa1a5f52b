"""From a chat request to what the bus is asked: everything is checked and decoded here, nothing is sent before."""

import base64
import binascii
from dataclasses import dataclass

from omni_common.errors import invalid
from omni_common.frames import AudioPart, Message, Params, Prompt, TextPart
from omni_common.pipeline import Pipeline
from omni_gateway.audio_input import RATE, given_audio
from omni_gateway.audio_store import AudioStore
from omni_gateway.chat_schema import AudioRef, ChatFormat, ChatMessage, ChatRequest, Part, VoiceRef, refuse_unsupported
from omni_gateway.context import AudioForm
from omni_gateway.endpoint import Samples, build_params, find_voice, fresh_seed
from omni_gateway.errors import quoted
from omni_gateway.media.decode import decode_audio
from omni_gateway.media.pool import DECODERS
from omni_gateway.stream import Ask, Given

_TASK = "chat"
_FORMATS = frozenset({"wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "mp4", "webm"})


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A validated chat request."""

    ask: Ask
    #: The model as the client named it.
    model: str
    #: The audio format that the client wants; `None`: it wants text only.
    audio: ChatFormat | None
    #: Text goes out besides the audio's transcript (only the `content` form tells them apart).
    text: bool
    form: AudioForm
    include_usage: bool
    #: Samples of all input audio, at 16 kHz.
    audio_in: int


async def build_job(
    request: ChatRequest, pipeline: Pipeline, form: AudioForm, store: AudioStore, owner: str
) -> ChatJob:
    """Check `request` against `pipeline`, decode its audio, resolve the audio ids of `owner`.

    Raises OmniError 400 (413 for an audio that is too large) with the path of the field.
    """
    refuse_unsupported(request)
    modalities = _modalities(request, pipeline)
    options = request.audio
    audio_format: ChatFormat | None = ((options and options.format) or "wav") if "audio" in modalities else None
    voice = _voice(request, pipeline)

    reader = _Reader(pipeline, store, owner)
    messages = [await reader.message(i, message) for i, message in enumerate(request.messages)]
    given = [Given("text", Prompt(messages=messages), 0, 1, last=True), *given_audio(reader.audios)]
    inputs = ["text", "audio"] if reader.audios else ["text"]
    # A spoken answer needs its text too: it is the transcript.
    wanted: list[str] = ["text", "audio"] if audio_format else ["text"]
    can: list[str] = list(pipeline.tasks[_TASK].output)
    outputs = [modality for modality in wanted if modality in can]
    try:
        plan = pipeline.plan(_TASK, inputs, outputs)
    except ValueError as error:
        raise invalid(str(error), "messages") from None
    params = _params(request, pipeline, voice)
    ask = Ask(
        pipeline=pipeline,
        task=_TASK,
        outputs=outputs,
        given=given,
        seed=fresh_seed() if request.seed is None else request.seed,
        params={name: params[name] for name in plan.stages},
    )
    return ChatJob(
        ask=ask,
        model=request.model or pipeline.name,
        audio=audio_format,
        text="text" in modalities,
        form=form,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        audio_in=sum(len(samples) for samples in reader.audios),
    )


def _modalities(request: ChatRequest, pipeline: Pipeline) -> list[str]:
    """What the answer consists of. Nothing said: text, with audio if `audio` is there."""
    if request.modalities is None:
        return ["text", "audio"] if request.audio is not None else ["text"]
    can = list(pipeline.tasks[_TASK].output)
    for index, modality in enumerate(request.modalities):
        if modality not in can or modality not in ("text", "audio"):
            text = f"modalities: {pipeline.name} gives {' and '.join(can)}, not {quoted(modality)}"
            raise invalid(text, "modalities" if len(request.modalities) == 1 else f"modalities[{index}]")
    if not request.modalities:
        raise invalid("modalities must name at least one", "modalities")
    return request.modalities


def _voice(request: ChatRequest, pipeline: Pipeline) -> str | None:
    asked = request.audio.voice if request.audio else None
    if asked is not None:
        return find_voice(pipeline, asked.id if isinstance(asked, VoiceRef) else asked, "audio.voice")
    return None if request.voice is None else find_voice(pipeline, request.voice, "voice")


def _params(request: ChatRequest, pipeline: Pipeline, voice: str | None) -> dict[str, Params]:
    """Every stage's parameters: YAML < the request's fields < its `sampling_params_list`."""
    overrides: dict[str, Params] = {name: {} for name in pipeline.stages}
    output = pipeline.tasks[_TASK].output
    overrides[output.get("text") or output["audio"]].update(request.sampling())
    if voice is not None:
        for name, stage in pipeline.stages.items():
            if "voice" in stage.params:
                overrides[name]["voice"] = voice
    # A wrong value must be blamed on the field that it came from, so the top-level fields are checked alone first.
    complete = build_params(pipeline, pipeline.stages, overrides)
    listed = request.sampling_params_list
    if not listed:
        return complete
    if len(listed) > len(pipeline.stages):
        names = ", ".join(pipeline.stages)
        text = f"sampling_params_list has {len(listed)} entries for {len(pipeline.stages)} stages ({names})"
        raise invalid(text, "sampling_params_list")
    where = {}
    for index, (name, entry) in enumerate(zip(pipeline.stages, listed, strict=False)):
        where[name] = f"sampling_params_list[{index}]"
        for key, value in (entry or {}).items():
            if value is not None:
                overrides[name][key] = [value] if key == "stop" and isinstance(value, str) else value
    return build_params(pipeline, pipeline.stages, overrides, where)


class _Reader:
    """Turns messages into a prompt, collecting the audio on the way."""

    def __init__(self, pipeline: Pipeline, store: AudioStore, owner: str) -> None:
        self._pipeline = pipeline
        self._store = store
        self._owner = owner
        self._text_left = pipeline.limits.text_chars
        self._seconds_left = pipeline.limits.audio_s
        self.audios: list[Samples] = []

    async def message(self, index: int, message: ChatMessage) -> Message:
        where = f"messages[{index}]"
        role = "system" if message.role == "developer" else message.role
        parts: list[TextPart | AudioPart] = []
        content = message.content
        if isinstance(content, str):
            parts.append(self._text(content, f"{where}.content"))
        elif content is not None:
            for number, part in enumerate(content):
                parts.append(await self._part(part, role, f"{where}.content[{number}]"))
        if message.audio is not None:
            spoken = self._spoken(message.audio, role, f"{where}.audio")
            if not any(isinstance(part, TextPart) and part.text for part in parts):
                parts = [self._text(spoken, f"{where}.audio.id")]
        elif not parts or (role == "user" and all(isinstance(p, TextPart) and not p.text.strip() for p in parts)):
            raise invalid(f"{where}.content must not be empty", f"{where}.content")
        return Message(role=role, parts=parts)  # type: ignore[arg-type]

    async def _part(self, part: Part, role: str, where: str) -> TextPart | AudioPart:
        if part.type == "text":
            if part.text is None:
                raise invalid(f"{where}.text is missing", f"{where}.text", code="missing_required_parameter")
            return self._text(part.text, f"{where}.text")
        if part.type != "input_audio":
            text = f"{where}: {self._pipeline.name} takes text and input_audio, not {quoted(part.type)}"
            raise invalid(text, where)
        if role != "user" or "audio" not in self._pipeline.tasks[_TASK].input:
            raise invalid(f"{where}: {self._pipeline.name} does not hear audio in a {role} message", where)
        return await self._audio(part, f"{where}.input_audio")

    def _text(self, text: str, where: str) -> TextPart:
        self._text_left -= len(text)
        if self._text_left < 0:
            limit = self._pipeline.limits.text_chars
            raise invalid(f"the messages hold more than {limit} characters", where, code="string_above_max_length")
        return TextPart(text=text)

    async def _audio(self, part: Part, where: str) -> AudioPart:
        given = part.input_audio
        if given is None:
            raise invalid(f"{where} is missing", where, code="missing_required_parameter")
        if given.format is not None and given.format.lower() not in _FORMATS:
            valid = ", ".join(sorted(_FORMATS))
            raise invalid(f"{where}.format: {quoted(given.format)} is not one of {valid}", f"{where}.format")
        where += ".data"
        try:
            data = await DECODERS.run(base64.b64decode, given.data, validate=True)
        except (binascii.Error, ValueError):
            raise invalid(f"{where} is not valid base64", where, code="invalid_base64") from None
        if not data:
            raise invalid(f"{where} is empty", where, code="invalid_audio")
        limits = self._pipeline.limits
        if self._seconds_left <= 0:
            raise invalid(f"all audio together is longer than {limits.audio_s:g} s", where, code="audio_too_long")
        samples = await decode_audio(
            data, max_seconds=self._seconds_left, max_bytes=limits.audio_mib << 20, rate=RATE, param=where
        )
        self._seconds_left -= len(samples) / RATE
        self.audios.append(samples)
        return AudioPart(index=len(self.audios) - 1)

    def _spoken(self, ref: AudioRef, role: str, where: str) -> str:
        if role != "assistant":
            raise invalid(f"{where} is only allowed in an assistant message", where)
        transcript = self._store.get(self._owner, ref.id)
        if transcript is None:
            text = f"{where}.id: no audio {quoted(ref.id)} is known; it may have expired"
            raise invalid(text, f"{where}.id", code="audio_not_found")
        return transcript
