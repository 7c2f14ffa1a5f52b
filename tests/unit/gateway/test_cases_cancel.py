"""Cases of clients that leave before anything is asked for, senders that are slow or lie, and uploads beyond number."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from omni_common.errors import OmniError
from omni_gateway import endpoint
from omni_gateway.context import Settings
from omni_gateway.media import decode
from omni_gateway.media.encode import encode
from omni_gateway.media.graph import Samples
from omni_gateway.media.pool import DECODERS
from unit.gateway.conftest import Serve, raw_post, raw_request
from unit.gateway.rig_bus import RigBus

CHAT, SPEECH, FORM = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
PATIENCE_S = 20.0


@pytest.fixture
async def sound() -> bytes:
    return await encode(np.zeros(24_000, np.float32), "wav", 24_000)


def heard(sound: bytes) -> dict[str, Any]:
    """A question by voice."""
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}
    return {"messages": [{"role": "user", "content": [part]}]}


def form_of(sound: bytes, stream: bool) -> tuple[bytes, str]:
    """A body, and its type."""
    parts = [
        b'name="stream"\r\n\r\n' + (b"true" if stream else b"false"),
        b'name="file"; filename="a.wav"\r\n\r\n' + sound,
    ]
    lines = [b"--X\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts]
    return b"".join(lines) + b"--X--\r\n", "multipart/form-data; boundary=X"


def raw_form(sound: bytes, stream: bool) -> bytes:
    body, kind = form_of(sound, stream)
    head = f"POST {FORM} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def every_request(sound: bytes) -> list[bytes]:
    """Each route, whole and streamed."""
    speech = {"input": "hello there", "response_format": "pcm"}
    return [
        raw_post(CHAT, HI),
        raw_post(CHAT, {**HI, "stream": True, "audio": {"format": "mp3"}}),
        raw_post(SPEECH, {**speech, "stream_format": "audio"}),
        raw_post(SPEECH, {**speech, "stream_format": "sse"}),
        raw_form(sound, False),
        raw_form(sound, True),
    ]


async def told(bus: RigBus, **figures: int) -> None:
    """Until these fields of the rig have these values, or so many members."""

    def value(name: str) -> int:
        found = getattr(bus, name)
        return found if isinstance(found, int) else len(found)

    await bus.until(lambda _: all(value(name) == figure for name, figure in figures.items()))


# ------------------------------------------------------------------------------------------------ clients that leave


async def test_who_leaves_the_queue_or_before_the_first_event_is_forgotten_on_every_route(
    url: str, bus: RigBus, sound: bytes
) -> None:
    """B042, B044: nothing was written to these clients yet, so nobody would notice by writing."""
    for number, request in enumerate(every_request(sound), 1):
        bus.admit = asyncio.Event()
        _, writer = await raw_request(url, request)
        await told(bus, asks=2 * number - 1)
        writer.close()
        await told(bus, left_queue=number)
        bus.admit, bus.gates = None, {0: asyncio.Event()}
        _, writer = await raw_request(url, request)
        await told(bus, open=1)
        writer.close()
        await told(bus, cancelled=number)
        assert not bus.open and not bus.events_given
    assert bus.completed == bus.failed == 0


async def test_a_full_queue_is_429_on_every_route(url: str, bus: RigBus, sound: bytes) -> None:
    """B047: with the time after which to ask again, and no stream is begun for it."""
    bus.refusal = OmniError("full", status=429, code="queue_full", retry_after_s=1.5)
    for request in every_request(sound):
        reader, writer = await raw_request(url, request.replace(b"Host: x", b"Host: x\r\nConnection: close", 1))
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 429 ") and b"\r\nRetry-After: 2\r\n" in answer
        assert b'"code":"queue_full"' in answer and b"event-stream" not in answer
        writer.close()


# ---------------------------------------------------------------------------------------------------- media decoding


class Decoding:
    """Stands in for the decoder: every upload waits in its thread until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = 0
        self.most = 0
        self.stopped = 0
        self._now = 0
        self._lock = threading.Lock()

    def run(self, job: decode._Job) -> Samples:
        with self._lock:
            self.begun += 1
            self._now += 1
            self.most = max(self.most, self._now)
        self.go.wait(PATIENCE_S)
        with self._lock:
            self._now -= 1
            self.stopped += job.stopped.is_set()
        return np.zeros(16_000, np.float32)

    async def until(self, begun: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.begun < begun:
                await asyncio.sleep(0.005)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    stand_in = Decoding()
    monkeypatch.setattr(decode._Job, "run", lambda job: stand_in.run(job))
    yield stand_in
    stand_in.go.set()


THREADS = DECODERS._executor._max_workers


async def test_uploads_are_decoded_a_few_at_a_time_and_beside_the_loop(
    url: str, http: aiohttp.ClientSession, bus: RigBus, sound: bytes, decoding: Decoding
) -> None:
    """B049: while every decoder is busy and others wait for one, health, models and requests without media answer."""
    bodies = [raw_post(CHAT, heard(sound)), raw_form(sound, False)] * 10
    connections = [await raw_request(url, body) for body in bodies]
    await decoding.until(THREADS)
    for path in ("/health/live", "/health/ready", "/v1/models", "/metrics"):
        async with asyncio.timeout(PATIENCE_S), http.get(url + path) as response:
            assert response.status == 200
    async with asyncio.timeout(PATIENCE_S), http.post(url + CHAT, json=HI) as response:
        assert response.status == 200
    assert len(bus.asks) == 1 and decoding.begun == THREADS
    decoding.go.set()
    for reader, writer in connections:
        assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert decoding.begun == len(bodies) and decoding.most <= THREADS


async def test_who_leaves_while_its_upload_is_decoded_or_waits_for_that_asks_for_nothing(
    url: str, http: aiohttp.ClientSession, bus: RigBus, sound: bytes, decoding: Decoding
) -> None:
    """B042: what is being decoded is told to stop, what waits is never begun."""
    connections = [await raw_request(url, raw_post(CHAT, heard(sound))) for _ in range(THREADS)]
    await decoding.until(THREADS)
    connections += [await raw_request(url, raw_form(sound, False)) for _ in range(5)]
    name = f'omni_requests_in_flight{{route="{FORM}"}} '
    await gauge(http, url, name, 5)
    for _, writer in connections:
        writer.close()
    for route in (CHAT, FORM):
        await gauge(http, url, f'omni_requests_in_flight{{route="{route}"}} ', 0)
    decoding.go.set()
    async with http.post(url + CHAT, json=heard(sound)) as response:
        assert response.status == 200
    assert decoding.begun == THREADS + 1 and decoding.stopped == THREADS
    assert len(bus.asks) == 1


async def gauge(http: aiohttp.ClientSession, url: str, name: str, value: int) -> None:
    """Until the sample `name` is `value`."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get(url + "/metrics") as response:
                if f"{name}{float(value)}" in (await response.text()).splitlines():
                    return
            await asyncio.sleep(0.005)


async def test_more_uploads_than_can_wait_for_a_decoder_are_refused(
    url: str, bus: RigBus, sound: bytes, decoding: Decoding
) -> None:
    """B047: each of them holds its whole body, so their queue has an end as every other."""
    connections = [await raw_request(url, raw_form(sound, False)) for _ in range(300)]
    answers = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in connections]
    try:
        done, _ = await asyncio.wait(answers, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert done and all(task.result().startswith(b"HTTP/1.1 429 ") for task in done)
        assert all(b"\r\nRetry-After: " in task.result() for task in done)
        decoding.go.set()
        async with asyncio.timeout(PATIENCE_S):
            statuses = [answer.split()[1] for answer in await asyncio.gather(*answers)]
        assert statuses.count(b"200") == len(bus.asks) >= THREADS
        assert statuses.count(b"429") == 300 - len(bus.asks)
    finally:
        decoding.go.set()
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        for _, writer in connections:
            writer.close()


# ------------------------------------------------------------------------------------------------------ slow senders


@pytest.mark.parametrize("path", [CHAT, SPEECH, FORM])
async def test_a_body_that_drips_has_one_deadline_for_all_of_it(serve: Serve, bus: RigBus, path: str) -> None:
    """B084: every byte comes in good time, the whole never."""
    url = await serve(Settings(body_timeout_s=0.2))
    kind = "multipart/form-data; boundary=X" if path == FORM else "application/json"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 100000\r\n\r\n"
    begin = (
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' if path == FORM else b'{"input":"'
    )
    reader, writer = await raw_request(url, head.encode() + begin)
    answer = asyncio.create_task(reader.readline())
    dripped = 0
    async with asyncio.timeout(PATIENCE_S):
        while not answer.done():
            writer.write(b"a")
            dripped += 1
            await asyncio.sleep(0.01)
    assert b" 408 " in await answer
    assert dripped > 3 and not bus.asks
    writer.close()


@pytest.mark.parametrize(("stated", "status"), [(-40, b" 400 "), (0, b" 200 ")])
async def test_a_length_that_is_too_short_is_a_body_cut_short(
    url: str, bus: RigBus, stated: int, status: bytes
) -> None:
    """B084: what stands behind it is no request, and nothing of either is asked for."""
    head, _, body = raw_post(CHAT, HI).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    lines.append(f"Content-Length: {len(body) + stated}".encode())
    reader, writer = await raw_request(url, b"\r\n".join(lines) + b"\r\n\r\n" + body)
    assert status in await asyncio.wait_for(reader.readline(), PATIENCE_S)
    assert len(bus.asks) == (stated == 0)
    writer.close()


async def test_a_length_that_is_too_long_is_no_request_when_its_sender_is_gone(
    url: str, http: aiohttp.ClientSession, bus: RigBus
) -> None:
    """B084: a sender that leaves in the middle of its body is no error of ours, and holds nothing."""
    for path in (CHAT, SPEECH, FORM):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
        if path == FORM:
            head = head.replace("application/json", "multipart/form-data; boundary=X")
        _, writer = await raw_request(url, head.encode() + b"{")
        name = f'omni_requests_in_flight{{route="{path}"}} '
        await gauge(http, url, name, 1)
        writer.close()
        await gauge(http, url, name, 0)
    assert not bus.asks


async def test_a_stream_of_bytes_without_a_length_is_bounded_as_it_comes(serve: Serve, bus: RigBus) -> None:
    """B084: refused after the limit, not after the end, which does not come."""
    url = await serve(Settings(max_body_bytes=50_000))

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 4096
            await asyncio.sleep(0)

    for path in (CHAT, SPEECH):
        # A connection of its own: the server closes it.
        async with aiohttp.ClientSession() as session:
            headers = {"Content-Type": "application/json"}
            try:
                async with asyncio.timeout(PATIENCE_S):
                    async with session.post(url + path, data=endless(), headers=headers) as response:
                        assert response.status == 413
            except aiohttp.ClientConnectionError:
                # It was still sending when the connection was closed under it.
                pass
    assert not bus.asks


# --------------------------------------------------------------------------------------------------------- large bodies


async def test_large_bodies_are_unpacked_beside_the_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B049: JSON and base64 of many that come in one instant would be one turn of the loop, without a health check."""
    where: dict[str, int] = {}

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            where[name] = threading.get_ident()
            return call(*args, **kwargs)

        return noted

    request = raw_post(CHAT, heard(bytes(900 << 10)))
    monkeypatch.setattr(endpoint, "_check_values", noting("json", endpoint._check_values))
    monkeypatch.setattr(base64, "b64decode", noting("base64", base64.b64decode))
    reader, writer = await raw_request(url, request.replace(b"Host: x", b"Host: x\r\nConnection: close", 1))
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_audio"' in answer
    writer.close()
    assert where.keys() == {"json", "base64"}
    assert threading.get_ident() not in where.values()
