"""`POST /v1/audio/speech`: text to sound, sent while it is made.

The body streams in either form: `stream_format: "audio"` (the default) gives the container's bytes, `"sse"` gives
`speech.audio.delta` events whose `audio`, joined, is the same container, then `speech.audio.done`. Nothing is sent
before the first sound exists, but comments after 10 s without it. An error after the start is a `speech.audio.error`
event, or the connection breaks off: a raw body that ends in order is always whole. `instructions` are accepted and
change nothing: the voices here have one style. `stream` and other fields that OpenAI does not have are ignored, but
for those of `speech_schema.py`.

In `usage` a token of input is a character, and a token of output 50 ms of sound.
"""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
from aiohttp import web

from omni_common.errors import OmniError
from omni_gateway.context import BUS, ERROR_CODE, SETTINGS, VOICES
from omni_gateway.endpoint import decode_body, error_body, find_pipeline, run_stream, sse_response
from omni_gateway.errors import internal_error
from omni_gateway.media.encode import CONTENT_TYPES
from omni_gateway.speech_ask import TASK, build_job
from omni_gateway.speech_reference import References
from omni_gateway.speech_schema import SpeechRequest
from omni_gateway.speech_sound import Sound


def add_routes(app: web.Application) -> None:
    app.router.add_post("/v1/audio/speech", speech)


async def speech(request: web.Request) -> web.StreamResponse:
    body = await decode_body(request, SpeechRequest)
    settings = request.app[SETTINGS]
    pipeline = find_pipeline(request.app[BUS], body.model, TASK, settings.default_pipeline)
    job = await build_job(body, pipeline, References(request.app[VOICES]))
    sound = Sound(job)
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
    request: web.Request, sound: Sound, first: "asyncio.Future[bytes]", pieces: AsyncIterator[bytes]
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
    request: web.Request, sound: Sound, first: "asyncio.Future[bytes]", pieces: AsyncIterator[bytes]
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
