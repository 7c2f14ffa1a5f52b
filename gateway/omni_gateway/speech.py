"""`POST /v1/audio/speech`: text to sound, sent while it is made.

The body streams in either form: `stream_format: "audio"` (the default) gives the container's bytes, `"sse"` gives
`speech.audio.delta` events whose `audio`, joined, is the same container, then `speech.audio.done`. Nothing is sent
before the first sound exists, but comments after 10 s without it. An error after the start is a `speech.audio.error`
event, or the connection breaks off: a raw body that ends in order is always whole. `instructions` are accepted and
change nothing: the voices here have one style. `stream` and other fields that OpenAI does not have are ignored.

In `usage` a token of input is a character, and a token of output 50 ms of sound.
"""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from omni_common.errors import OmniError, invalid
from omni_common.frames import Audio, Params, Text
from omni_common.params import split_speed
from omni_common.pipeline import Pipeline
from omni_gateway.chat_schema import VoiceRef
from omni_gateway.context import BUS, ERROR_CODE, SETTINGS
from omni_gateway.endpoint import (
    Run,
    build_params,
    decode_body,
    error_body,
    find_pipeline,
    find_voice,
    fresh_seed,
    run_stream,
    samples_of,
    sse_response,
)
from omni_gateway.errors import internal_error, quoted
from omni_gateway.media.encode import CONTENT_TYPES, Encoder
from omni_gateway.media.tempo import Tempo
from omni_gateway.stream import Ask, Given

_TASK = "speech"
_STREAM_FORMATS = ("audio", "sse")
_TOKENS_PER_S = 20


class SpeechRequest(msgspec.Struct, kw_only=True):
    input: str
    model: str | None = None
    voice: str | VoiceRef | None = None
    instructions: str | None = None
    response_format: str | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None
    stream_format: str | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None


def add_routes(app: web.Application) -> None:
    app.router.add_post("/v1/audio/speech", speech)


async def speech(request: web.Request) -> web.StreamResponse:
    body = await decode_body(request, SpeechRequest)
    settings = request.app[SETTINGS]
    pipeline = find_pipeline(request.app[BUS], body.model, _TASK, settings.default_pipeline)
    job = build_job(body, pipeline)
    sound = _Sound(job)
    patience_s = settings.keep_alive_s if job.events else None
    async with (
        run_stream(request, job.ask, patience_s=0) as run,
        aclosing(sound.pieces(run)) as pieces,
        _first_of(pieces, patience_s) as first,
    ):
        send = _send_events if job.events else _send_bytes
        response = await send(request, sound, first, pieces)
    if not job.events and ERROR_CODE in request and request.transport is not None:
        request.transport.abort()
    return response


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


def build_job(request: SpeechRequest, pipeline: Pipeline) -> SpeechJob:
    """Raises OmniError 400 with the field."""
    limit = pipeline.limits.speech_chars
    if not request.input.strip():
        raise invalid("input must not be empty", "input")
    if len(request.input) > limit:
        text = f"input has {len(request.input)} characters, more than {limit}"
        raise invalid(text, "input", code="string_above_max_length")
    fmt = _one_of(request.response_format, "response_format", tuple(CONTENT_TYPES))
    stream_format = _one_of(request.stream_format, "stream_format", _STREAM_FORMATS)

    task = pipeline.tasks[_TASK]
    stages = pipeline.plan(_TASK, ["text"], ["audio"]).stages
    overrides: dict[str, Params] = {name: {} for name in stages}
    if request.voice is not None:
        name = request.voice.id if isinstance(request.voice, VoiceRef) else request.voice
        voice = find_voice(pipeline, name, "voice")
        for stage in stages:
            if "voice" in pipeline.stages[stage].params:
                overrides[stage]["voice"] = voice
    talker = task.input["text"]
    stretch = 1.0
    if request.speed is not None:
        stretch = request.speed
        if "speed" in pipeline.stages[talker].params:
            overrides[talker]["speed"], stretch = split_speed(request.speed)

    text = request.input
    ask = Ask(
        pipeline=pipeline,
        task=_TASK,
        outputs=["audio"],
        given=[Given("text", Text(text=text), 0, len(text), last=True)],
        seed=fresh_seed() if request.seed is None else request.seed,
        params=build_params(pipeline, stages, overrides),
    )
    return SpeechJob(ask, fmt, stream_format == "sse", stretch, len(text))


