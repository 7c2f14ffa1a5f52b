"""What a client must not be able to make the gateway spend, or write into its log."""

import asyncio
import gzip
import json
import logging
import runpy
import warnings

import aiohttp
import pytest
from aiohttp import multipart

from omni_gateway import form
from omni_gateway.app import create_app, make_runner
from omni_gateway.context import Settings
from omni_gateway.errors import http_log
from unit.gateway.conftest import Serve, raw_post, raw_request
from unit.gateway.rig_bus import RigBus

CHAT = "/v1/chat/completions"
FORM = "/v1/audio/transcriptions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"Content-Type": "application/json"}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=X"}


def part(content: bytes = b"1", name: bytes = b'"a"', more: bytes = b"") -> bytes:
    return b"--X\r\nContent-Disposition: form-data; name=" + name + b"\r\n" + more + b"\r\n" + content + b"\r\n"


async def whole_answer(url: str, data: bytes) -> bytes:
    """All that comes back for `data` until the server closes."""
    reader, writer = await raw_request(url, data)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def refusal(
    http: aiohttp.ClientSession, url: str, data: object, headers: dict[str, str], status: int, code: str
) -> dict[str, str]:
    async with http.post(url, data=data, headers=headers) as response:
        text = await response.text()
        assert response.status == status, text
    error = json.loads(text)["error"]
    assert error["code"] == code
    return error


# --------------------------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "identity, gzip"])
@pytest.mark.parametrize(("path", "headers"), [(CHAT, JSON), (FORM, MULTIPART)])
async def test_a_compressed_body_is_refused(
    url: str, http: aiohttp.ClientSession, bus: RigBus, path: str, headers: dict[str, str], encoding: str
) -> None:
    body = gzip.compress(json.dumps(HI).encode() if path == CHAT else part() + b"--X--\r\n")
    headers = {**headers, "Content-Encoding": encoding}
    error = await refusal(http, url + path, body, headers, 415, "unsupported_encoding")
    assert error["param"] == "Content-Encoding" and "Content-Encoding" in error["message"]
    assert not bus.asks


async def test_identity_is_no_compression(url: str, http: aiohttp.ClientSession) -> None:
    async with http.post(url + CHAT, json=HI, headers={"Content-Encoding": "Identity"}) as response:
        assert response.status == 200


async def test_nothing_decompresses_a_body(url: str) -> None:
    """Not even one that no handler reads: that this is no gzip goes unnoticed, so the connection lives on."""
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n"
    last = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answers = await whole_answer(url, head + b"oops" + last)
    assert b" 404 " in answers and b" 200 " in answers


@pytest.mark.parametrize(
    ("header", "encoding", "status"),
    [
        ("Content-Encoding", "gzip", 415),
        ("Content-Transfer-Encoding", "base64", 415),
        ("Content-Transfer-Encoding", "quoted-printable", 415),
        ("Content-Encoding", "identity", 400),
        ("Content-Transfer-Encoding", "Binary", 400),
        ("Content-Transfer-Encoding", "8bit", 400),
    ],
)
async def test_encoded_parts_of_a_form_are_refused(
    url: str, http: aiohttp.ClientSession, header: str, encoding: str, status: int
) -> None:
    body = part(more=f"{header}: {encoding}\r\n".encode()) + b"--X--\r\n"
    code = "unsupported_encoding" if status == 415 else "missing_required_parameter"
    error = await refusal(http, url + FORM, body, MULTIPART, status, code)
    assert error["param"] == (header if status == 415 else "file")


# --------------------------------------------------------------------------------------------------------- connections


