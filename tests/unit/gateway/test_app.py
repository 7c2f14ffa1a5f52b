"""What stands around every route: error objects, keys, CORS, ids, limits, the log line."""

import asyncio
import json
import logging

import aiohttp
import openai
import pytest

from omni_common.errors import OmniError, invalid
from omni_gateway.app import create_app
from omni_gateway.auth import PUBLIC
from omni_gateway.context import Settings
from omni_gateway.endpoint import build_params, find_pipeline, find_voice
from omni_gateway.errors import error_response
from unit.gateway.conftest import Serve, raw_post, raw_request
from unit.gateway.rig_bus import RigBus

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"Content-Type": "application/json"}


def check_error(body: bytes | str, code: str | None = None, param: str | None = None) -> dict:
    """The body is OpenAI's error object, and nothing of the server shows in it."""
    parsed = json.loads(body)
    assert set(parsed) == {"error"}
    error = parsed["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["type"], str)
    assert "Traceback" not in error["message"] and ".py" not in error["message"]
    if code is not None:
        assert error["code"] == code
    assert error["param"] == param
    return error


# --------------------------------------------------------------------------------------------------------- envelopes


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "route_not_found"),
        ("POST", "/v1/chat/completions/", 404, "route_not_found"),
        ("POST", "//v1/chat/completions", 404, "route_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
        ("GET", "/v1/models/org/nobody", 404, "model_not_found"),
    ],
)
async def test_unknown_routes_and_methods(
    url: str, http: aiohttp.ClientSession, method: str, path: str, status: int, code: str
) -> None:
    async with http.request(method, url + path) as response:
        assert response.status == status
        check_error(await response.read(), code, "model" if code == "model_not_found" else None)
        assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "param"),
    [
        (b"{", JSON, 400, "invalid_json", None),
        (b"", JSON, 400, "invalid_json", None),
        (b"[]", JSON, 400, "invalid_type", None),
        (b'"x"', JSON, 400, "invalid_type", None),
        (b'\xef\xbb\xbf{"messages":[]}', JSON, 400, "invalid_json", None),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', JSON, 400, "invalid_json", None),
        (b'{"messages":' + b"[" * 100_000, JSON, 400, None, None),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON, 400, "invalid_json", None),
        (b'{"temperature":NaN,"messages":[{"role":"user","content":"x"}]}', JSON, 400, "invalid_json", None),
        (b"{}", JSON, 400, "missing_required_parameter", "messages"),
        (b'{"messages":"x"}', JSON, 400, "invalid_type", "messages"),
        (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type", None),
        (b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type", None),
        (b"not gzip", {**JSON, "Content-Encoding": "gzip"}, 415, "unsupported_encoding", "Content-Encoding"),
    ],
)
async def test_bodies_that_are_no_request(
    url: str, http: aiohttp.ClientSession, bus: RigBus, body: bytes, headers: dict, status: int, code: str, param: str
) -> None:
    async with http.post(url + CHAT, data=body, headers=headers) as response:
        text = await response.read()
        assert response.status == status
        if code is not None:
            check_error(text, code, param)
    assert not bus.asks


async def test_an_unexpected_exception_tells_nothing(
    serve: Serve, bus: RigBus, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    bus.refusal = RuntimeError("secret /home/me/path.py")  # type: ignore[assignment]
    async with http.post(await serve() + CHAT, json=HI) as response:
        assert response.status == 500
        assert response.headers["x-should-retry"] == "false"
        error = check_error(await response.read(), "internal_error")
        assert error["type"] == "server_error"
        assert "secret" not in error["message"]
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("error", "retry_after", "should_retry"),
    [
        (OmniError("full", status=429, code="queue_full", retry_after_s=2.3), "3", None),
        (OmniError("none", status=503, code="stage_missing"), "1", None),
        (OmniError("late", status=504, code="timeout"), None, None),
        (OmniError("lost", status=500, code="stage_lost"), None, None),
        (OmniError("bug"), None, "false"),
        (OmniError("never", status=501, code="not_supported"), None, "false"),
        (invalid("twice", status=409), None, "false"),
        (invalid("wrong"), None, None),
    ],
)
async def test_errors_say_when_and_whether_to_ask_again(
    error: OmniError, retry_after: str | None, should_retry: str | None
) -> None:
    response = error_response(error)
    assert response.headers.get("Retry-After") == retry_after
    assert response.headers.get("x-should-retry") == should_retry


