"""Cases of sound on its way through HTTP that the tests of each endpoint leave out."""

import asyncio
import base64
import io
import json
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from omni_common.frames import Audio, Text
from omni_gateway.context import Settings
from omni_gateway.stream import Ask, Event
from unit.gateway.conftest import Serve
from unit.gateway.rig_bus import RATE, RigBus, Script, answer, event, sound_event

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
USER = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Answer:
    """A chat answer, however it came."""

    status: int
    sound: bytes
    error: dict[str, Any] | None


async def spoken(http: aiohttp.ClientSession, url: str, fmt: str, streamed: bool) -> Answer:
    body = {"messages": USER, "modalities": ["text", "audio"], "audio": {"format": fmt}, "stream": streamed}
    async with http.post(url + CHAT, json=body) as response:
        text = await response.text()
        if not streamed or response.status != 200:
            parsed = json.loads(text)
            if response.status != 200:
                return Answer(response.status, b"", parsed["error"])
            return Answer(200, base64.b64decode(parsed["choices"][0]["message"]["audio"]["data"]), None)
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    data = [e["choices"][0]["delta"].get("audio", {}).get("data", "") for e in events if e.get("choices")]
    assert text.endswith("data: [DONE]\n\n") == ("error" not in events[-1])
    return Answer(200, b"".join(base64.b64decode(piece) for piece in data), events[-1].get("error"))


def one_second(rate: int, hz: float = 440.0, pieces: int = 7) -> Script:
    """A chat answer with a second of tone at `rate`, in pieces of odd lengths."""

    def script(ask: Ask) -> Iterator[Event]:
        samples = (0.3 * np.sin(2 * np.pi * hz * np.arange(rate) / rate)).astype(np.float32)
        start = 0
        for piece in np.array_split(samples, pieces):
            yield event("text", Text("la ", ids=[start]), start, start + 1)
            yield event("audio", Audio(rate), start, start + len(piece), arrays={"samples": piece})
            start += len(piece)
        yield event("text", Text(finish="stop", prompt_tokens=1), start, start, last=True)
        yield event("audio", None, start, start, last=True)

    return script


def pitch(samples: np.ndarray, rate: int) -> float:
    return float(np.argmax(np.abs(np.fft.rfft(samples * np.hanning(len(samples))))) * rate / len(samples))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("rate", [16_000, 22_050, 44_100, 48_000])
