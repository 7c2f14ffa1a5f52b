"""Cases of refusals that the tests of each endpoint leave out: the same envelope on every route, whatever is sent."""

import json
from typing import Any

import aiohttp
import pytest

from unit.gateway.conftest import raw_request
from unit.gateway.rig_bus import RigBus
from unit.gateway.test_transcriptions import WAV, form

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
JSON = "application/json"
MULTIPART = "multipart/form-data; boundary=X"
#: Route -> a body that it answers, as JSON.
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    SPEECH: {"input": "hi", "voice": "alloy"},
}
#: Route -> (field, value of a wrong type).
WRONG = {CHAT: ("messages", 5), SPEECH: ("input", 5)}


async def check_error(response: aiohttp.ClientResponse, *statuses: int) -> dict[str, Any]:
    """OpenAI's error object, with one of `statuses` and nothing of the server in it."""
    text = await response.text()
    assert response.status in statuses, text
    assert response.content_type == JSON
    parsed = json.loads(text)
    assert set(parsed) == {"error"} and set(parsed["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = parsed["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    for inner in ("Traceback", "site-packages", ".py", "ffmpeg", "av.error", "/tmp", "0x"):
        assert inner not in error["message"]
    return error


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("body", "content_type", "statuses"),
    [
        (b"{", JSON, (400,)),
        (b"[]", JSON, (400,)),
        (b"null", JSON, (400,)),
        (b"5", JSON, (400,)),
        (b"", JSON, (400,)),
        (b"", None, (400, 415)),
        (b"\xff\xfe{\x00}\x00", JSON, (400,)),
        (b"{}", JSON, (400,)),
        (b"{}", "text/plain", (415,)),
        (b"{}", "multipart/form-data", (415,)),
        (b"a=b", "application/x-www-form-urlencoded", (415,)),
        (b"{}", "application/json; charset=nonsense", (400,)),
    ],
)
async def test_json_routes_refuse_what_is_no_request_alike(
    url: str,
    http: aiohttp.ClientSession,
    bus: RigBus,
    path: str,
    body: bytes,
    content_type: str | None,
    statuses: tuple[int, ...],
) -> None:
    """B021"""
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with http.post(url + path, data=body, headers=headers) as response:
        await check_error(response, *statuses)
    assert not bus.asks


@pytest.mark.parametrize("path", GOOD)
async def test_a_missing_and_a_wrong_field_are_named(
    url: str, http: aiohttp.ClientSession, bus: RigBus, path: str
) -> None:
    """B021"""
    field, value = WRONG[path]
    body = dict(GOOD[path])
    for wrong in ({**body, field: value}, {name: kept for name, kept in body.items() if name != field}):
        async with http.post(url + path, json=wrong) as response:
            assert (await check_error(response, 400))["param"] == field
    assert not bus.asks


@pytest.mark.parametrize(
    ("body", "content_type", "statuses"),
    [
        (b"{", JSON, (415,)),
        (b"", None, (415,)),
        (b"", MULTIPART, (400,)),
        (b"{", MULTIPART, (400,)),
        (b"--X--\r\n", MULTIPART, (400,)),
        (b"hello", "text/plain", (415,)),
        (WAV, "audio/wav", (415,)),
        (b"a=b", "application/x-www-form-urlencoded", (415,)),
    ],
)
async def test_the_form_route_refuses_what_is_no_form_alike(
    url: str,
    http: aiohttp.ClientSession,
    bus: RigBus,
    body: bytes,
    content_type: str | None,
    statuses: tuple[int, ...],
) -> None:
    """B021"""
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with http.post(url + TRANSCRIPTIONS, data=body, headers=headers) as response:
        await check_error(response, *statuses)
    assert not bus.asks


ROUTES = {
    CHAT: {"POST"},
    SPEECH: {"POST"},
    "/v1/audio/speech/batch": {"POST"},
    TRANSCRIPTIONS: {"POST"},
    "/v1/models": {"GET"},
    "/v1/models/embedded": {"GET"},
    "/v1/audio/voices": {"GET", "POST"},
    "/v1/audio/voices/name": {"DELETE"},
    "/v1/audio/models": {"GET"},
    "/health": {"GET"},
    "/health/live": {"GET"},
    "/health/ready": {"GET"},
    "/metrics": {"GET"},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_the_wrong_method_is_405_everywhere(url: str, http: aiohttp.ClientSession, path: str) -> None:
    """B021"""
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - ROUTES[path]:
        async with http.request(method, url + path) as response:
            assert (await check_error(response, 405))["code"] == "method_not_allowed"
            assert ROUTES[path] <= set(response.headers["Allow"].split(","))


async def test_an_unknown_route_is_404_whatever_its_name_holds(url: str, http: aiohttp.ClientSession) -> None:
    """B021, B095: bytes that are no UTF-8 in the path, escaped and as they are, in the path and in the model's name."""
    for path in (b"/v1/images/nothing", b"/v1/%ED%A0%BD", b"/v1/models/%ED%A0%BD", b"/v1/models/%FF", b"/v1/%00%0a"):
        reader, writer = await raw_request(url, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 404 " in head.split(b"\r\n")[0], head
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("accept", ["application/octet-stream", "audio/mpeg", "text/event-stream", "text/html", ""])
@pytest.mark.parametrize("path", [*GOOD, TRANSCRIPTIONS, "/v1/nothing"])
async def test_errors_are_json_whatever_the_client_accepts(
    url: str, http: aiohttp.ClientSession, path: str, accept: str
) -> None:
    """B010: SDKs ask for speech with `Accept: application/octet-stream`, and read the error as JSON."""
    async with http.post(url + path, json={"input": "", "messages": []}, headers={"Accept": accept}) as response:
        await check_error(response, 400, 404, 415)


@pytest.mark.parametrize("path", GOOD)
async def test_a_stream_is_not_begun_for_what_is_refused(url: str, http: aiohttp.ClientSession, path: str) -> None:
    """B016, B021: an error before the stream is a status, not an event in a 200."""
    field, value = WRONG[path]
    more = {"stream": True, "stream_format": "sse"} if path == SPEECH else {"stream": True}
    async with http.post(url + path, json={**GOOD[path], **more, field: value}) as response:
        await check_error(response, 400)


#: Uploads that some decoder begins to read.
NO_AUDIO = {
    "text": b"this is a text\n" * 100,
    "json": b'{"error": "no audio here"}',
    "html": b"<html><body>404</body></html>",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "pdf": b"%PDF-1.7\n" + bytes(100),
    "zip": b"PK\x03\x04" + bytes(100),
    "riff": b"RIFF\xff\xff\xff\xffWAVEfmt ",
    "pcm": bytes(range(256)) * 20,
    "mp4": b"\x00\x00\x00\x18ftypM4A \x00\x00\x00\x00" + bytes(100),
    "ogg": b"OggS" + bytes(100),
    "id3": b"ID3\x04\x00\x00\x00\x00\x00\x00",
}


@pytest.mark.parametrize("name", NO_AUDIO)
async def test_an_upload_that_is_no_audio_tells_nothing_of_the_decoder(
    url: str, http: aiohttp.ClientSession, bus: RigBus, name: str
) -> None:
    """B012: no command line, path or traceback in the answer, in a form and in a chat message alike."""
    async with http.post(url + TRANSCRIPTIONS, data=form(NO_AUDIO[name], f"a.{name}")) as response:
        error = await check_error(response, 400, 415)
        assert (error["param"], error["code"]) == ("file", "invalid_audio")
    part = {"type": "input_audio", "input_audio": {"data": NO_AUDIO[name].hex(), "format": "wav"}}
    async with http.post(url + CHAT, json={"messages": [{"role": "user", "content": [part]}]}) as response:
        assert (await check_error(response, 400))["param"] == "messages[0].content[0].input_audio.data"
    assert not bus.asks


@pytest.mark.parametrize(
    "spot",
    [
        '"input":"?"',
        '"input":"x","voice":"?"',
        '"input":"x","voice":{"id":"?"}',
        '"input":"x","instructions":"?"',
        '"input":"x","response_format":"?"',
        '"input":"x","stream_format":"?"',
        '"input":"x","model":"?"',
        '"input":"x","unknown":["?"]',
        '"input":"x","?":1',
    ],
)
async def test_lone_surrogates_are_refused_in_every_field_of_speech(
    url: str, http: aiohttp.ClientSession, bus: RigBus, spot: str
) -> None:
    """B095"""
    for lone in ("\\ud83d", "\\udc00 x", "a\\ud83db"):
        body = "{" + spot.replace("?", lone) + "}"
        async with http.post(url + SPEECH, data=body, headers={"Content-Type": JSON}) as response:
            assert (await check_error(response, 400))["code"] == "invalid_json"
    assert not bus.asks


@pytest.mark.parametrize("text", ["a\u0000b", "\u202ea", "\ufeffa", "👨‍👩‍👧 a", "a" + "\u0337" * 300, "\x1b[31ma"])
async def test_strange_text_reaches_the_stages_unchanged(
    url: str, http: aiohttp.ClientSession, bus: RigBus, text: str
) -> None:
    """B095: what is refused is only what is no text."""
    async with http.post(url + SPEECH, json={"input": text}) as response:
        assert response.status == 200
        assert await response.read()
    assert bus.asks[0].given[0].body.text == text
    async with http.post(url + TRANSCRIPTIONS, data=form(prompt=text)) as response:
        assert response.status == 200
    assert bus.asks[1].params["listener"]["prompt"] == text.strip()


@pytest.mark.parametrize("field", ["model", "language", "prompt", "response_format", "temperature", "stream", "other"])
async def test_a_forms_field_that_is_no_text_is_refused(
    url: str, http: aiohttp.ClientSession, bus: RigBus, field: str
) -> None:
    """B095: a lone surrogate cannot be sent but as bytes that are no UTF-8."""
    for lone in (b"\xed\xa0\xbd", b"\xff"):
        parts = (
            f'--X\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n'.encode() + lone + b"\r\n",
            b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + WAV + b"\r\n--X--\r\n",
        )
        async with http.post(url + TRANSCRIPTIONS, data=b"".join(parts), headers={"Content-Type": MULTIPART}) as answer:
            assert (await check_error(answer, 400))["param"] == field
    assert not bus.asks


@pytest.mark.parametrize("header", ["Authorization", "x-omni-audio-form", "x-request-id", "Origin", "Accept"])
async def test_a_header_that_is_no_text_fails_nothing(url: str, bus: RigBus, header: str) -> None:
    """B095: the bytes come in as surrogates, and no answer, log line or comparison may trip over them."""
    body = json.dumps(GOOD[CHAT]).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {JSON}\r\n{header}: "
    reader, writer = await raw_request(
        url, head.encode() + b"\xff\xed\xa0\xbd" + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    answer, _, told = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status = int(answer.split(b" ")[1])
    assert status == (400 if header == "x-omni-audio-form" else 200), answer
    assert status == 200 or set(json.loads(told)["error"]) == {"message", "type", "param", "code"}


NULLS = {
    SPEECH: ("model", "voice", "instructions", "response_format", "speed", "stream_format", "seed", "stream"),
    CHAT: ("model", "modalities", "audio", "stream", "stream_options", "seed", "stop", "user", "metadata"),
}


@pytest.mark.parametrize("path", GOOD)
async def test_unknown_fields_and_nulls_change_nothing(url: str, http: aiohttp.ClientSession, path: str) -> None:
    """B017"""
    extras = {"foo": 1, "user": "u", "metadata": {}, "store": True, "extra_body": {"x": [1]}, "lang_code": "a"}
    for more in (extras, dict.fromkeys(NULLS[path]), {**extras, **dict.fromkeys(NULLS[path])}):
        async with http.post(url + path, json={**GOOD[path], **more}) as response:
            assert response.status == 200, await response.text()
    fields = dict.fromkeys(("foo", "user", "metadata", "response_format", "language", "prompt", "model"), "")
    async with http.post(url + TRANSCRIPTIONS, data=form(**fields)) as response:
        assert response.status == 200, await response.text()
