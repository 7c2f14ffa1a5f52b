"""A gateway ends while clients keep their connections open."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from omni_gateway import drain
from omni_gateway.drain import Drain


class Server:
    def __init__(self) -> None:
        self.drain = Drain()
        self.go = asyncio.Event()
        self.came = asyncio.Event()
        app = web.Application(middlewares=[self.drain.count])
        app.on_response_prepare.append(self.drain.last_answer)
        app.router.add_get("/quick", self._quick)
        app.router.add_get("/slow", self._slow)
        self.runner = web.AppRunner(app)

    async def _quick(self, request: web.Request) -> web.Response:
        return web.Response(text="quick")

    async def _slow(self, request: web.Request) -> web.Response:
        self.came.set()
        await self.go.wait()
        return web.Response(text="slow")

    def connections(self) -> list[object]:
        assert self.runner.server is not None
        return list(self.runner.server.connections)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.runner.setup()
    yield server
    await server.runner.cleanup()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    site = web.TCPSite(server.runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.runner.addresses[0][1]}") as session:
        yield session


async def test_before_the_end_connections_stay(server: Server, http: aiohttp.ClientSession) -> None:
    async with http.get("/quick") as answer:
        assert answer.headers.get("Connection") != "close"
    assert len(server.connections()) == 1


async def test_every_answer_of_a_draining_gateway_is_the_last_of_its_connection(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "QUIET_S", 60.0)
    async with http.get("/quick"):
        pass
    slow = asyncio.create_task(http.get("/slow"))
    await server.came.wait()
    waiting = asyncio.create_task(server.drain.wait(server.connections, 60.0))
    # Over the connection that was idle; it was not closed under the client.
    async with http.get("/quick") as answer:
        assert answer.headers["Connection"] == "close" and await answer.text() == "quick"
    assert not waiting.done()
    server.go.set()
    async with await slow as answer:
        assert answer.headers["Connection"] == "close" and await answer.text() == "slow"
    async with asyncio.timeout(10.0):
        while server.connections():
            await asyncio.sleep(0.005)
    waiting.cancel()


async def test_an_idle_connection_does_not_hold_it_up(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "QUIET_S", 0.01)
    async with http.get("/quick"):
        pass
    async with asyncio.timeout(10.0):
        await server.drain.wait(server.connections, 60.0)
    assert len(server.connections()) == 1


async def test_a_request_that_takes_too_long_is_not_waited_for(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "QUIET_S", 0.01)
    slow = asyncio.create_task(http.get("/slow"))
    await server.came.wait()
    async with asyncio.timeout(10.0):
        await server.drain.wait(server.connections, 0.1)
    server.go.set()
    async with await slow as answer:
        assert answer.status == 200


async def test_without_connections_there_is_nothing_to_wait_for(server: Server) -> None:
    async with asyncio.timeout(10.0):
        await server.drain.wait(server.connections, 60.0)
