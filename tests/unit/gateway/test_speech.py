"""The speech endpoint over a rig bus: every format in both stream forms, refusals, failures on the way, voices."""

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import av
import numpy as np
import openai
import pytest
import pytest_asyncio

from omni_common.errors import OmniError
from omni_common.frames import Audio, Text
from omni_gateway.context import Settings
from omni_gateway.media.encode import CONTENT_TYPES, to_int16
from unit.gateway.conftest import Serve, raw_post, raw_request
from unit.gateway.rig_bus import RATE, WORD_SAMPLES, RigBus, event, sound_event, tone

SPEECH = "/v1/audio/speech"
WORDS = "one two three four five six seven eight nine ten eleven twelve"
SECONDS = 1.2
MAGIC = {
    "mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3"),
    "wav": (b"RIFF",),
    "flac": (b"fLaC",),
    "opus": (b"OggS",),
    "aac": (b"\xff\xf1", b"\xff\xf9"),
    "pcm": (b"",),
    "pcm16": (b"",),
}
UNSPEAKABLE = ["😄", "...", "—", "n,.", "！？", "\u200b", "<b></b>", "```"]


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as sdk:
        yield sdk


async def say(http: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, str, bytes]:
    async with http.post(url + SPEECH, json={"input": WORDS, "voice": "alloy", **body}) as response:
        assert "Content-Encoding" not in response.headers
        assert response.headers["x-request-id"].startswith("req_")
        return response.status, response.content_type, await response.read()


async def refused(http: aiohttp.ClientSession, url: str, status: int = 400, **body: Any) -> dict[str, Any]:
    got, content_type, data = await say(http, url, **body)
    assert (got, content_type) == (status, "application/json"), data
    return json.loads(data)["error"]


def events_of(data: bytes) -> list[dict[str, Any]]:
    """As LiveKit reads them: only lines that begin with `data: `."""
    frames = [frame for frame in data.decode().split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


def sound_of(events: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(e["audio"]) for e in events if e["type"] == "speech.audio.delta")


def decoded(data: bytes, fmt: str) -> tuple[np.ndarray, int]:
    if fmt.startswith("pcm"):
        return np.frombuffer(data, "<i2"), RATE
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="s16", layout="mono", rate=stream.rate)
        blocks = [out.to_ndarray()[0] for frame in container.decode(stream) for out in resampler.resample(frame)]
        return np.concatenate(blocks), stream.rate


# ------------------------------------------------------------------------------------------------------- the bytes


