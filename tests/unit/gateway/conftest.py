"""The gateway's application over a rig bus, on a real socket and with the runner that production uses."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from omni_gateway.app import create_app, make_runner
from omni_gateway.context import Settings
from omni_gateway.media.pool import DECODERS, ENCODERS
from unit.gateway.rig_bus import RigBus

Serve = Callable[..., Awaitable[str]]


async def raw_request(url: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which `data` was sent: for clients that stop half-way, or leave."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await writer.drain()
    return reader, writer


def raw_post(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.fixture(scope="session", autouse=True)
def media_threads(no_leak_of_session: None) -> Iterator[None]:
    """All threads of the media pools exist before any test looks, and end with the session."""
    executors = [pool._executor for pool in (ENCODERS, DECODERS)]
    for executor in executors:
        barrier = threading.Barrier(executor._max_workers + 1)
        for _ in range(executor._max_workers):
            executor.submit(barrier.wait, 5.0)
        barrier.wait(5.0)
    yield
    for executor in executors:
        executor.shutdown()


@pytest.fixture
def bus() -> RigBus:
    return RigBus()


@pytest_asyncio.fixture
async def serve(no_task_left: None, bus: RigBus) -> AsyncIterator[Serve]:
    """`await serve(settings)` gives the base URL of a listening application over `bus`."""
    runners: list[web.AppRunner] = []

    async def start(settings: Settings | None = None) -> str:
        runner = make_runner(create_app(bus, settings or Settings()), shutdown_s=1.0)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest_asyncio.fixture
async def url(serve: Serve) -> str:
    """Base URL of an application with the default settings."""
    return await serve()


@pytest_asyncio.fixture
async def http(no_task_left: None) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
