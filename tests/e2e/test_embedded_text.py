"""What chat clients send to be spoken: fragments, symbols, odd Unicode, and the longest text."""

import base64

import numpy as np
import pytest

from e2e.clients.api import Api, Body, say
from e2e.clients.sound import RATE, from_pcm, wav

pytestmark = pytest.mark.embedded

SPEECH = "/v1/audio/speech"
CHAT = "/v1/chat/completions"
EMPTY = ["", " ", "\n"]
SILENT = ["😄", "...", "—", "！？", "​", "```"]
SPOKEN = ["n,.", "Fa.", "---\nHow to…", "a", "OK", "1次"]
#: What may stand around words without getting in the way.
ODD = {
    "NUL": "a\0b",
    "override": "‮hello",
    "mark": "\ufeffhello",
    "family": "👨‍👩‍👧‍👦 hello",
    "zalgo": "he" + "̵̡" * 500 + "llo",
}


@pytest.mark.parametrize("text", EMPTY + SILENT)
async def test_nothing_to_speak_is_told_in_the_same_way_on_all_paths(api: Api, text: str) -> None:
    """B094: no sound of no length, no stream that is only an error, and nothing is left in the stages."""
    seen = []
    for more in ({}, {"stream_format": "audio"}, {"stream_format": "sse"}, {"response_format": "mp3"}, {"speed": 3}):
        error = (await api.speech(text, **more)).error
        seen.append((error["param"], error["code"]))
    assert set(seen) == {("input", "invalid_value" if text in EMPTY else "nothing_to_speak")}
    await api.idle()


@pytest.mark.parametrize("text", SPOKEN)
async def test_fragments_are_spoken_the_same_way_on_all_paths(api: Api, text: str) -> None:
    """B094; B097: a short text does not run away."""
    plain = await api.speech(text)
    assert plain.status == 200
    assert 0.2 < len(plain.data) / 2 / RATE < 3
    assert np.abs(from_pcm(plain.data)).max() > 0.05
    body = {"model": "tts-1", "input": text, "voice": "alloy", "response_format": "pcm", "seed": 7}
    events = await api.events(SPEECH, body | {"stream_format": "sse"})
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == plain.data


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
async def test_odd_characters_beside_words(api: Api, text: str) -> None:
    """B095."""
    answer = await api.speech(text)
    assert answer.status == 200
    if "hello" in text:
        assert "hello" in (await api.heard(wav(answer.data))).lower()
    told = await api.chat_stream(say(f"Say hello. {text[:100]}", max_tokens=8))
    assert told.text and told.sound


async def test_composed_and_decomposed_letters_sound_alike(api: Api) -> None:
    """B095."""
    composed, decomposed = await api.speech("A caf\u00e9."), await api.speech("A cafe\u0301.")
    assert composed.status == 200
    assert composed.data == decomposed.data


@pytest.mark.parametrize("escape", [b"\\ud83d", b"\\udc00 x", b"\xff", b"\xed\xa0\xbd"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SPEECH, b'{"model":"tts-1","input":"hi %s","voice":"alloy"}'),
        (SPEECH, b'{"model":"tts-1","input":"hi","voice":"%s"}'),
        (CHAT, b'{"model":"embedded","messages":[{"role":"user","content":"hi %s"}]}'),
        (CHAT, b'{"model":"embedded","messages":[{"role":"user","content":[{"type":"text","text":"%s"}]}]}'),
        (CHAT, b'{"model":"embedded","stop":"%s","messages":[{"role":"user","content":"hi"}]}'),
    ],
)
async def test_what_is_no_text_is_refused_in_every_field(api: Api, path: str, body: bytes, escape: bytes) -> None:
    """B095: lone surrogates as escapes and as bytes, and other bytes that are not UTF-8."""
    answer = await api.post(path, body % escape)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


async def test_a_chat_answer_that_cannot_be_spoken_is_still_a_file(api: Api) -> None:
    """B094: the text is the answer, so 400 would be wrong; a short silence is what players open."""
    body = say("Say hello.")
    body["stop"] = (await api.chat_stream(body)).text[:4]
    whole = (await api.chat(body))["choices"][0]["message"]["audio"]
    streamed = await api.chat_stream(body)
    assert whole["transcript"] == streamed.text == ""
    assert base64.b64decode(whole["data"]) == streamed.sound == bytes(2 * RATE // 10)


async def test_the_longest_text_is_spoken_to_its_end(api: Api) -> None:
    """4096 characters; one more is refused."""
    sentences = [f"This is sentence number {number} of a very long text." for number in range(1, 200)]
    text = " ".join(sentences)[: 4096 - len(" The parcel is on the table.")] + " The parcel is on the table."
    assert len(text) == 4096
    answer = await api.speech(text)
    assert answer.status == 200
    assert len(answer.data) / 2 / RATE > 200
    heard = await api.heard(wav(answer.data[-8 * 2 * RATE :]))
    assert "parcel is on the table" in heard.lower()
    error = (await api.speech(text + ".")).error
    assert (error["param"], error["code"]) == ("input", "string_above_max_length")


async def test_a_prompt_beyond_the_context_is_refused(api: Api) -> None:
    """Text only. Each digit is a token, so few enough characters are too many tokens; then too many characters."""
    body = say("7" * 9000, modalities=["text"], audio=None)
    assert_refused(await api.post(CHAT, body), "messages", "context_length_exceeded")
    body["messages"][0]["content"] = "7" * 32_769
    assert_refused(await api.post(CHAT, body), "messages[0].content", "string_above_max_length")
    await api.idle()


def assert_refused(answer: Body, param: str, code: str) -> None:
    assert answer.status == 400
    assert (answer.error["param"], answer.error["code"]) == (param, code)
