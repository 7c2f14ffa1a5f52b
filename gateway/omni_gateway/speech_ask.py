"""From a speech request to what the bus is asked: everything is checked and decoded here, nothing is sent before."""

from dataclasses import dataclass

from omni_common.errors import invalid
from omni_common.frames import Audio, Params, Text
from omni_common.params import BY_ENGINE, NoParams, split_speed
from omni_common.pipeline import Pipeline
from omni_gateway.endpoint import build_params, fresh_seed
from omni_gateway.errors import quoted
from omni_gateway.media.encode import CONTENT_TYPES
from omni_gateway.media.graph import Samples
from omni_gateway.speech_reference import References, clones
from omni_gateway.speech_schema import SpeechRequest
from omni_gateway.stream import Ask, Given

TASK = "speech"
_STREAM_FORMATS = ("audio", "sse")


@dataclass(frozen=True, slots=True)
class SpeechJob:
    """A validated request."""

    ask: Ask
    format: str
    #: Server-sent events rather than the bytes themselves.
    events: bool
    #: What time stretching has to do; 1: nothing.
    stretch: float
    characters: int


async def build_job(request: SpeechRequest, pipeline: Pipeline, references: References) -> SpeechJob:
    """Check `request` against `pipeline`, then read the sound that its voice is to be like, if there is one.

    Raises OmniError 400 (413 for a sound that is too large) with the field.
    """
    limit = pipeline.limits.speech_chars
    text = request.input
    if not text.strip():
        raise invalid("input must not be empty", "input")
    if len(text) > limit:
        message = f"input has {len(text)} characters, more than {limit}"
        raise invalid(message, "input", code="string_above_max_length")
    fmt = _one_of(request.response_format, "response_format", tuple(CONTENT_TYPES))
    stream_format = _one_of(request.stream_format, "stream_format", _STREAM_FORMATS)
    speaker = await references.speaker(request, pipeline)

    task = pipeline.tasks[TASK]
    talker = task.input["text"]
    inputs = ["text", "audio"] if speaker.source else ["text"]
    stages = pipeline.plan(TASK, inputs, ["audio"]).stages
    overrides: dict[str, Params] = {name: {} for name in stages}
    for stage in stages:
        if speaker.voice and "voice" in pipeline.stages[stage].params:
            overrides[stage]["voice"] = speaker.voice
    if speaker.ref_text:
        overrides[talker]["ref_text"] = speaker.ref_text
    if request.max_new_tokens is not None:
        engine = pipeline.stages[talker].engine
        if "max_tokens" not in BY_ENGINE.get(engine, NoParams).__struct_fields__:
            message = f"max_new_tokens: {pipeline.name} does not speak by tokens"
            raise invalid(message, "max_new_tokens", code="unsupported_parameter")
        overrides[talker]["max_tokens"] = request.max_new_tokens
    stretch = 1.0
    if request.speed is not None:
        stretch = request.speed
        if "speed" in pipeline.stages[talker].params:
            overrides[talker]["speed"], stretch = split_speed(request.speed)
    params = build_params(pipeline, stages, overrides)

    sound = await references.samples(speaker.source, pipeline) if speaker.source else None
    ask = Ask(
        pipeline=pipeline,
        task=TASK,
        outputs=["audio"],
        given=given_speech(pipeline, text, sound),
        seed=fresh_seed() if request.seed is None else request.seed,
        params=params,
    )
    return SpeechJob(ask, fmt, stream_format == "sse", stretch, len(text))


def given_speech(pipeline: Pipeline, text: str, sound: Samples | None) -> list[Given]:
    """The text, after the float32 [n] that its voice is to be like, mono at the pipeline's rate.

    An edge that can carry both counts pieces, one that carries nothing but text counts characters.
    """
    if not clones(pipeline):
        return [Given("text", Text(text=text), 0, len(text), last=True)]
    pieces: list[Given] = []
    if sound is not None:
        pieces.append(Given("audio", Audio(pipeline.audio_rate), 0, 1, last=False, arrays={"samples": sound}))
    at = len(pieces)
    return [*pieces, Given("text", Text(text=text), at, at + 1, last=True)]


def _one_of(value: str | None, field: str, valid: tuple[str, ...]) -> str:
    """`value`, or the first of `valid` for null."""
    if value is None:
        return valid[0]
    if value not in valid:
        raise invalid(f"{field}: {quoted(value)} is not one of {', '.join(valid)}", field)
    return value
