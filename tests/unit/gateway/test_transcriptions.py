"""The transcription endpoint over a rig bus: forms as clients send them, every format, refusals, streams."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import pytest_asyncio
import soundfile

from omni_common.errors import OmniError
from omni_common.frames import Audio, Segment, Transcript
from omni_gateway.audio_input import given_audio
from omni_gateway.context import Settings
from omni_gateway.media.encode import encode
from unit.gateway.conftest import Serve, raw_request
from unit.gateway.rig_bus import RigBus, event, tone, transcript

PATH = "/v1/audio/transcriptions"
SEGMENTS = [
    Segment(0.0, 0.4, " Hello there.", [1, 2], -0.25, 0.01),
    Segment(0.4, 0.8, " How", [3]),
    Segment(0.8, 1.0, " are you? ", [4, 5]),
]
TEXT = "Hello there. How are you?"


def wav(seconds: float = 1.0) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, 0.3 * np.sin(np.arange(int(16_000 * seconds)) / 6), 16_000, format="WAV")
    return file.getvalue()


WAV = wav()


def form(file: bytes | None = WAV, filename: str = "a.wav", **fields: Any) -> aiohttp.FormData:
    data = aiohttp.FormData(default_to_multipart=True)
    if file is not None:
        data.add_field("file", io.BytesIO(file), filename=filename, content_type="audio/wav")
    for name, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            data.add_field(f"{name}[]" if isinstance(value, list) else name, one)
    return data


async def post(http: aiohttp.ClientSession, url: str, data: Any = None, **fields: Any) -> tuple[int, str, str]:
    async with http.post(url + PATH, data=form(**fields) if data is None else data) as response:
        return response.status, response.content_type, await response.text()


async def refused(http: aiohttp.ClientSession, url: str, status: int = 400, data: Any = None, **fields: Any) -> Any:
    got, content_type, text = await post(http, url, data, **fields)
    assert (got, content_type) == (status, "application/json"), text
    return json.loads(text)["error"]


def multipart(*parts: bytes) -> tuple[bytes, dict[str, str]]:
    body = b"".join(b"--X\r\n" + part + b"\r\n" for part in parts) + b"--X--\r\n"
    return body, {"Content-Type": "multipart/form-data; boundary=X"}


@pytest.fixture
def bus(bus: RigBus) -> RigBus:
    bus.script = transcript(SEGMENTS)
    return bus


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as sdk:
        yield sdk


# --------------------------------------------------------------------------------------------------------- answers


async def test_json_is_the_default(http, url):
    status, content_type, text = await post(http, url, model="whisper-1")
    assert (status, content_type) == (200, "application/json")
    assert json.loads(text) == {"text": TEXT, "usage": {"type": "duration", "seconds": 1}}


@pytest.mark.parametrize(
    ("fmt", "content_type", "start"),
    [
        ("text", "text/plain", TEXT + "\n"),
        ("srt", "application/x-subrip", "1\n00:00:00,000 --> 00:00:00,400\nHello there.\n\n2\n"),
        ("vtt", "text/vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:00.400\nHello there.\n\n"),
    ],
)
async def test_plain_formats(http, bus, url, fmt, content_type, start):
    status, got, text = await post(http, url, response_format=fmt)
    assert (status, got) == (200, content_type)
    assert text.startswith(start)
    assert bus.asks[0].params["listener"]["timestamps"] == (fmt != "text")


async def test_verbose_json_has_the_segments(http, bus, url):
    fields = {"response_format": "verbose_json", "timestamp_granularities": ["segment"], "temperature": "0.5"}
    _, _, text = await post(http, url, **fields)
    answer = json.loads(text)
    assert (answer["task"], answer["language"], answer["duration"], answer["text"]) == ("transcribe", "en", 1.0, TEXT)
    assert [(s["id"], s["start"], s["end"], s["text"]) for s in answer["segments"]] == [
        (0, 0.0, 0.4, " Hello there."),
        (1, 0.4, 0.8, " How"),
        (2, 0.8, 1.0, " are you? "),
    ]
    first = answer["segments"][0]
    assert (first["tokens"], first["avg_logprob"], first["no_speech_prob"]) == ([1, 2], -0.25, 0.01)
    assert first["temperature"] == 0.5
    assert bus.asks[0].params["listener"]["timestamps"] is True


def events_of(text: str) -> list[dict[str, Any]]:
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


async def test_stream_sends_words_as_they_are_recognised(http, bus, url):
    bus.gates = {1: asyncio.Event()}
    async with http.post(url + PATH, data=form(stream="true", response_format="json")) as response:
        assert response.content_type == "text/event-stream"
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert first == {"type": "transcript.text.delta", "delta": "Hello there."}
        bus.gates[1].set()
        rest = events_of((await response.text()).removeprefix("\n"))
    assert "".join(e["delta"] for e in (first, *rest[:-1])) == TEXT
    assert rest[-1] == {"type": "transcript.text.done", "text": TEXT, "usage": {"type": "duration", "seconds": 1}}


async def test_silence_is_an_empty_text_and_no_error(http, bus, url):
    bus.script = lambda ask: [event("text", Transcript(0, [], "en", 1.0, True), 0, ask.given[-1].end, last=True)]
    assert json.loads((await post(http, url))[2])["text"] == ""
    (done,) = events_of((await post(http, url, stream="true"))[2])
    assert (done["type"], done["text"]) == ("transcript.text.done", "")
    assert (await post(http, url, response_format="srt"))[2] == ""


# ---------------------------------------------------------------------------------------------------- what is asked


async def test_the_ask_has_the_samples_and_the_fields(http, bus, url):
    fields = {"model": "embedded", "language": "en-US", "prompt": "Paris, Lyon", "temperature": "0.2"}
    assert (await post(http, url, **fields))[0] == 200
    (ask,) = bus.asks
    assert (ask.pipeline.name, ask.task, ask.outputs) == ("embedded", "transcription", ["text"])
    assert ask.params == {
        "listener": {"language": "en", "prompt": "Paris, Lyon", "temperature": 0.2, "timestamps": False}
    }
    (given,) = ask.given
    assert (given.modality, given.body, given.start, given.end, given.last) == ("audio", Audio(16_000), 0, 16_000, True)
    samples = given.arrays["samples"]
    np.testing.assert_allclose(samples, 0.3 * np.sin(np.arange(16_000) / 6), atol=1e-4)


def test_long_audio_goes_in_pieces_without_gap_or_double():
    samples = np.arange(75 * 16_000, dtype=np.float32)
    given = given_audio([samples])
    assert [(g.start, g.end, g.last) for g in given] == [
        (0, 480_000, False),
        (480_000, 960_000, False),
        (960_000, 1_200_000, True),
    ]
    np.testing.assert_array_equal(np.concatenate([g.arrays["samples"] for g in given]), samples)


async def test_fields_in_any_order_and_unknown_ones(http, bus, url):
    body, headers = multipart(
        b'Content-Disposition: form-data; name="temperature"\r\n\r\n0',
        b'Content-Disposition: form-data; name="chunking_strategy"\r\n\r\nauto',
        b'Content-Disposition: form-data; name="notes"; filename="n.txt"\r\n\r\nhello',
        b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + WAV,
        b'Content-Disposition: form-data; name="language"\r\n\r\n',
        b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-1',
    )
    async with http.post(url + PATH, data=body, headers=headers) as response:
        assert (await response.json())["text"] == TEXT
    assert bus.asks[0].params["listener"]["language"] == "en"


@pytest.mark.parametrize("name", ["../../../../tmp/evil.txt", "/tmp/x", "..\\x", "x" * 300, "CON", "", "😀.wav"])
async def test_a_file_name_is_never_a_path(http, url, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (await post(http, url, filename=name))[0] == 200
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fmt", ["mp3", "flac", "opus", "aac", "wav"])
async def test_uploads_of_other_formats(http, bus, url, fmt):
    assert (await post(http, url, file=await encode(tone(24_000), fmt, 24_000), filename="a.bin"))[0] == 200
    assert bus.asks[0].given[-1].end == pytest.approx(16_000, abs=1_600)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"file": None, "model": "whisper-1"}, "file"),
        ({"file": b""}, "file"),
        ({"file": b"this is a text, not audio\n" * 50}, "file"),
        ({"file": WAV[:-128]}, "file"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "../x"}, "response_format"),
        ({"language": "xx"}, "language"),
        ({"language": "english"}, "language"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"timestamp_granularities": ["segment", "word"]}, "timestamp_granularities"),
        ({"include": ["logprobs"]}, "include"),
        ({"model": "speech"}, "model"),
    ],
)
async def test_refusals_name_the_field_and_ask_the_bus_nothing(http, bus, url, fields, param):
    error = await refused(http, url, **fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert not bus.asks


async def test_limits(http, url, serve: Serve):
    assert (await refused(http, url, status=413, file=bytes((1 << 20) + 1)))["code"] == "audio_too_large"
    assert (await refused(http, url, file=wav(6.0)))["code"] == "audio_too_long"
    assert (await refused(http, url, status=413, prompt="x" * 70_000))["param"] == "prompt"
    assert (await refused(http, url, status=404, model="gpt-9"))["code"] == "model_not_found"
    small = await serve(Settings(max_body_bytes=10_000))
    assert (await refused(http, small, status=413))["code"] == "body_too_large"


async def test_bodies_that_are_no_form(http, bus, url):
    async with http.post(url + PATH, json={"file": "x"}) as response:
        assert response.status == 415
    headers = {"Content-Type": "multipart/form-data"}
    bodies = [
        (b"hello", headers),
        (b"hello", {"Content-Type": "multipart/form-data; boundary=" + "x" * 100}),
        (b"", {"Content-Type": "multipart/form-data; boundary=X"}),
        multipart(b"no header at all"),
        multipart(
            b'Content-Disposition: form-data; name="a"\r\nContent-Type: multipart/mixed; boundary=Y\r\n\r\n--Y--'
        ),
        multipart(b"Content-Disposition: form-data\r\n\r\nnameless"),
        multipart(b'Content-Disposition: form-data; name="file"; filename="a\0b"\r\n\r\nRIFF'),
        multipart(b'Content-Disposition: form-data; name="prompt"\r\n\r\n\xff\xfe'),
        multipart(*[b'Content-Disposition: form-data; name="a"\r\n\r\n1'] * 65),
        multipart(*[b'Content-Disposition: form-data; name="file"\r\n\r\nRIFF'] * 2),
    ]
    for body, header in bodies:
        async with http.post(url + PATH, data=body, headers=header) as response:
            assert response.status == 400, body[:60]
            assert "Traceback" not in await response.text()
    assert not bus.asks


async def test_a_body_that_never_ends_is_given_up(serve: Serve):
    url = await serve(Settings(body_timeout_s=0.05))
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n"
    head += "Content-Type: multipart/form-data; boundary=X\r\n\r\n"
    reader, writer = await raw_request(url, head.encode() + b'--X\r\nContent-Disposition: form-data; name="a"\r\n\r\n1')
    assert b" 408 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_translations_are_refused_clearly(http, url):
    async with http.post(url + "/v1/audio/translations", data=form()) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "unsupported_endpoint"


async def test_failures_before_and_after_the_first_words(http, bus, url):
    bus.failures = {0: OmniError("gone", status=503, code="stage_lost")}
    assert (await refused(http, url, status=503))["code"] == "stage_lost"
    assert (await refused(http, url, status=503, stream="true"))["code"] == "stage_lost"
    bus.failures = {1: OmniError("gone", status=503, code="stage_lost")}
    assert (await refused(http, url, status=503))["code"] == "stage_lost"
    status, _, text = await post(http, url, stream="true")
    assert status == 200
    assert [e.get("type") for e in events_of(text)] == ["transcript.text.delta", None]
    assert events_of(text)[-1]["error"]["code"] == "stage_lost"


async def test_a_client_that_leaves_cancels_its_request(http, bus, url):
    bus.gates = {1: asyncio.Event()}
    async with http.post(url + PATH, data=form(stream="true")) as response:
        await response.content.readline()
        response.close()
    await bus.until(lambda b: b.cancelled == 1)
    assert not bus.open


# ------------------------------------------------------------------------------------------------------ real clients


async def test_openai_python(client):
    create = client.audio.transcriptions.create
    file = ("speech.wav", WAV, "audio/wav")
    plain = await create(model="whisper-1", file=file)
    assert plain.text == TEXT
    assert plain.usage.seconds == 1
    times = ["segment"]
    verbose = await create(model="whisper-1", file=file, response_format="verbose_json", timestamp_granularities=times)
    assert verbose.duration == 1.0
    assert [s.text for s in verbose.segments] == [s.text for s in SEGMENTS]
    assert await create(model="whisper-1", file=file, response_format="text") == TEXT + "\n"
    assert (await create(model="whisper-1", file=file, response_format="vtt")).startswith("WEBVTT")
    events = [e async for e in await create(model="whisper-1", file=file, response_format="json", stream=True)]
    assert [e.type for e in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    assert events[-1].text == "".join(e.delta for e in events[:-1]) == TEXT
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="whisper-1", file=("a.txt", b"hello", "text/plain"))
    assert (caught.value.param, caught.value.code) == ("file", "invalid_audio")
