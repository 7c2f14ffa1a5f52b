"""What the endpoint modules share: read a body, find the pipeline, complete the parameters, follow a request."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from omni_common.errors import OmniError, invalid
from omni_common.frames import Audio, Params, Text, Transcript
from omni_common.params import check_params
from omni_common.pipeline import Pipeline
from omni_gateway.context import ARRIVED, BUS, ERROR_CODE, METRICS, RUN_ID, SETTINGS, Settings
from omni_gateway.errors import error_body, internal_error, quoted, shorten
from omni_gateway.media.pool import DECODERS
from omni_gateway.stream import Ask, Bus, Event, Stream

__all__ = [
    "EventStream",
    "Run",
    "Samples",
    "build_params",
    "decode_body",
    "error_body",
    "find_pipeline",
    "find_voice",
    "fresh_seed",
    "read_body",
    "receiving",
    "run_stream",
    "samples_of",
    "sse_response",
]

T = TypeVar("T")
Samples = np.ndarray[Any, np.dtype[np.float32]]
_NO_SAMPLES: Samples = np.zeros(0, np.float32)
#: Most values in a JSON body: 64 MiB of empty lists are 22 million objects, more than a gigabyte and seconds of the
#: event loop. A body of this many is decoded within some tens of milliseconds.
_VALUES = 250_000
_SCAN_BYTES = 1 << 20
#: Seconds beyond a request's own deadline in which its last words must have reached the client.
_LAST_WORDS_S = 5.0

# ------------------------------------------------------------------------------------------------------ the request


@asynccontextmanager
async def receiving(request: web.Request) -> AsyncIterator[Settings]:
    """The block that reads the body, which has `body_timeout_s` for it.

    Raises OmniError 415 for a compressed body, 413 for one that says to be larger than `max_body_bytes`, 408.
    """
    settings = request.app[SETTINGS]
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        text = f"Content-Encoding {quoted(encoding)} is not supported; send the body as it is."
        raise invalid(text, "Content-Encoding", code="unsupported_encoding", status=415)
    if (request.content_length or 0) > settings.max_body_bytes:
        raise invalid("The request body is too large.", code="body_too_large", status=413)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            yield settings
    except TimeoutError:
        raise invalid("The request body took too long to arrive.", code="request_timeout", status=408) from None


async def read_body(request: web.Request) -> bytes:
    """The whole body, of at most `max_body_bytes` and within `body_timeout_s`. Raises OmniError 415, 413, 408."""
    async with receiving(request):
        return await request.read()


async def decode_body(request: web.Request, kind: type[T]) -> T:
    """The JSON body as `kind`.

    Raises OmniError 415, 413, 408, and 400 for what is not JSON (lone surrogates and invalid UTF-8 included) or does
    not fit `kind`; `param` is then the path of the field, as in `messages[0].content[1].type`.
    """
    if "Content-Type" in request.headers and request.content_type != "application/json":
        raise invalid("The body must be application/json.", code="unsupported_media_type", status=415)
    body = await read_body(request)
    if len(body) <= _SCAN_BYTES:
        return _decode(body, kind)
    # Many at once would be one turn of the loop.
    return await DECODERS.run(_decode, body, kind)


def _decode(body: bytes, kind: type[T]) -> T:
    _check_values(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        # A value in a mapping, whose key is not told.
        path = path.rstrip("`").removesuffix("[...]")
        code = "invalid_type" if text.startswith("Expected") else "invalid_value"
        if text.startswith("Expected `array` of length <="):
            code = "array_above_max_length"
        if "missing required field" in text:
            code, path = "missing_required_parameter", f"{path}.{text.split('`')[1]}"
        raise invalid(
            f"{path.lstrip('.') or 'body'}: {shorten(text, 200)}", path.lstrip(".") or None, code=code
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"The body is not valid JSON: {shorten(str(error), 200)}", code="invalid_json") from None


def _check_values(body: bytes) -> None:
    """Raises OmniError 413 for more than `_VALUES` values; the marks before them count, wherever they stand."""
    values = 0
    for start in range(0, len(body), _SCAN_BYTES):
        values += sum(body.count(mark, start, start + _SCAN_BYTES) for mark in (b",", b"[", b"{"))
        if values > _VALUES:
            text = f"The body has too many values: more than {_VALUES} commas and opening brackets."
            raise invalid(text, code="body_too_large", status=413)


def fresh_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(32)


# ----------------------------------------------------------------------------------------------------- the pipeline


def find_pipeline(bus: Bus, model: str | None, task: str, default: str = "") -> Pipeline:
    """The pipeline that `model` (a name or an alias) means and that serves `task`.

    Without a model: `default` if it serves the task, else the first that does. Raises OmniError 404
    `model_not_found` for an unknown model, 400 for one that does something else; `param` is `model`.
    """
    serving = [p for p in bus.pipelines.values() if task in p.tasks]
    if not model:
        serving.sort(key=lambda p: p.name != default)
        if not serving:
            raise invalid(f"No model here does {task}.", "model", code="model_not_found", status=404)
        return serving[0]
    named = [p for p in bus.pipelines.values() if model == p.name] or [
        p for p in bus.pipelines.values() if model in p.aliases
    ]
    for pipeline in [*named, *(p for p in serving if model in p.aliases)]:
        if task in pipeline.tasks:
            return pipeline
    names = ", ".join(p.name for p in serving) or "none"
    if named:
        raise invalid(f"The model {quoted(model)} does not do {task}; these do: {names}.", "model")
    text = f"The model {quoted(model)} does not exist; for {task} there are: {names}."
    raise invalid(text, "model", code="model_not_found", status=404)


def find_voice(pipeline: Pipeline, name: str, param: str) -> str:
    """The id of the voice that `name` (an id or an alias, in any case) means.

    Raises OmniError 400 that lists the valid ids.
    """
    wanted = name.casefold()
    for voice in pipeline.voices:
        if wanted in (voice.id.casefold(), *(a.casefold() for a in voice.aliases)):
            return voice.id
    valid = ", ".join(v.id for v in pipeline.voices) or "none"
    raise invalid(f"Unknown voice {quoted(name)}; voices of {pipeline.name}: {valid}.", param)


def build_params(
    pipeline: Pipeline,
    stages: Iterable[str],
    overrides: Mapping[str, Params],
    where: Mapping[str, str] | None = None,
) -> dict[str, Params]:
    """Complete, checked parameters of each of `stages`: the request's `overrides` over the YAML's defaults.

    `where` gives, by stage, the JSON path that its overrides came from (empty: the top of the body). Raises OmniError
    400 with the path of the offending key.
    """
    complete: dict[str, Params] = {}
    for name in stages:
        stage = pipeline.stages[name]
        params: Params = {**stage.params, **overrides.get(name, {})}
        place = (where or {}).get(name, "")
        try:
            checked = check_params(stage.engine, params, place)
        except OmniError as error:
            message = shorten(error.message.lstrip("."), 300)
            raise invalid(message, (error.param or "").lstrip(".") or None) from None
        complete[name] = msgspec.to_builtins(checked)
    return complete


# ------------------------------------------------------------------------------------------------------- the answer


def samples_of(event: Event) -> Samples:
    """The sound of an audio event, float32 [n]; empty when it only says that it is the last."""
    return event.arrays.get("samples", _NO_SAMPLES)


class Run:
    """One admitted request: iterate over its events, which are counted and timed on the way."""

    def __init__(self, request: web.Request, ask: Ask, stream: Stream) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._events = aiter(stream)
        self._early: asyncio.Task[Event | None] | None = None
        self._arrived = request[ARRIVED]
        self._metrics = request.app[METRICS]
        self._labels = (ask.pipeline.name, ask.task)
        self._rate = ask.pipeline.audio_rate
        self._text_seen = False
        self._samples = 0

    @property
    def ready(self) -> bool:
        """Another event is here already."""
        return self._early is None and self._stream.ready

    def __aiter__(self) -> "Run":
        return self

    async def __anext__(self) -> Event:
        if self._early is None:
            event = await anext(self._events)
        else:
            early = await self._early
            self._early = None
            if early is None:
                raise StopAsyncIteration
            event = early
        body = event.body
        if isinstance(body, Audio):
            samples = len(samples_of(event))
            if samples and not self._samples:
                self._metrics.first_audio.labels(*self._labels).observe(self._elapsed())
            self._samples += samples
        elif not self._text_seen and (
            (isinstance(body, Text) and body.text) or (isinstance(body, Transcript) and body.segments)
        ):
            self._text_seen = True
            self._metrics.first_text.labels(*self._labels).observe(self._elapsed())
        return event

    async def wait_first(self, timeout_s: float | None) -> None:
        """Until the first event is here, or `timeout_s` is over. Raises what the request failed with before it."""
        self._early = asyncio.ensure_future(self._next())
        done, _ = await asyncio.wait({self._early}, timeout=timeout_s)
        if done:
            self._early.result()

    def completed(self) -> None:
        """Observe the whole answer's time and real-time factor."""
        elapsed = self._elapsed()
        self._metrics.total.labels(*self._labels).observe(elapsed)
        if self._samples:
            self._metrics.real_time_factor.labels(*self._labels).observe(elapsed * self._rate / self._samples)

    async def aclose(self) -> None:
        """Cancel the request if it still runs."""
        if self._early is not None:
            self._early.cancel()
            await asyncio.gather(self._early, return_exceptions=True)
        if isinstance(self._events, AsyncGenerator):
            await self._events.aclose()
        await self._stream.aclose()

    async def _next(self) -> Event | None:
        return await anext(self._events, None)

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._arrived


