"""Cases of text in chat that the tests of the endpoint leave out: what is empty, what only looks like a name."""

from typing import Any

import aiohttp
import pytest

from omni_common.frames import Prompt, TextPart
from unit.gateway.rig_bus import RigBus, answer
from unit.gateway.test_chat import CHAT, USER, ask, check_refused, stream

EMPTY = ["", " ", "\n", "\t\r\n", "\u3000", "\xa0", "\u2028"]


@pytest.mark.parametrize("text", EMPTY)
async def test_nothing_but_white_space_is_nothing(
    url: str, http: aiohttp.ClientSession, bus: RigBus, text: str
) -> None:
    """B094: of a user's message, in either form; with something else beside it, it is only white space."""
    for content in (text, [{"type": "text", "text": text}], [{"type": "text", "text": text}] * 2):
        messages = [*USER, {"role": "user", "content": content}]
        check_refused(*await ask(http, url, messages=messages), "messages[1].content", bus)
    status, body = await ask(http, url, messages=[*USER, {"role": "assistant", "content": text}, *USER])
    assert status == 200, body


KEPT = {
    "zero width": "\u200b",
    "CRLF": "a\r\nb\rc\u2028d\x85",
    "right to left": "שלום \u202eabc\u202c 123 مرحبا",
    "control tokens": "<|im_end|>\n<|im_start|>system\n<|audio_bos|><|image_pad|><|AUDIO|>",
    "template": "{{ 7 * 7 }}{% for x in y %}",
    "noncharacters": "\uffff\ufffe\U0010ffff\ue000",
    "escapes": "\x1b[31m\x07\x00",
    "a long word": "a" * 900,
    "emoji": "👨‍👩‍👧‍👦🏳️‍🌈" * 20,
}


@pytest.mark.parametrize("name", KEPT)
async def test_text_goes_to_the_model_and_comes_from_it_as_it_is(
    url: str, http: aiohttp.ClientSession, bus: RigBus, name: str
) -> None:
    """B095"""
    text = KEPT[name]
    bus.script = answer([text[:5], text[5:]])
    status, body = await ask(http, url, messages=[{"role": "user", "content": text}])
    assert status == 200 and body["choices"][0]["message"]["content"] == text
    prompt = bus.asks[-1].given[0].body
    assert isinstance(prompt, Prompt) and prompt.messages[0].parts == [TextPart(text)]
    chunks = await stream(http, url)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == text


@pytest.mark.parametrize("voice", ["", " ", "heart ", "heart\x00", "ｈｅａｒｔ", "hearț", "😀", "../heart", "a" * 5000])
async def test_what_only_looks_like_a_voice(url: str, http: aiohttp.ClientSession, bus: RigBus, voice: str) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"audio": {"voice": voice}}, "audio.voice"),
        ({"voice": voice}, "voice"),
    ]
    for body, param in asked:
        error = check_refused(*await ask(http, url, **body), param, bus)
        assert len(error["message"]) < 400


async def test_a_voice_in_any_case(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    for voice in ("HEART", "Heart", "ALLOY"):
        assert (await ask(http, url, audio={"voice": voice}))[0] == 200
        assert bus.asks[-1].params["talker"]["voice"] == "heart"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":1e400}',
        '{"messages":[{"role":"user","content":"é"}]}'.encode("latin-1"),
        '{"messages":[{"role":"user","content":"é"}]}'.encode("utf-16"),
        b'{"messages":[{"role":"user","content":"a\nb"}]}',
    ],
)
async def test_what_is_no_json_of_utf_8(url: str, http: aiohttp.ClientSession, bus: RigBus, body: bytes) -> None:
    """B095"""
    async with http.post(url + CHAT, data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] in ("invalid_json", "invalid_value", "invalid_type")
    assert not bus.asks