@pytest.mark.parametrize("form", ["audio", "sse"])
@pytest.mark.parametrize("fmt", list(CONTENT_TYPES))
async def test_every_format_in_both_forms(http, url, fmt, form):
    status, content_type, data = await say(http, url, response_format=fmt, stream_format=form)
    assert status == 200
    if form == "sse":
        assert content_type == "text/event-stream"
        events = events_of(data)
        assert [e["type"] for e in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
        done = {"input_tokens": len(WORDS), "output_tokens": 24, "total_tokens": len(WORDS) + 24}
        assert events[-1]["type"] == "speech.audio.done"
        assert done.items() <= events[-1]["usage"].items()
        data = sound_of(events)
    else:
        assert content_type == CONTENT_TYPES[fmt]
    assert data.startswith(MAGIC[fmt])
    heard, rate = decoded(data, fmt)
    assert len(heard) / rate == pytest.approx(SECONDS, abs=0.1)
    spectrum = np.abs(np.fft.rfft(heard * np.hanning(len(heard))))
    assert np.argmax(spectrum) * rate / len(heard) == pytest.approx(440.0, abs=1.0)


async def test_mp3_is_what_comes_when_no_format_is_named(http, url):
    for body in ({}, {"response_format": None}):
        status, content_type, data = await say(http, url, **body)
        assert (status, content_type) == (200, "audio/mpeg")
        assert data.startswith(MAGIC["mp3"])


async def test_pcm_is_the_same_whichever_way_it_comes(http, url):
    """B011: nothing is lost or changed between the ways, and `stream` changes nothing."""
    whole = to_int16(tone(12 * WORD_SAMPLES)).tobytes()
    for extra in ({}, {"stream": True}, {"stream": False}, {"stream_format": "audio"}, {"stream_format": None}):
        assert (await say(http, url, response_format="pcm", **extra))[2] == whole
    events = events_of((await say(http, url, response_format="pcm", stream_format="sse"))[2])
    assert sound_of(events) == whole


async def test_bytes_leave_when_the_first_sound_exists_and_not_before(http, bus, url):
    bus.gates = {0: asyncio.Event(), 1: asyncio.Event()}
    body = {"input": WORDS, "response_format": "wav"}
    post = asyncio.create_task(http.post(url + SPEECH, json=body))
    await bus.until(lambda b: len(b.open) == 1)
    assert not post.done()
    bus.gates[0].set()
    response = await post
    first, _ = await response.content.readchunk()
    assert len(first) == 44 + 2 * WORD_SAMPLES
    with wave.open(io.BytesIO(first)) as reader:
        assert reader.getframerate() == RATE
    bus.gates[1].set()
    assert len(first + await response.read()) == 44 + 2 * 12 * WORD_SAMPLES
    assert bus.completed == 1


async def test_a_slow_start_opens_the_event_stream_with_comments(http, bus, serve: Serve):
    url = await serve(Settings(keep_alive_s=0.01))
    bus.gates = {0: asyncio.Event()}
    async with http.post(url + SPEECH, json={"input": "hi", "stream_format": "sse"}) as response:
        assert await response.content.readline() == b": keep-alive\n"
        bus.gates[0].set()
        assert events_of(b"\n\n" + (await response.content.read()).lstrip(b"\n"))[-1]["type"] == "speech.audio.done"


async def test_pieces_without_sound_make_no_gap(http, bus, url):
    def script(ask):
        yield event("audio", None, 0, 0)
        yield event("audio", Audio(RATE), 0, 0, arrays={"samples": tone(0)})
        yield sound_event(0, "a")
        yield event("audio", Audio(RATE), 2400, 2400)
        yield sound_event(2400, "b")
        yield event("audio", None, 4800, 4800, last=True)

    bus.script = script
    _, _, data = await say(http, url, response_format="pcm")
    assert data == to_int16(tone(2 * WORD_SAMPLES)).tobytes()


@pytest.mark.parametrize("rate", [16_000, 22_050, 44_100, 48_000])
async def test_pcm_has_24_khz_and_wav_the_true_rate_whatever_the_model_makes(http, bus, url, rate):
    def script(ask):
        samples = (0.3 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
        yield event("audio", Audio(rate), 0, rate, arrays={"samples": samples}, last=True)

    bus.script = script
    _, _, pcm = await say(http, url, response_format="pcm")
    heard = np.frombuffer(pcm, "<i2")
    assert len(heard) == RATE
    assert np.argmax(np.abs(np.fft.rfft(heard))) == pytest.approx(440, abs=1)
    _, _, data = await say(http, url, response_format="wav")
    with wave.open(io.BytesIO(data)) as reader:
        assert reader.getframerate() == rate


# ---------------------------------------------------------------------------------------------------- what is asked


async def test_the_ask_has_the_text_the_voice_and_a_seed(http, bus, url):
    await say(http, url, input="Hello 😀", voice="ALLOY", model="tts-1", instructions="calm", seed=-7, speed=1.25)
    (ask,) = bus.asks
    assert (ask.pipeline.name, ask.task, ask.outputs, ask.seed) == ("speech", "speech", ["audio"], -7)
    (given,) = ask.given
    assert (given.modality, given.start, given.end, given.last) == ("text", 0, 7, True)
    assert given.body == Text("Hello 😀")
    assert ask.params["talker"] == {"voice": "heart", "speed": 1.25}
    assert set(ask.params) == {"talker", "code2wav"}


async def test_a_voice_may_be_an_object_another_one_or_missing(http, bus, url):
    for voice, meant in (({"id": "michael"}, "michael"), ("verse", "heart"), (None, "heart")):
        status, _, _ = await say(http, url, voice=voice)
        assert status == 200
        assert bus.asks[-1].params["talker"]["voice"] == meant
    assert 0 <= bus.asks[-1].seed < 2**32


@pytest.mark.parametrize(("speed", "native"), [(0.25, 0.5), (0.5, 0.5), (1.7, 1.7), (2.0, 2.0), (4.0, 2.0)])
async def test_speed_beyond_the_talkers_own_is_stretched(http, bus, url, speed, native):
    _, _, data = await say(http, url, response_format="pcm", speed=speed)
    assert bus.asks[0].params["talker"]["speed"] == native
    # The rig's talker speaks at one speed, so what is left to see is the stretching alone.
    assert len(data) / 2 / RATE == pytest.approx(SECONDS * native / speed, rel=0.04)
    heard = np.frombuffer(data, "<i2")
    assert np.argmax(np.abs(np.fft.rfft(heard * np.hanning(len(heard))))) * RATE / len(heard) == pytest.approx(
        440, abs=3
    )
    _, _, events = await say(http, url, response_format="pcm", speed=speed, stream_format="sse")
    assert sound_of(events_of(events)) == data


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": " \n\t"}, "input"),
        ({"input": "x" * 401}, "input"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"]}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"voice": ""}, "voice"),
        ({"voice": 1}, "voice"),
        ({"voice": {"id": "/etc/passwd"}}, "voice"),
        ({"voice": {}}, "voice.id"),
        ({"response_format": "m4a"}, "response_format"),
        ({"response_format": "MP3"}, "response_format"),
        ({"response_format": ""}, "response_format"),
        ({"response_format": "../../x"}, "response_format"),
        ({"stream_format": "websocket"}, "stream_format"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 4.1}, "speed"),
        ({"speed": "1"}, "speed"),
        ({"speed": True}, "speed"),
        ({"instructions": {}}, "instructions"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"model": 3}, "model"),
        ({"model": "embedded"}, "model"),
    ],
)
async def test_refusals_name_the_field_and_ask_the_bus_nothing(http, bus, url, body, param):
    error = await refused(http, url, **body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert not bus.asks


async def test_refusals_list_what_would_be_right(http, url):
    assert "mp3, wav, flac, opus, aac, pcm" in (await refused(http, url, response_format="m4a"))["message"]
    assert "heart, michael" in (await refused(http, url, voice="nobody"))["message"]
    assert (await refused(http, url, status=404, model="gpt-9"))["code"] == "model_not_found"
    async with http.post(url + SPEECH, json={"voice": "alloy"}) as response:
        assert (await response.json())["error"]["param"] == "input"


# -------------------------------------------------------------------------------------------- nothing, and failures


@pytest.mark.parametrize("form", ["audio", "sse"])
@pytest.mark.parametrize("fmt", ["mp3", "wav", "pcm"])
async def test_nothing_to_speak_is_the_same_refusal_on_every_path(http, bus, url, fmt, form):
    bus.script = lambda ask: [event("audio", None, 0, 0, last=True)]
    for text in UNSPEAKABLE:
        error = await refused(http, url, input=text, response_format=fmt, stream_format=form, speed=3.0)
        assert (error["code"], error["param"]) == ("nothing_to_speak", "input")
    assert not bus.open


async def test_a_failure_before_the_first_sound_has_its_status(http, bus, url):
    bus.failures = {0: OmniError("talker is gone", status=503, code="stage_lost", retry_after_s=2)}
    for form in ("audio", "sse"):
        error = await refused(http, url, status=503, stream_format=form)
        assert error["code"] == "stage_lost"
    bus.failures = {0: RuntimeError("secret path /x")}
    assert "secret" not in (await refused(http, url, status=500))["message"]


async def test_a_full_queue_is_429(http, bus, url):
    bus.refusal = OmniError("full", status=429, code="queue_full", retry_after_s=1.0)
    assert (await refused(http, url, status=429))["code"] == "queue_full"


async def test_a_failure_on_the_way_is_an_event(http, bus, url):
    bus.failures = {3: OmniError("talker died", code="stage_lost")}
    status, _, data = await say(http, url, response_format="pcm", stream_format="sse")
    events = events_of(data)
    assert status == 200
    assert [e["type"] for e in events] == ["speech.audio.delta"] * 3 + ["speech.audio.error"]
    assert (events[-1]["error"]["code"], events[-1]["error"]["message"]) == ("stage_lost", "talker died")
    bus.failures = {}
    assert (await say(http, url))[0] == 200


@pytest.mark.parametrize("fmt", ["mp3", "wav", "pcm"])
async def test_a_failure_on_the_way_breaks_a_raw_body_off(http, bus, url, fmt):
    bus.failures = {3: OmniError("talker died", code="stage_lost")}
    with pytest.raises(aiohttp.ClientPayloadError):
        await say(http, url, response_format=fmt)
    bus.failures = {}
    assert (await say(http, url))[0] == 200
    async with http.get(url + "/metrics") as response:
        text = await response.text()
    assert 'omni_requests_total{outcome="error",route="/v1/audio/speech",status="200"} 1.0' in text


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_sound_that_is_no_number_is_an_error(http, bus, url, bad):
    def script(ask):
        yield event("audio", Audio(RATE), 0, 2, arrays={"samples": np.array([0.0, bad], np.float32)}, last=True)

    bus.script = script
    for form in ("audio", "sse"):
        assert (await refused(http, url, status=500, stream_format=form))["code"] == "numerical_error"


async def test_a_client_that_leaves_cancels_its_request(bus, url):
    for gate, form in ((0, "audio"), (0, "sse"), (3, "audio"), (3, "sse")):
        bus.gates = {gate: asyncio.Event()}
        cancelled = bus.cancelled
        body = {"input": WORDS, "response_format": "pcm", "stream_format": form}
        reader, writer = await raw_request(url, raw_post(SPEECH, body))
        if gate:
            await reader.readuntil(b"\r\n\r\n")
        else:
            await bus.until(lambda b: len(b.open) == 1)
        writer.close()
        await writer.wait_closed()
        await bus.until(lambda b, before=cancelled: b.cancelled == before + 1)
        assert not bus.open


async def test_many_at_once_each_get_their_own_sound(http, bus, url):
    def script(ask):
        hz = float(ask.given[0].body.text)
        for i in range(10):
            samples = tone(WORD_SAMPLES, hz, i * WORD_SAMPLES)
            yield event("audio", Audio(RATE), i * WORD_SAMPLES, (i + 1) * WORD_SAMPLES, arrays={"samples": samples})
        yield event("audio", None, 10 * WORD_SAMPLES, 10 * WORD_SAMPLES, last=True)

    bus.script = script
    formats = ["mp3", "wav", "flac", "opus", "aac", "pcm"]
    asked = [(200.0 + 40 * i, formats[i % 6]) for i in range(24)]
    answers = await asyncio.gather(*(say(http, url, input=str(hz), response_format=f) for hz, f in asked))
    for (hz, fmt), (_, _, data) in zip(asked, answers, strict=True):
        heard, rate = decoded(data, fmt)
        peak = np.argmax(np.abs(np.fft.rfft(heard * np.hanning(len(heard))))) * rate / len(heard)
        assert peak == pytest.approx(hz, abs=3.0)


# ------------------------------------------------------------------------------------------------------ real clients


async def test_openai_python_whole_streamed_and_to_a_file(client, tmp_path):
    whole = await client.audio.speech.create(model="tts-1", input=WORDS, voice="alloy", response_format="wav")
    assert whole.content.startswith(b"RIFF")
    streaming = client.audio.speech.with_streaming_response
    async with streaming.create(model="tts-1", input=WORDS, voice="alloy", response_format="wav") as response:
        assert response.headers["content-type"] == "audio/wav"
        await response.stream_to_file(tmp_path / "a.wav")
    assert (tmp_path / "a.wav").read_bytes() == whole.content
    voice = {"id": "michael"}
    assert (await client.audio.speech.create(model="gpt-4o-mini-tts", input="hi", voice=voice)).content
    with pytest.raises(openai.BadRequestError) as caught:
        await client.audio.speech.create(model="tts-1", input="hi", voice="nobody")
    assert caught.value.param == "voice"


async def test_openai_python_sees_a_broken_body(client, bus):
    bus.failures = {2: OmniError("talker died")}
    with pytest.raises(openai.APIConnectionError):
        await client.audio.speech.create(model="tts-1", input=WORDS, voice="alloy", response_format="pcm")


async def test_voices_and_models_as_open_webui_reads_them(http, url, bus: RigBus):
    async with http.get(url + "/v1/audio/voices") as response:
        listed = (await response.json())["voices"]
    names = {v["id"]: v["name"] for v in listed}
    assert names == {"heart": "Heart", "michael": "michael", "alloy": "Alloy (Heart)"} | {
        alias: f"{alias.capitalize()} (Heart)" for alias in ("ash", "verse")
    }
    assert {v["id"]: v.get("alias_of") for v in listed}["alloy"] == "heart"
    assert listed[0]["models"] == ["embedded", "speech"]
    for voice in names:
        assert (await say(http, url, voice=voice))[0] == 200
    async with http.get(url + "/v1/audio/models") as response:
        models = [m["id"] for m in (await response.json())["models"]]
    assert models == ["speech", "tts-1", "gpt-4o-mini-tts"]
    for model in models:
        assert (await say(http, url, model=model))[0] == 200


async def test_the_lists_and_speech_are_behind_the_key(http, serve: Serve):
    url = await serve(Settings(api_keys=("secret",)))
    for path in ("/v1/audio/voices", "/v1/audio/models"):
        async with http.get(url + path) as response:
            assert response.status == 401
        async with http.get(url + path, headers={"Authorization": "Bearer secret"}) as response:
            assert response.status == 200
    async with http.post(url + SPEECH, json={"input": "hi"}) as response:
        assert response.status == 401