async def test_openai_reads_refusals(serve: Serve, bus: RigBus) -> None:
    bus.refusal = OmniError("The queue is full.", status=429, code="queue_full", retry_after_s=0.5)
    async with openai.AsyncOpenAI(base_url=await serve() + "/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as raised:
            await client.chat.completions.create(model="embedded", messages=HI["messages"])
        assert raised.value.code == "queue_full" and raised.value.response.headers["retry-after"] == "1"
        bus.refusal = OmniError("bug")
    async with openai.AsyncOpenAI(base_url=await serve() + "/v1", api_key="k", max_retries=2) as client:
        before = len(bus.asks)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="embedded", messages=HI["messages"])
        assert len(bus.asks) == before + 1, "x-should-retry: false was not heeded"


# ------------------------------------------------------------------------------------------------------------- limits


async def test_a_large_body_is_refused_while_it_is_read(serve: Serve, bus: RigBus, http: aiohttp.ClientSession) -> None:
    url = await serve(Settings(max_body_bytes=10_000))

    async def drip():
        for _ in range(100):
            yield b" " * 1000

    for data in (b" " * 20_000, drip()):
        async with http.post(url + CHAT, data=data, headers=JSON) as response:
            assert response.status == 413
            check_error(await response.read(), "body_too_large")
    assert not bus.asks


async def test_a_slow_body_is_refused(serve: Serve, bus: RigBus) -> None:
    url = await serve(Settings(body_timeout_s=0.05))
    head = raw_post(CHAT, HI)[:-5]
    reader, writer = await raw_request(url, head)
    status = await asyncio.wait_for(reader.readline(), 5)
    assert b" 408 " in status
    writer.close()
    assert not bus.asks


# --------------------------------------------------------------------------------------------------------------- keys

KEYS = Settings(api_keys=("key-one", "key-two"))


def all_routes(bus: RigBus) -> set[tuple[str, str]]:
    app = create_app(bus, Settings())
    routes = set()
    for route in app.router.routes():
        path = route.resource.canonical.replace("{model}", "x") if route.resource else "/"
        routes.add((route.method, path))
    return routes


async def test_every_route_but_health_wants_a_key(serve: Serve, bus: RigBus, http: aiohttp.ClientSession) -> None:
    url = await serve(KEYS)
    routes = all_routes(bus)
    assert len(routes) > 5 and ("POST", CHAT) in routes
    for method, path in routes:
        async with http.request(method, url + path, data=b"") as response:
            if path in PUBLIC:
                assert response.status == 200, path
            else:
                assert response.status == 401, path
                assert response.headers["WWW-Authenticate"] == "Bearer"
                if method != "HEAD":
                    assert check_error(await response.read(), "invalid_api_key")["type"] == "authentication_error"


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/MODELS", "/v1/models/", "/v1/../v1/models", "/health/../v1/models", "/%761/models", "/healthx",
     "/health/", "/", "/health%2f..%2fv1/models", "/health;/v1/models"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "CONNECTX"])