async def test_chat_pcm_has_24_khz_and_wav_the_true_rate_whatever_the_model_makes(
    http: aiohttp.ClientSession, bus: RigBus, url: str, rate: int, streamed: bool
) -> None:
    """B089: clients read pcm16 as 24 kHz mono."""
    bus.pipelines["embedded"] = msgspec.structs.replace(bus.pipelines["embedded"], audio_rate=rate)
    bus.script = one_second(rate)
    heard = np.frombuffer((await spoken(http, url, "pcm16", streamed)).sound, "<i2")
    assert len(heard) == RATE
    assert pitch(heard, RATE) == pytest.approx(440, abs=1)
    with wave.open(io.BytesIO((await spoken(http, url, "wav", streamed)).sound)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (rate, 1, 2)
        heard = np.frombuffer(reader.readframes(10 * rate), "<i2")
    assert len(heard) == rate
    assert pitch(heard, rate) == pytest.approx(440, abs=1)


LOUD = np.array([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5], np.float32)
CLIPPED = [-32767, -32767, -16384, 0, 16384, 32767, 32767]


def one_piece(samples: np.ndarray) -> Script:
    """An answer of `speech` or `chat` with these samples and nothing else."""

    def script(ask: Ask) -> Iterator[Event]:
        if "text" in ask.outputs:
            yield event("text", Text("x", ids=[0], finish="stop"), 0, 1, last=True)
        yield event("audio", Audio(RATE), 0, len(samples), arrays={"samples": samples}, last=True)

    return script


async def test_full_scale_is_clipped_and_never_wraps(http: aiohttp.ClientSession, bus: RigBus, url: str) -> None:
    """B087: in every answer that has samples as they are."""
    bus.script = one_piece(LOUD)
    for streamed in (False, True):
        assert np.frombuffer((await spoken(http, url, "pcm16", streamed)).sound, "<i2").tolist() == CLIPPED
        assert np.frombuffer((await spoken(http, url, "wav", streamed)).sound[44:], "<i2").tolist() == CLIPPED
    for fmt, head in (("pcm", 0), ("wav", 44)):
        async with http.post(url + SPEECH, json={"input": "x", "response_format": fmt}) as response:
            assert np.frombuffer((await response.read())[head:], "<i2").tolist() == CLIPPED


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", ["pcm16", "wav", "mp3"])
async def test_a_chat_answer_that_is_no_number_is_an_error(
    http: aiohttp.ClientSession, bus: RigBus, url: str, bad: float, fmt: str
) -> None:
    """B087, B090: a status where nothing was sent yet, else in band and without an end that looks well."""
    bus.script = one_piece(np.array([0.0, bad, 0.1], np.float32))
    whole = await spoken(http, url, fmt, streamed=False)
    assert whole.status == 500 and whole.error is not None and whole.error["code"] == "numerical_error"
    streamed = await spoken(http, url, fmt, streamed=True)
    assert streamed.error is not None and streamed.error["code"] == "numerical_error"
    bus.script = one_second(RATE)
    assert len((await spoken(http, url, "pcm16", streamed=True)).sound) == 2 * RATE


@pytest.mark.parametrize("streamed", [False, True])
async def test_nothing_is_lost_while_a_stream_waits_longer_than_its_comments_do(
    serve: Serve, http: aiohttp.ClientSession, bus: RigBus, streamed: bool
) -> None:
    """B067: a wait for the next event that times out, again and again, takes no event with it."""
    url = await serve(Settings(keep_alive_s=0.001))
    late = asyncio.Event()

    def script(ask: Ask) -> Iterator[Event]:
        return iter(answer([f"{number} " for number in range(30)])(ask))

    bus.script = script
    bus.gates = dict.fromkeys(range(0, 60, 7), late)
    asking = asyncio.create_task(spoken(http, url, "pcm16", streamed))
    await bus.until(lambda b: len(b.open) == 1)
    await asyncio.sleep(0.02)
    late.set()
    got = await asking
    assert got.error is None
    assert len(got.sound) == 2 * 30 * RATE // 10


async def test_each_piece_of_a_stream_decodes_alone(http: aiohttp.ClientSession, bus: RigBus, url: str) -> None:
    """B014: whole samples and whole base64 in every piece, whatever lengths the stage gives them."""
    lengths = [1, 2, 3, 777, 1, 2400, 5]
    bodies = (
        (CHAT, {"messages": USER, "stream": True, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}}),
        (SPEECH, {"input": "x", "stream_format": "sse", "response_format": "pcm"}),
    )

    def script(ask: Ask) -> Iterator[Event]:
        start = 0
        for length in lengths:
            samples = np.full(length, 0.25, np.float32)
            yield event("audio", Audio(RATE), start, start + length, arrays={"samples": samples})
            start += length
        yield event("audio", None, start, start, last=True)
        if "text" in ask.outputs:
            yield event("text", Text("x", ids=[0], finish="stop"), 0, 1, last=True)

    bus.script = script
    for path, body in bodies:
        async with http.post(url + path, json=body) as response:
            text = await response.text()
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        if path == CHAT:
            pieces = [e["choices"][0]["delta"].get("audio", {}).get("data") for e in events]
        else:
            pieces = [e.get("audio") for e in events]
        alone = [base64.b64decode(piece, validate=True) for piece in pieces if piece is not None]
        assert all(piece and len(piece) % 2 == 0 for piece in alone)
        assert set(np.frombuffer(b"".join(alone), "<i2").tolist()) == {8192}
        assert len(b"".join(alone)) == 2 * sum(lengths)


async def test_a_first_piece_without_sound_does_not_begin_the_answer(
    http: aiohttp.ClientSession, bus: RigBus, url: str
) -> None:
    """B016, B094: an empty first chunk and then a failure is still a status, in both forms."""

    def script(ask: Ask) -> Iterator[Event]:
        yield event("audio", None, 0, 0)
        yield event("audio", Audio(RATE), 0, 0, arrays={"samples": np.zeros(0, np.float32)})
        yield sound_event(0)

    bus.script = script
    bus.failures = {2: RuntimeError("broken")}
    for form in ("audio", "sse"):
        async with http.post(url + SPEECH, json={"input": "x", "stream_format": form}) as response:
            assert response.status == 500 and response.content_type == "application/json"
    assert not bus.open


async def test_streams_are_not_held_back_by_proxies(url: str, http: aiohttp.ClientSession) -> None:
    """B078: nginx is told not to collect any event stream, and a comment comes often enough for its 60 s."""
    assert Settings().keep_alive_s <= 15
    for path, body in (
        (CHAT, {"messages": USER, "stream": True}),
        (SPEECH, {"input": "hi", "stream_format": "sse"}),
    ):
        async with http.post(url + path, json=body) as response:
            assert response.headers["X-Accel-Buffering"] == "no"
            assert response.headers["Cache-Control"] == "no-cache"
            assert await response.read()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("rate", [16_000, 48_000])
async def test_chat_goes_by_the_rate_of_the_sound_as_speech_does(
    http: aiohttp.ClientSession, bus: RigBus, url: str, rate: int, streamed: bool
) -> None:
    """B089: not by what the pipeline's file says, or does not say; else it is too low, with 200."""
    bus.script = one_second(rate)
    heard = np.frombuffer((await spoken(http, url, "pcm16", streamed)).sound, "<i2")
    assert len(heard) == RATE
    assert pitch(heard, RATE) == pytest.approx(440, abs=1)
    with wave.open(io.BytesIO((await spoken(http, url, "wav", streamed)).sound)) as reader:
        assert reader.getframerate() == rate