@asynccontextmanager
async def run_stream(request: web.Request, ask: Ask, *, patience_s: float | None = None) -> AsyncIterator[Run]:
    """Submit `ask` and give its `Run` once the first event is here; whatever happens, the request ends with the block.

    An error before that raises, so its status is honest. `patience_s` (event streams: `Settings.keep_alive_s`) gives
    the run sooner, so that comments can keep the connection open; errors are then told in band.
    """
    stream = await request.app[BUS].submit(ask)
    request[RUN_ID] = stream.request_id
    run = Run(request, ask, stream)
    try:
        async with _let_go_after(request, ask.pipeline.limits.total_s + _LAST_WORDS_S):
            await run.wait_first(patience_s)
            yield run
        if ERROR_CODE not in request:
            run.completed()
    finally:
        await run.aclose()


@asynccontextmanager
async def _let_go_after(request: web.Request, seconds: float) -> AsyncIterator[None]:
    """A client that takes nothing could hold its request for ever; nothing can be told to it, so it is cut off."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client did not read its answer") from None


class EventStream:
    """An open `text/event-stream` response; a comment goes out whenever nothing else has for `keep_alive_s`."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # nginx would collect the stream otherwise.
                "X-Accel-Buffering": "no",
            }
        )
        self._request = request
        self._keep_alive_s = request.app[SETTINGS].keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._sending = False
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self.response.prepare(self._request)
        self._keeper = asyncio.create_task(self._keep_alive())

    async def send(self, data: bytes) -> None:
        """Write one whole event, or several. Returns when the client has taken enough of what was written before."""
        self._sending = True
        await self.response.write(data)
        self._sending = False
        self._last = self._loop.time()

    async def finish(self) -> None:
        await self.close()
        await self.response.write_eof()

    async def fail(self, frame: bytes, code: str) -> None:
        """Tell an error in band. The connection stays: closed unannounced, it would fail the client's next call."""
        self._request[ERROR_CODE] = code
        await self.send(frame)

    async def close(self) -> None:
        """No more comments. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(max(self._last + self._keep_alive_s - self._loop.time(), 0.001))
            if not self._sending and self._loop.time() - self._last >= self._keep_alive_s:
                await self.send(b": keep-alive\n\n")


def error_frame(error: OmniError) -> bytes:
    """An error inside a stream, as openai-python looks for it."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"


@asynccontextmanager
async def sse_response(
    request: web.Request, frame: Callable[[OmniError], bytes] = error_frame
) -> AsyncIterator[EventStream]:
    """Headers out, then an `EventStream` to send on; return its `.response` after the block.

    An error inside the block becomes one `frame` and the end of the stream: no `[DONE]`, no finish reason.
    """
    events = EventStream(request)
    await events.open()
    try:
        try:
            yield events
        except OmniError as error:
            await events.fail(frame(error), error.code)
        except ConnectionError:
            raise
        except Exception as exc:
            failure = internal_error(exc)
            await events.fail(frame(failure), failure.code)
        await events.finish()
    finally:
        await events.close()