async def test_no_spelling_of_a_path_gets_past_the_key(serve: Serve, method: str, path: str) -> None:
    url = await serve(KEYS)
    reader, writer = await raw_request(
        url, f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    )
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b" 401 " in answer.split(b"\r\n")[0] or b" 400 " in answer.split(b"\r\n")[0]
    writer.close()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer key-one", 200),
        ("bearer key-two", 200),
        ("Bearer  key-two ", 200),
        ("Bearer key-three", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        ("key-one", 401),
        ("Basic key-one", 401),
        ("Bearer ké-one", 401),
        ("Bearer key-one key-one", 401),
    ],
)
async def test_which_keys_open(
    serve: Serve, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture, header: str, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    url = await serve(KEYS)
    async with http.get(url + "/v1/models", headers={"Authorization": header}) as response:
        assert response.status == status
        assert "key-" not in await response.text()
    assert "key-" not in caplog.text
    assert "key-" not in repr(KEYS)


# --------------------------------------------------------------------------------------------------------------- CORS

PREFLIGHT = {
    "Origin": "app://obsidian.md",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os,x-stainless-timeout",
}


@pytest.mark.parametrize(("origins", "allowed"), [(("app://obsidian.md", "null"), "app://obsidian.md"), (("*",), "*")])
async def test_cors_preflight_needs_no_key(
    serve: Serve, http: aiohttp.ClientSession, origins: tuple[str, ...], allowed: str
) -> None:
    url = await serve(Settings(api_keys=("k",), cors_origins=origins))
    async with http.options(url + CHAT, headers=PREFLIGHT) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == allowed
        assert response.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Credentials" not in response.headers
    # A preflight opens nothing but itself.
    async with http.options(url + CHAT) as response:
        assert response.status == 401


async def test_cors_headers_on_errors_and_streams(serve: Serve, http: aiohttp.ClientSession) -> None:
    url = await serve(Settings(cors_origins=("https://a.example",)))
    origin = {"Origin": "https://a.example"}
    for path, body in ((CHAT, {**HI, "stream": True}), (CHAT, {}), ("/v1/nothing", {})):
        async with http.post(url + path, json=body, headers=origin) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
            assert response.headers["Vary"] == "Origin"
            await response.read()


async def test_cors_is_off_for_others_and_by_default(serve: Serve, http: aiohttp.ClientSession) -> None:
    for settings in (Settings(), Settings(cors_origins=("https://b.example",))):
        url = await serve(settings)
        async with http.options(url + CHAT, headers=PREFLIGHT) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers
        async with http.post(url + CHAT, json=HI, headers={"Origin": "https://a.example"}) as response:
            assert response.status == 200
            assert "Access-Control-Allow-Origin" not in response.headers


# ------------------------------------------------------------------------------------------------- ids and log lines


async def test_request_ids_are_the_servers(url: str, http: aiohttp.ClientSession) -> None:
    seen = set()
    for _ in range(2):
        async with http.get(url + "/v1/models", headers={"x-request-id": "mine <b> 1"}) as response:
            assert response.headers["x-request-id"].startswith("req_")
            assert response.headers["x-client-request-id"] == "mineb1"
            seen.add(response.headers["x-request-id"])
    assert len(seen) == 2
    async with http.get(url + "/v1/models", headers={"x-client-request-id": "a" * 5000}) as response:
        assert response.headers["x-client-request-id"] == "a" * 128


async def test_one_log_line_a_request_without_payload(
    url: str, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "QUJD" * 500
    body = {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": secret}}]}]}
    async with http.post(url + CHAT + "?token=hush", json=body, headers={"Authorization": "Bearer hush"}) as response:
        assert response.status == 400
        assert secret not in await response.text()
    lines = [r for r in caplog.records if r.name.startswith("omni_gateway")]
    assert len(lines) == 1 and lines[0].levelno == logging.INFO
    line = lines[0].getMessage()
    assert "POST /v1/chat/completions 400 error" in line and "code=invalid_audio" in line and "req_" in line
    assert "QUJD" not in caplog.text and "hush" not in caplog.text
    assert len(line) < 400


async def test_messages_do_not_carry_a_large_value_back(url: str, http: aiohttp.ClientSession) -> None:
    for field, value in (("model", "x" * 100_000), ("modalities", ["y" * 100_000]), ("audio_form", "z" * 100_000)):
        async with http.post(url + CHAT, json={**HI, field: value}) as response:
            assert response.status in (400, 404)
            assert len(await response.read()) < 1000


# ------------------------------------------------------------------------------------------------------------- models


async def test_models_lists_names_and_aliases(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        models = {model.id: model async for model in client.models.list()}
        assert {"embedded", "omnibus", "speech", "tts-1"} <= set(models)
        assert models["embedded"].object == "model" and models["embedded"].owned_by == "omnibus"
        assert (await client.models.retrieve("omnibus")).id == "omnibus"
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("nobody")
        assert raised.value.code == "model_not_found"


def test_find_pipeline() -> None:
    bus = RigBus()
    assert find_pipeline(bus, None, "chat").name == "embedded"
    assert find_pipeline(bus, "", "speech").name == "speech"
    assert find_pipeline(bus, None, "speech", default="embedded").name == "speech"
    assert find_pipeline(bus, "whisper-1", "transcription").name == "embedded"
    for model, task, status in (("nobody", "chat", 404), ("speech", "chat", 400), (None, "video", 404)):
        with pytest.raises(OmniError) as raised:
            find_pipeline(bus, model, task)
        assert raised.value.status == status and raised.value.param == "model"
        assert status != 404 or raised.value.code == "model_not_found"


def test_find_voice() -> None:
    pipeline = RigBus().pipelines["embedded"]
    assert find_voice(pipeline, "Alloy", "voice") == "heart"
    assert find_voice(pipeline, "michael", "voice") == "michael"
    with pytest.raises(OmniError, match="heart, michael") as raised:
        find_voice(pipeline, "nobody", "audio.voice")
    assert raised.value.param == "audio.voice"


def test_build_params() -> None:
    pipeline = RigBus().pipelines["embedded"]
    params = build_params(pipeline, ["thinker", "talker"], {"thinker": {"temperature": 0.5}})
    assert set(params) == {"thinker", "talker"}
    assert params["thinker"]["temperature"] == 0.5
    assert params["thinker"]["max_tokens"] == 96, "the YAML's default"
    assert params["thinker"]["top_k"] == 0, "the engine's default"
    assert params["talker"] == {"voice": "heart", "speed": 1.0}
    for key, value in (("temperature", 9), ("nonsense", 1), ("seed", 2**70), ("max_tokens", "x")):
        for where, param in ((None, key), ({"thinker": "sampling_params_list[1]"}, f"sampling_params_list[1].{key}")):
            with pytest.raises(OmniError) as raised:
                build_params(pipeline, ["thinker"], {"thinker": {key: value}}, where)
            assert raised.value.status == 400 and raised.value.param == param
