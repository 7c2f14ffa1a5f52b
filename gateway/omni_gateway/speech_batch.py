"""`POST /v1/audio/speech/batch`: up to 32 texts at once, each answered with a whole file or with an error of its own.

The fields of an item are those of `/v1/audio/speech`; what the batch says holds for every item that does not say it
itself. Items are separate requests to the pipeline, all at once: how many really run is the scheduler's to say.
"""

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from omni_common.errors import OmniError, invalid
from omni_gateway.context import BUS, ERROR_CODE, SETTINGS, VOICES
from omni_gateway.endpoint import Run, decode_body, error_body, find_pipeline, run_stream, samples_of
from omni_gateway.errors import internal_error
from omni_gateway.media.encode import CONTENT_TYPES
from omni_gateway.speech_ask import TASK, build_job
from omni_gateway.speech_reference import References
from omni_gateway.speech_schema import SpeechFields, SpeechRequest
from omni_gateway.speech_sound import Sound
from omni_gateway.stream import Event

#: Seconds of sound in one answer, which lies in memory until its last item is done.
_SOUND_S = 3600.0
#: Fields that say who speaks: an item that names its own speaker has none of the batch's.
_SPEAKER = frozenset({"voice", "ref_audio", "ref_text", "references"})


class SpeechBatch(SpeechFields, kw_only=True):
    items: Annotated[list[SpeechRequest], Meta(min_length=1, max_length=32)]


class _Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    status: Literal["success", "error"]
    #: Base64 of a whole file, and its type.
    audio_data: str | None = None
    media_type: str | None = None
    #: OpenAI's `{"message", "type", "param", "code"}`; `param` is the item's field.
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    id: str
    #: In the order of the items.
    results: list[msgspec.Raw]
    total: int
    succeeded: int
    failed: int


def add_routes(app: web.Application) -> None:
    app.router.add_post("/v1/audio/speech/batch", speech_batch)


async def speech_batch(request: web.Request) -> web.Response:
    body = await decode_body(request, SpeechBatch)
    _refuse_streams(body, "")
    for index, item in enumerate(body.items):
        _refuse_streams(item, f"items[{index}].")
    # A model that is wrong for all items is no item's fault.
    find_pipeline(request.app[BUS], body.model, TASK, request.app[SETTINGS].default_pipeline)
    batch = _Batch(request)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(batch.result(i, merged(item, body))) for i, item in enumerate(body.items)]
    except ExceptionGroup as lost:
        raise lost.exceptions[0] from None
    if batch.errors:
        request[ERROR_CODE] = batch.errors[0]
    answer = _Answer(
        id=f"speech-batch-{uuid.uuid4().hex}",
        results=[task.result() for task in tasks],
        total=len(tasks),
        succeeded=len(tasks) - len(batch.errors),
        failed=len(batch.errors),
    )
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def merged(item: SpeechRequest, batch: SpeechBatch) -> SpeechRequest:
    """`item` with what the batch says of all."""
    own = {name for name in SpeechFields.__struct_fields__ if getattr(item, name) is not None}
    if own & (_SPEAKER - {"ref_text"}):
        own |= _SPEAKER
    return msgspec.structs.replace(
        item, **{name: getattr(batch, name) for name in SpeechFields.__struct_fields__ if name not in own}
    )


def _refuse_streams(fields: SpeechFields, where: str) -> None:
    for name in ("stream", "stream_format"):
        if getattr(fields, name) not in (None, False):
            text = f"{where}{name} is not supported in a batch, which is answered as a whole"
            raise invalid(text, where + name, code="unsupported_parameter")


class _Batch:
    """What the items of one request share."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._references = References(request.app[VOICES])
        self._left_s = _SOUND_S
        #: Codes of those that failed.
        self.errors: list[str] = []

    async def result(self, index: int, item: SpeechRequest) -> msgspec.Raw:
        """One item's part of the answer, encoded by itself so that none of them is a long turn of the event loop.

        Raises ConnectionError alone: there is nobody to answer.
        """
        try:
            result = await self._spoken(index, item)
        except ConnectionError:
            raise
        except Exception as exc:
            error = exc if isinstance(exc, OmniError) else internal_error(exc)
            self.errors.append(error.code)
            result = _Result(index=index, status="error", error=error_body(error)["error"])
        return msgspec.Raw(msgspec.json.encode(result))

    async def _spoken(self, index: int, item: SpeechRequest) -> _Result:
        app = self._request.app
        pipeline = find_pipeline(app[BUS], item.model, TASK, app[SETTINGS].default_pipeline)
        job = await build_job(item, pipeline, self._references)
        sound = Sound(job, whole=True)
        async with (
            run_stream(self._request, job.ask) as run,
            aclosing(sound.pieces(self._metered(run, pipeline.audio_rate))) as pieces,
        ):
            data = b"".join([piece async for piece in pieces])
        return _Result(
            index=index,
            status="success",
            audio_data=base64.b64encode(data).decode(),
            media_type=CONTENT_TYPES[job.format],
            usage=sound.usage(),
        )

    async def _metered(self, run: Run, rate: int) -> AsyncIterator[Event]:
        """Raises OmniError 400 `audio_too_long` once the items together have more sound than an answer takes."""
        async for event in run:
            self._left_s -= samples_of(event).size / rate
            if self._left_s < 0:
                raise invalid(f"the items have more than {_SOUND_S:g} s of sound in all", code="audio_too_long")
            yield event
