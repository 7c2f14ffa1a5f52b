"""Every format of chat and speech: container, rate, length and words; speeds; and what is refused."""

import base64
import io
import wave

import numpy as np
import pytest
import soundfile

from e2e.clients.api import Api, join, say
from e2e.clients.sound import RATE, decode, from_pcm, magic, wav

pytestmark = pytest.mark.embedded

SPEECH = "/v1/audio/speech"
#: Four sentences with blank lines between them, as chat clients send them.
TEXT = "The train leaves at noon.\n\nPlease be there early.\n\nThe doors close on time.\n\nHave a pleasant journey."
WORDS = ["train leaves", "there early", "doors close", "pleasant journey"]
TYPES = {
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
}
CODECS = {"mp3": "mp3float", "wav": "pcm_s16le", "flac": "flac", "opus": "opus", "aac": "aac"}
#: What ends in a container begins with this; so many beginnings, so many files.
BEGINNINGS = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OpusHead", "mp3": b"ID3"}
#: Seconds.
CLOSE = 0.1


def assert_is(data: bytes, form: str, pcm: np.ndarray) -> None:
    """One whole file of `form` that sounds like `pcm` (24 kHz) and is as long within 100 ms."""
    assert magic(data) == form
    if form in BEGINNINGS:
        assert data.count(BEGINNINGS[form]) == 1
    if form == "pcm":
        assert np.array_equal(from_pcm(data), pcm)
        return
    sound = decode(data)
    assert sound.codec == CODECS[form]
    assert sound.rate == (48_000 if form == "opus" else RATE)
    assert abs(sound.seconds - len(pcm) / RATE) <= CLOSE
    if form in ("wav", "flac"):
        assert np.array_equal(sound.samples, pcm)


@pytest.mark.parametrize("form", TYPES)
async def test_speech(api: Api, form: str) -> None:
    """B004, B010, B011, and B030: nothing compresses what is compressed already."""
    pcm = from_pcm((await api.speech(TEXT)).data)
    answer = await api.speech(TEXT, form, stream_format="audio")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == TYPES[form]
    assert "Content-Encoding" not in answer.headers
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert_is(answer.data, form, pcm)
    body = {"model": "tts-1", "input": TEXT, "voice": "alloy", "response_format": form, "seed": 7}
    events = await api.events(SPEECH, body | {"stream_format": "sse"})
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"} and len(events) > 2
    assert events[-1]["type"] == "speech.audio.done" and events[-1]["usage"]["output_tokens"] > 100
    joined = b"".join(base64.b64decode(event["audio"], validate=True) for event in events[:-1])
    assert_is(joined, form, pcm)
    heard = await api.heard(wav(answer.data) if form == "pcm" else answer.data, f"speech.{form}")
    assert all(words in heard.lower() for words in WORDS), heard


async def test_a_streamed_wav_opens_everywhere(api: Api) -> None:
    """B003: one header of 44 bytes whose sizes are unknown, never 0."""
    data = (await api.speech(TEXT, "wav")).data
    pcm = (await api.speech(TEXT)).data
    assert data[4:8] == data[40:44] == b"\xff\xff\xff\xff"
    assert data[44:] == pcm
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        assert file.readframes(file.getnframes()) == pcm
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE and samples.tobytes() == pcm


@pytest.mark.parametrize("form", [*CODECS, "pcm16"])
async def test_chat(api: Api, form: str) -> None:
    """B002: what was asked for, streamed and not; the stream is one file."""
    body = say("What is the capital of Japan?")
    pcm = from_pcm((await api.chat_stream(body)).sound)
    body["audio"] = {"voice": "alloy", "format": form}
    message = (await api.chat(body))["choices"][0]["message"]
    whole = base64.b64decode(message["audio"]["data"], validate=True)
    streamed = join(await api.events("/v1/chat/completions", body | {"stream": True})).sound
    for data in (whole, streamed):
        assert_is(data, "pcm" if form == "pcm16" else form, pcm)
    if form != "pcm16":
        assert "Tokyo" in await api.heard(streamed, f"answer.{form}")
    if form == "wav":
        assert int.from_bytes(whole[40:44], "little") == len(whole) - 44


async def test_nothing_said_about_the_format_means_mp3_and_wav(api: Api) -> None:
    """B009 for speech; for chat it is wav."""
    for more in ({}, {"response_format": None}):
        answer = await api.post(SPEECH, {"model": "tts-1", "input": "Hi there.", "voice": "alloy"} | more)
        assert answer.headers["Content-Type"] == "audio/mpeg" and magic(answer.data) == "mp3"
    message = (await api.chat(say("Say hello.", audio={"voice": "alloy"})))["choices"][0]["message"]
    assert magic(base64.b64decode(message["audio"]["data"])) == "wav"


@pytest.mark.parametrize("form", ["m4a", "MP3", ""])
async def test_an_unknown_format_is_refused_by_name_before_any_work(api: Api, form: str) -> None:
    """B012."""
    admitted = (await api.idle()).admitted
    error = (await api.speech("Hello.", form)).error
    assert error["param"] == "response_format" and "flac" in error["message"]
    answer = await api.post("/v1/chat/completions", say("Hello", audio={"voice": "alloy", "format": form}))
    assert answer.status == 400 and answer.error["param"] == "audio.format"
    assert (await api.fleet()).admitted == admitted


async def test_an_upload_that_is_no_sound_is_refused_without_internals(api: Api) -> None:
    """B012."""
    for data in (b"just a text", b"", b"RIFF\xff\xff\xff\xffWAVEfmt "):
        with pytest.raises(AssertionError) as refused:
            await api.heard(data, "note.wav")
        said = str(refused.value)
        assert '"param":"file"' in said and '"invalid_request_error"' in said
        assert "ffmpeg" not in said and "/" not in said.split("assert")[0] and "Traceback" not in said


@pytest.mark.parametrize(("speed", "words"), [(0.25, WORDS), (0.5, WORDS), (2.0, ["train", "early"]), (4.0, [])])
async def test_speed(api: Api, speed: float, words: list[str]) -> None:
    """About as long as asked for: up to 2 the talker speaks in frames, and from there the sound is stretched."""
    normal = await api.speech(TEXT)
    answer = await api.speech(TEXT, speed=speed)
    assert answer.status == 200
    assert len(answer.data) * speed == pytest.approx(len(normal.data), rel=0.15)
    heard = (await api.heard(wav(answer.data))).lower()
    assert all(word in heard for word in words), heard
    assert np.abs(from_pcm(answer.data)).max() > 0.1


@pytest.mark.parametrize("speed", [0.24, 4.01, "fast"])
async def test_a_speed_out_of_range_is_refused(api: Api, speed: object) -> None:
    assert (await api.speech("Hello.", speed=speed)).error["param"] == "speed"
