"""From a chat request to what the bus is asked: everything is checked and decoded here, nothing is sent before."""

from dataclasses import dataclass
from typing import Any

import msgspec

from omni_common.errors import invalid
from omni_common.frames import Params, Prompt
from omni_common.pipeline import Pipeline
from omni_gateway.audio_store import AudioStore
from omni_gateway.chat_read import Reader
from omni_gateway.chat_schema import ChatFormat, ChatRequest, LogitBias, VoiceRef, bias_entries, refuse_unsupported
from omni_gateway.context import AudioForm
from omni_gateway.endpoint import build_params, find_voice, fresh_seed
from omni_gateway.errors import quoted
from omni_gateway.media.fetch import Fetcher
from omni_gateway.media_input import given_input
from omni_gateway.stream import Ask

_TASK = "chat"
#: From anywhere in the open Internet.
_PUBLIC = Fetcher()


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
    #: Samples of all input audio, that of videos included, at 16 kHz.
    audio_in: int


async def build_job(
    request: ChatRequest,
    pipeline: Pipeline,
    form: AudioForm,
    store: AudioStore,
    owner: str,
    fetcher: Fetcher = _PUBLIC,
) -> ChatJob:
    """Check `request` against `pipeline`, fetch and decode its media, resolve the audio ids of `owner`.

    Raises OmniError 400 (413 for a medium that is too large) with the path of the field.
    """
    refuse_unsupported(request)
    modalities = _modalities(request, pipeline)
    options = request.audio
    audio_format: ChatFormat | None = ((options and options.format) or "wav") if "audio" in modalities else None
    voice = _voice(request, pipeline)

    reader = Reader(pipeline, store, owner, fetcher, request.hears_videos)
    messages = [await reader.message(i, message) for i, message in enumerate(request.messages)]
    media = reader.media
    given = given_input(pipeline.tasks[_TASK], Prompt(messages=messages), media)
    inputs = ["text", *media.modalities]
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
        audio_in=sum(len(samples) for samples in media.audios),
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
            if key == "stop" and isinstance(value, str):
                overrides[name][key] = [value]
            elif key == "logit_bias" and value is not None:
                overrides[name][key] = _bias_entries(value, f"{where[name]}.{key}")
            elif value is not None:
                overrides[name][key] = value
    return build_params(pipeline, pipeline.stages, overrides, where)


def _bias_entries(value: Any, where: str) -> list[str | int]:
    try:
        return bias_entries(msgspec.convert(value, LogitBias), where)
    except msgspec.ValidationError:
        raise invalid(f"{where} must map token ids to numbers", where, code="invalid_type") from None