def _one_of(value: str | None, field: str, valid: tuple[str, ...]) -> str:
    """`value`, or the first of `valid` for null."""
    if value is None:
        return valid[0]
    if value not in valid:
        raise invalid(f"{field}: {quoted(value)} is not one of {', '.join(valid)}", field)
    return value


class _Sound:
    """The encoded sound of one answer."""

    def __init__(self, job: SpeechJob) -> None:
        self.job = job
        self._samples = 0
        self._rate = job.ask.pipeline.audio_rate

    async def pieces(self, run: Run) -> AsyncGenerator[bytes, None]:
        """Pieces of one container, none empty, at least one. Raises OmniError 400 `nothing_to_speak` for no sound."""
        pipeline, encoder, tempo = self.job.ask.pipeline, None, None
        try:
            async for event in run:
                samples = samples_of(event)
                if not isinstance(event.body, Audio) or not samples.size:
                    continue
                if encoder is None:
                    self._rate = event.body.rate
                    encoder = Encoder(self.job.format, self._rate, stage=pipeline.tasks[_TASK].output["audio"])
                    tempo = Tempo(self._rate, self.job.stretch) if self.job.stretch != 1.0 else None
                if tempo is not None:
                    samples = await tempo.feed(samples)
                self._samples += samples.size
                if samples.size and (data := await encoder.feed(samples)):
                    yield data
            if encoder is not None and tempo is not None:
                samples = await tempo.finish()
                self._samples += samples.size
                if samples.size and (data := await encoder.feed(samples)):
                    yield data
            if encoder is None or not self._samples:
                raise invalid("input has nothing that can be spoken", "input", code="nothing_to_speak")
            if data := await encoder.finish():
                yield data
        finally:
            for owned in (tempo, encoder):
                if owned is not None:
                    await owned.close()

    def usage(self) -> dict[str, int | dict[str, int]]:
        spoken = -(-self._samples * _TOKENS_PER_S // self._rate)
        read = self.job.characters
        return {
            "input_tokens": read,
            "output_tokens": spoken,
            "total_tokens": read + spoken,
            "input_token_details": {"text_tokens": read, "audio_tokens": 0},
        }


@asynccontextmanager
async def _first_of(
    pieces: AsyncGenerator[bytes, None], patience_s: float | None
) -> AsyncIterator["asyncio.Future[bytes]"]:
    """The first piece, which is there unless `patience_s` went by. Raises what came before it."""
    first = asyncio.ensure_future(anext(pieces))
    try:
        await asyncio.wait({first}, timeout=patience_s)
        if first.done():
            first.result()
        yield first
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def _send_bytes(
    request: web.Request, sound: _Sound, first: "asyncio.Future[bytes]", pieces: AsyncIterator[bytes]
) -> web.StreamResponse:
    """Sets ERROR_CODE, and leaves the response without an end, when it cannot be completed."""
    response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPES[sound.job.format]})
    await response.prepare(request)
    try:
        await response.write(await first)
        async for piece in pieces:
            await response.write(piece)
    except ConnectionError:
        raise
    except Exception as exc:
        error = exc if isinstance(exc, OmniError) else internal_error(exc)
        request[ERROR_CODE] = error.code
    else:
        await response.write_eof()
    return response


async def _send_events(
    request: web.Request, sound: _Sound, first: "asyncio.Future[bytes]", pieces: AsyncIterator[bytes]
) -> web.StreamResponse:
    async with sse_response(request, _error_frame) as sse:
        await sse.send(_delta(await first))
        async for piece in pieces:
            await sse.send(_delta(piece))
        await sse.send(_frame({"type": "speech.audio.done", "usage": sound.usage()}))
    return sse.response


def _delta(data: bytes) -> bytes:
    return _frame({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


def _error_frame(error: OmniError) -> bytes:
    return _frame({"type": "speech.audio.error", **error_body(error)})


def _frame(event: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
