"""How known clients read the answers: each of their quirks, written anew from what is known of them."""

import asyncio
import base64
import io
import json
import wave
from typing import Any

import pytest

from e2e.clients.api import Api
from e2e.clients.sound import RATE, decode, from_pcm, is_audible, magic, wav

pytestmark = pytest.mark.embedded

TEXT = "The train leaves at noon. Please be there early."
SPEECH = "/v1/audio/speech"
#: Names that pipecat lets through; it refuses all others before it asks.
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip


async def livekit(api: Api, model: str, stream_format: str) -> tuple[str, bytes, str]:
    """LiveKit decides by the Content-Type how to read; gives it, the sound in mp3, and the request id."""
    body = {"input": TEXT, "model": model, "voice": "ash", "response_format": "mp3", "speed": 1.0}
    sound = b""
    async with api.session.post(api.url + SPEECH, json=body | {"stream_format": stream_format}) as response:
        assert response.status == 200
        kind = response.headers["Content-Type"]
        if not kind.startswith("text/event-stream"):
            return kind, await response.read(), response.headers["x-request-id"]
        async for raw in response.content:
            line = raw.decode().rstrip("\r\n")
            # Without the space it would not be seen.
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event["type"] == "speech.audio.delta":
                sound += base64.b64decode(event.get("delta") or event["audio"])
        return kind, sound, response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("model", "stream_format", "kind"),
    [("gpt-4o-mini-tts", "sse", "text/event-stream"), ("tts-1", "audio", "audio/mpeg")],
)
async def test_livekit(api: Api, model: str, stream_format: str, kind: str) -> None:
    """B007: what is labelled as events is events, and frames come out at 24 kHz mono."""
    # Its way to open the connection early.
    assert (await api.get("/v1/")).status < 500
    told, sound, request_id = await livekit(api, model, stream_format)
    assert told.split(";")[0] == kind and request_id
    decoded = decode(sound)
    assert magic(sound) == "mp3" and decoded.rate == RATE
    assert "train leaves" in (await api.heard(sound, "speech.mp3")).lower()


async def test_livekit_hears(api: Api) -> None:
    spoken = wav((await api.speech(TEXT)).data)
    for form in ("json", "verbose_json"):
        answer = json.loads(await api.heard(spoken, "file.wav", response_format=form, language="en"))
        assert "train leaves" in answer["text"].lower()


async def test_wyoming_reads_the_header_from_the_first_chunk(api: Api) -> None:
    """Home Assistant: what does not parse in the first chunk is played as noise, and all that follows is samples."""
    body = {"model": "tts-1", "voice": "alloy", "input": TEXT, "response_format": "wav", "seed": 7}
    async with api.session.post(api.url + SPEECH, json=body) as response:
        chunks = [chunk async for chunk, _ in response.content.iter_chunks()]
    with wave.open(io.BytesIO(chunks[0])) as header:
        assert (header.getframerate(), header.getsampwidth(), header.getnchannels()) == (RATE, 2, 1)
        assert len(header.readframes(1)) == 2
    assert len(chunks) > 1
    pcm = chunks[0][44:] + b"".join(chunks[1:])
    assert pcm == (await api.speech(TEXT)).data


async def test_wyoming_asks_for_sentences_in_parallel(api: Api) -> None:
    sentences = TEXT.split(". ")
    alone = [(await api.speech(sentence, "wav")).data for sentence in sentences]
    assert [b.data for b in await asyncio.gather(*(api.speech(s, "wav") for s in sentences))] == alone


async def test_wyoming_hears_a_stream(api: Api) -> None:
    lines = (await api.heard(wav((await api.speech(TEXT)).data), "recording.wav", stream="true")).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["type"] == "transcript.text.done" and "train leaves" in events[-1]["text"].lower()


async def test_open_webui(api: Api) -> None:
    """B009, B029: lists of objects; no format asked for, kept as .mp3, with headers about its user."""
    voices = {v["id"]: v["name"] for v in json.loads((await api.get("/v1/audio/voices")).data)["voices"]}
    assert "alloy" in voices and "heart" in voices and all(isinstance(name, str) for name in voices.values())
    models = [model["id"] for model in json.loads((await api.get("/v1/audio/models")).data)["models"]]
    assert "tts-1" in models
    user = {"X-OpenWebUI-User-Name": "J%C3%B6rg", "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-User-Role": "admin"}
    # Markdown debris, as its splitting at punctuation leaves it.
    body = {"input": "**Please** be there early:", "voice": "alloy", "model": "tts-1"}
    answer = await api.post(SPEECH, body, **user)
    assert answer.headers["Content-Type"] == "audio/mpeg" and magic(answer.data) == "mp3"
    assert "be there early" in (await api.heard(answer.data, "0f8fad5b.mp3")).lower()
    refused = await api.post(SPEECH, body | {"voice": "nobody"}, **user)
    assert refused.status == 400 and "heart" in refused.error["message"]


async def pipecat(api: Api, body: dict[str, Any]) -> list[bytes]:
    """Chunks as it feeds them on: each is played as 24 kHz 16-bit mono."""
    async with api.session.post(api.url + SPEECH, json=body) as response:
        assert response.status == 200, await response.text()
        return [chunk async for chunk in response.content.iter_chunked(1024)]


async def test_pipecat(api: Api) -> None:
    """B030: sound comes before all of it is made."""
    body = {"input": TEXT, "model": "gpt-4o-mini-tts", "voice": "sage", "response_format": "pcm"}
    chunks = await pipecat(api, body | {"instructions": "calm", "speed": 1.0})
    pcm = b"".join(chunks)
    assert len(pcm) % 2 == 0 and is_audible(pcm)
    assert 2 < len(from_pcm(pcm)) / RATE < 6
    assert "train leaves" in (await api.heard(wav(pcm), "audio.wav")).lower()


@pytest.mark.parametrize("voice", [*OPENAI_VOICES, {"id": "heart"}, {"id": "alloy"}, "ALLOY", None])
async def test_every_voice_that_clients_know(api: Api, voice: Any) -> None:
    """B029: also as openai-python 2 sends it, in any case, and none."""
    answer = await api.speech("Hi.", voice=voice)
    assert answer.status == 200 and answer.data == (await api.speech("Hi.", voice="heart")).data


@pytest.mark.parametrize("voice", ["nobody", {"id": "nobody"}, ""])
async def test_an_unknown_voice_is_refused_with_the_valid_ones(api: Api, voice: Any) -> None:
    """B029."""
    error = (await api.speech("Hi.", voice=voice)).error
    assert error["param"] == "voice" and "heart" in error["message"]