async def test_idle_connections_are_kept_longer_than_proxies_keep_them(no_task_left: None, bus: RigBus) -> None:
    runner = make_runner(create_app(bus, Settings()))
    await runner.setup()
    assert runner.server is not None
    assert runner.server().keepalive_timeout > 600
    await runner.cleanup()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"hello there\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 500 + b"\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x00\x1b[31mb\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
    ],
)
async def test_malformed_http_leaves_no_traceback(url: str, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    caplog.set_level(logging.INFO)
    answer = await whole_answer(url, data)
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert len(caplog.records) <= 1
    for line in caplog.records:
        assert line.levelno == logging.INFO and line.exc_info is None
        assert "malformed HTTP" in line.getMessage() and line.getMessage().isprintable()
    assert "aaaa" not in caplog.text


async def test_failures_of_the_server_keep_their_traceback(
    url: str, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> str:
        raise RuntimeError("a bug outside of every handler")

    monkeypatch.setattr("omni_gateway.requests_log.route_name", broken)
    async with http.get(url + "/health/live") as response:
        assert response.status == 500
    (line,) = (r for r in caplog.records if r.name == http_log.name)
    assert line.levelno == logging.ERROR and line.exc_info is not None
    assert "a bug outside" in caplog.text


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(("count", "status"), [(2048, 200), (2049, 400)])
async def test_the_number_of_messages_is_bounded(
    url: str, http: aiohttp.ClientSession, bus: RigBus, count: int, status: int
) -> None:
    messages = [{"role": "assistant", "content": ""}] * (count - 1) + HI["messages"]
    async with http.post(url + CHAT, json={"messages": messages}) as response:
        assert response.status == status
        body = await response.json()
    if status == 400:
        assert (body["error"]["param"], body["error"]["code"]) == ("messages", "array_above_max_length")
        assert "2048" in body["error"]["message"]
    assert len(bus.asks) == (status == 200)


@pytest.mark.parametrize(("count", "status"), [(256, 200), (257, 400)])
async def test_the_number_of_parts_of_a_message_is_bounded(
    url: str, http: aiohttp.ClientSession, bus: RigBus, count: int, status: int
) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x"}] * count}
    async with http.post(url + CHAT, json={"messages": [*HI["messages"], message]}) as response:
        assert response.status == status
        body = await response.json()
    if status == 400:
        assert (body["error"]["param"], body["error"]["code"]) == ("messages[1].content", "array_above_max_length")
        assert "256" in body["error"]["message"]
    assert len(bus.asks) == (status == 200)


@pytest.mark.parametrize("value", [b"[],", b"{},", b"[[]],", b"0,"])
async def test_a_body_of_very_many_values_is_not_decoded(
    url: str, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    monkeypatch.setattr("omni_gateway.endpoint._VALUES", 1000)
    monkeypatch.setattr("omni_gateway.endpoint._SCAN_BYTES", 700)
    head = json.dumps(HI).encode()[:-1] + b',"logit_bias":['
    await refusal(http, url + CHAT, head + value * 1000 + b"0]}", JSON, 413, "body_too_large")
    # Few enough: decoded, and refused for what it is.
    await refusal(http, url + CHAT, head + value * 300 + b"0]}", JSON, 400, "invalid_type")


# --------------------------------------------------------------------------------------------------------------- forms


async def test_what_stands_before_the_parts_of_a_form_is_bounded(url: str, http: aiohttp.ClientSession) -> None:
    few, many = b"\r\n" * 20, b"\n" * 5000
    await refusal(http, url + FORM, few + part() + b"--X--\r\n", MULTIPART, 400, "missing_required_parameter")
    await refusal(http, url + FORM, many + part() + b"--X--\r\n", MULTIPART, 400, "invalid_form")


async def test_a_form_of_unknown_length_is_bounded(serve: Serve, http: aiohttp.ClientSession) -> None:
    url = await serve(Settings(max_body_bytes=100_000))

    async def uploads():
        for number in range(20):
            yield part(b"x" * 10_000, f'"u{number}"; filename="u"'.encode())
        yield b"--X--\r\n"

    await refusal(http, url + FORM, uploads(), MULTIPART, 413, "body_too_large")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (part(b"x" * 70_000, b'"\xff\xfe"'), 413, "string_above_max_length"),
        (part(b"x" * 70_000, b'"' + b"n" * 8000 + b'"'), 413, "string_above_max_length"),
        (part(b"x" * 40, b'"_charset_"'), 400, "invalid_form"),
    ],
)
async def test_odd_names_in_a_form(
    url: str, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture, body: bytes, status: int, code: str
) -> None:
    error = await refusal(http, url + FORM, body + b"--X--\r\n", MULTIPART, status, code)
    assert len(error["message"]) <= 500 and len(error["param"] or "") <= 200
    assert not [r for r in caplog.records if r.exc_info]


async def test_a_header_that_is_no_text(url: str) -> None:
    request = raw_post(CHAT, HI).replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\nx-omni-audio-form: \xff\r\n")
    answer = await whole_answer(url, request)
    assert b" 400 " in answer.split(b"\r\n")[0] and b'"param":"x-omni-audio-form"' in answer


def test_python_does_not_remember_what_clients_call_their_fields() -> None:
    before = set(vars(multipart).get("__warningregistry__", ()))
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        runpy.run_path(form.__file__)
        for odd in ("form-data; name*=1", "form data; name=a", "form-data; nothing"):
            multipart.parse_content_disposition(odd)
        assert not shown
    assert set(vars(multipart).get("__warningregistry__", ())) - before <= {"version"}
