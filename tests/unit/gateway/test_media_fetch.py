"""Media at addresses: what is fetched, what is never asked, what is told of it."""

import asyncio
import base64
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from omni_common.errors import OmniError
from omni_gateway.media import fetch as module
from omni_gateway.media.fetch import Address, Fetcher, is_public
from omni_gateway.media.inline import decode_base64, decode_data_url

PARAM = "messages[0].content[0].image_url.url"
HOME = ipaddress.ip_address("127.0.0.1")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def at_home(address: Address) -> bool:
    """The rule that the tests need; 127.0.0.2 takes the place of what is inside."""
    return address == HOME


class Origin:
    """A server, and how many connections and requests it saw."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.requests: list[web.BaseRequest] = []
        self.answer: Handler | None = None
        self.connections = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        assert self.answer is not None
        return await self.answer(request)  # type: ignore[arg-type]


async def listen(host: str, stack: AsyncExitStack, port: int = 0) -> Origin:
    origin = Origin("")

    class Counting(web.Server):
        def __call__(self) -> Any:
            origin.connections += 1
            return super().__call__()

    runner = web.ServerRunner(Counting(origin.handle, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port).start()
    origin.base = f"http://{host}:{runner.addresses[0][1]}"
    return origin


@pytest_asyncio.fixture
async def servers(no_task_left: None) -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest_asyncio.fixture
async def origin(servers: AsyncExitStack) -> Origin:
    return await listen("127.0.0.1", servers)


@pytest_asyncio.fixture
async def inside(servers: AsyncExitStack) -> Origin:
    """A server that nothing may reach."""
    return await listen("127.0.0.2", servers)


def body(data: bytes, status: int = 200, **headers: str) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=data, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


async def fetched(url: str, fetcher: Fetcher | None = None, max_bytes: int = 1000, within_s: float = 5.0) -> bytes:
    fetcher = fetcher or Fetcher(allowed=at_home)
    return await fetcher.fetch(url, "image", max_bytes=max_bytes, within_s=within_s, param=PARAM)


async def refused(url: str, code: str = "fetch_failed", status: int = 400, **options: Any) -> OmniError:
    with pytest.raises(OmniError) as raised:
        await fetched(url, **options)
    assert (raised.value.code, raised.value.status) == (code, status), raised.value
    if status != 429:
        assert raised.value.param == PARAM
    return raised.value


# ------------------------------------------------------------------------------------------------------------ fetched


async def test_a_body_whatever_its_type(origin: Origin) -> None:
    for kind in ("text/html", "nonsense", ""):
        origin.answer = body(b"pixels", Content_Type=kind)
        assert await fetched(f"{origin.base}/a%20b?c=d%26e#f") == b"pixels"
    assert str(origin.requests[0].rel_url) == "/a%20b?c=d%26e"
    sent = origin.requests[0].headers
    assert sent["Accept-Encoding"] == "identity" and "Cookie" not in sent and "Referer" not in sent
    assert (await fetched(origin.base.replace("http://", "HTTP://"))) == b"pixels"


async def test_a_body_of_no_stated_length(origin: Origin) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for _ in range(10):
            await response.write(b"x" * 100)
        return response

    origin.answer = answer
    assert await fetched(origin.base) == b"x" * 1000
    await refused(origin.base, "image_too_large", 413, max_bytes=999)


async def test_redirects(origin: Origin) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        left = int(request.query["left"])
        if not left:
            return web.Response(body=b"there")
        status = (301, 302, 303, 307, 308)[left % 5]
        return web.Response(status=status, headers={"Location": f"?left={left - 1}"})

    origin.answer = answer
    assert await fetched(f"{origin.base}/x?left=3") == b"there"
    assert [str(request.rel_url) for request in origin.requests] == [f"/x?left={left}" for left in (3, 2, 1, 0)]
    await refused(f"{origin.base}/x?left=4")
    assert len(origin.requests) == 8


async def test_hosts_that_are_listed(origin: Origin) -> None:
    origin.answer = body(b"pixels")
    assert await fetched(origin.base, Fetcher({"127.0.0.1"}, allowed=at_home)) == b"pixels"
    await refused(origin.base, "invalid_url", fetcher=Fetcher({"example.com"}, allowed=at_home))
    origin.answer = body(b"", 302, Location="http://example.org/")
    await refused(origin.base, "invalid_url", fetcher=Fetcher({"127.0.0.1"}, allowed=at_home))
    # Being listed is no way around the rule.
    before = origin.connections
    await refused(origin.base, fetcher=Fetcher({"127.0.0.1"}))
    assert origin.connections == before


# ---------------------------------------------------------------------------------------------------- never connected


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "100.100.100.200", "192.0.0.192", "198.18.0.1", "192.0.2.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
     "255.255.255.255", "168.63.129.16", "192.88.99.1", "::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8",
     "::ffff:169.254.169.254", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:4136:e378::1",
     "fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "3fff::1", "100::1", "5f00::1"],
)  # fmt: skip
def test_what_is_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::200e"])
def test_what_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "2130706433", "127.1", "0x7f000001", "0x7f.1", "017700000001", "0.0.0.0", "0", "localhost",
     "LOCALHOST.", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "127.0.0.1.", "%31%32%37.0.0.1",
     "①②⑦.0.0.1", "[::1%25lo]"],
)  # fmt: skip
async def test_no_way_of_writing_it_leads_home(origin: Origin, host: str) -> None:
    """B079"""
    port = origin.base.rpartition(":")[2]
    with pytest.raises(OmniError) as raised:
        await fetched(f"http://{host}:{port}/secret", Fetcher())
    assert raised.value.code in ("fetch_failed", "invalid_url") and raised.value.param == PARAM
    assert not origin.connections


async def test_a_redirect_does_not_lead_inside(origin: Origin, inside: Origin) -> None:
    """B079"""
    port = inside.base.rpartition(":")[2]
    for location in (inside.base, f"//127.0.0.2:{port}/", f"http://[::ffff:127.0.0.2]:{port}/"):
        origin.answer = body(b"", 302, Location=location)
        await refused(origin.base)
    for location in ("file:///etc/passwd", "ftp://127.0.0.1/", "http://user:word@127.0.0.1/", "data:,x"):
        origin.answer = body(b"", 302, Location=location)
        assert "passwd" not in (await refused(origin.base, "invalid_url")).message
    assert len(origin.requests) == 7 and not inside.connections


async def test_a_name_that_leads_home_and_elsewhere_is_not_asked_at_all(
    servers: AsyncExitStack, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B079"""
    port = int(origin.base.rpartition(":")[2])
    inside = await listen("127.0.0.2", servers, port)
    origin.answer = inside.answer = body(b"pixels")
    addresses = [["127.0.0.1", "127.0.0.2"], ["127.0.0.2"], ["::ffff:127.0.0.2"]]

    def answers(host: str, _port: int, *_: Any, **__: Any) -> list[Any]:
        assert host == "rebind.example"
        family = [socket.AF_INET6 if ":" in a else socket.AF_INET for a in addresses[0]]
        tails: list[tuple[Any, ...]] = [(port, 0, 0) if ":" in a else (port,) for a in addresses[0]]
        return [
            (f, socket.SOCK_STREAM, 6, "", (a, *tail)) for f, a, tail in zip(family, addresses[0], tails, strict=True)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    while addresses:
        await refused(f"http://rebind.example:{port}/")
        addresses.pop(0)
    assert not origin.connections and not inside.connections


async def test_a_name_that_changes_its_mind_is_asked_once(
    servers: AsyncExitStack, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B079: the connection goes to the address that was checked, not to what the name means by then."""
    port = int(origin.base.rpartition(":")[2])
    inside = await listen("127.0.0.2", servers, port)
    turns: list[str] = ["127.0.0.1", "127.0.0.2", "127.0.0.2"]

    def answers(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (turns.pop(0), port))]

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    origin.answer = body(b"pixels")
    assert await fetched(f"http://rebind.example:{port}/") == b"pixels"
    assert turns == ["127.0.0.2", "127.0.0.2"]
    # A redirect to itself asks anew, and is refused now.
    turns.insert(0, "127.0.0.1")
    origin.answer = body(b"", 302, Location="/again")
    await refused(f"http://rebind.example:{port}/")
    assert len(origin.requests) == 2 and not inside.connections


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://example.com/a", "gopher://example.com/", "/etc/passwd", "example.com/a.png", "",
     "http://", "http:///a", "http://user@127.0.0.1/", "http://:word@127.0.0.1/", "http://[::1", "http://a:b/",
     "http://127.0.0.1:99999/", "javascript:1", "blob:http://127.0.0.1/1", "http://127.0.0.1/" + "a" * 9000],
)  # fmt: skip
async def test_what_is_no_such_url(url: str) -> None:
    await refused(url, "invalid_url")


async def test_all_reasons_sound_the_same(origin: Origin, inside: Origin, unused_tcp_port: int) -> None:
    """Nothing about names and hosts inside can be found out."""
    origin.answer = body(b"pixels")
    inside.answer = body(b"pixels")
    urls = [
        inside.base,
        f"http://127.0.0.1:{unused_tcp_port}",
        f"http://127.0.0.2:{unused_tcp_port}",
        "http://no-such-name.invalid",
        "http://10.0.0.1",
    ]
    assert len({(await refused(url)).message for url in urls}) == 1


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def test_no_proxy_and_no_cookies(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.2:9")
    origin.answer = body(b"", 302, Location="/b", Set_Cookie="a=b")
    await refused(origin.base)
    assert len(origin.requests) == 4 and all("Cookie" not in request.headers for request in origin.requests)


# ------------------------------------------------------------------------------------------------------------- limits


async def test_a_stated_length_is_believed_when_it_is_too_long(origin: Origin) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1001"})
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    origin.answer = answer
    await refused(origin.base, "image_too_large", 413)


async def test_an_endless_body_is_left_at_the_limit(origin: Origin) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 100)

    origin.answer = answer
    await refused(origin.base, "image_too_large", 413)


@pytest.mark.parametrize("dripping", [False, True])
async def test_all_of_it_has_one_deadline(origin: Origin, dripping: bool) -> None:
    """B084"""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if dripping:
            await response.prepare(request)
        while True:
            await asyncio.sleep(0.01)
            if dripping:
                await response.write(b"x")

    origin.answer = answer
    await refused(origin.base, "fetch_timeout", within_s=0.1)


@pytest.mark.parametrize("status", [204, 206, 400, 401, 404, 500, 304])
async def test_other_answers(origin: Origin, status: int) -> None:
    origin.answer = body(b"" if status in (204, 304) else b"secret words", status)
    message = (await refused(origin.base)).message
    assert str(status) in message and "secret" not in message


async def test_compressed_and_empty_bodies(origin: Origin) -> None:
    origin.answer = body(b"\x1f\x8b", Content_Encoding="gzip")
    await refused(origin.base)
    origin.answer = body(b"")
    await refused(origin.base, "invalid_image")


async def test_a_body_that_is_cut_short(origin: Origin) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "500"})
        await response.prepare(request)
        await response.write(b"x" * 100)
        assert request.transport is not None
        request.transport.close()
        return response

    origin.answer = answer
    await refused(origin.base)


async def test_few_at_once(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_AT_ONCE", 2)
    go = asyncio.Event()
    arrived = asyncio.Semaphore(0)

    async def answer(_: web.Request) -> web.StreamResponse:
        arrived.release()
        await go.wait()
        return web.Response(body=b"pixels")

    origin.answer = answer
    fetcher = Fetcher(allowed=at_home)
    tasks = [asyncio.create_task(fetched(origin.base, fetcher)) for _ in range(2)]
    for _ in tasks:
        await arrived.acquire()
    await refused(origin.base, "queue_full", 429, fetcher=fetcher)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    go.set()
    assert await tasks[1] == await fetched(origin.base, fetcher) == b"pixels"


# ------------------------------------------------------------------------------------------------------------- inline


async def test_data_urls() -> None:
    data = base64.b64encode(b"pixels").decode()
    for head in ("data:image/png;base64,", "DATA:;BASE64,", "data:text/html;charset=utf-8;base64,"):
        assert await decode_data_url(head + data, "image", 6, PARAM) == b"pixels"


@pytest.mark.parametrize(
    ("url", "code"),
    [("data:", "invalid_url"), ("data:image/png,abc", "invalid_url"), ("data:image/png;base64", "invalid_url"),
     ("data:" + "x" * 2000 + ";base64,AAAA", "invalid_url"), ("data:;base64,", "invalid_video"),
     ("data:;base64,A", "invalid_base64"), ("data:;base64,AA AA", "invalid_base64"),
     ("data:;base64,AA%3D", "invalid_base64"), ("data:;base64,-_AA", "invalid_base64"),
     ("data:;base64,é", "invalid_base64"), ("data:;base64,AAAA,AAAA", "invalid_base64")],
)  # fmt: skip
async def test_refused_data_urls(url: str, code: str) -> None:
    with pytest.raises(OmniError) as raised:
        await decode_data_url(url, "video", 100, PARAM)
    assert (raised.value.code, raised.value.status, raised.value.param) == (code, 400, PARAM)


async def test_base64_is_measured_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    for nbytes in range(1, 8):
        data = base64.b64encode(bytes(nbytes)).decode()
        assert len(await decode_base64(data, "audio", nbytes, PARAM)) == nbytes
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(OmniError) as raised:
        await decode_base64("A" * 4000, "audio", 2997, PARAM)
    assert (raised.value.code, raised.value.status) == ("audio_too_large", 413)
