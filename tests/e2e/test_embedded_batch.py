"""A batch of speech through the real pipeline, and what it says to voices of one's own: it cannot clone them."""

import asyncio
import base64
import json
from typing import Any

import aiohttp
import pytest

from e2e.clients.api import Api
from e2e.clients.sound import RATE, decode, from_pcm, is_audible, wav

pytestmark = pytest.mark.embedded

BATCH = "/v1/audio/speech/batch"
SENTENCES = ["The train leaves at noon.", "Please be there early.", "The doors close on time."]
WORDS = ["train leaves", "there early", "close on time"]


async def batch(api: Api, items: list[dict[str, Any]], **defaults: Any) -> dict[str, Any]:
    answer = await api.post(BATCH, {"model": "tts-1", "items": items, "seed": 7, **defaults})
    assert answer.status == 200, answer.data[:500]
    told: dict[str, Any] = json.loads(answer.data)
    return told


def sound(result: dict[str, Any]) -> bytes:
    return base64.b64decode(result["audio_data"], validate=True)


async def test_each_item_is_what_it_is_alone_in_its_own_format(api: Api) -> None:
    alone = [(await api.speech(sentence)).data for sentence in SENTENCES]
    told = await batch(api, [{"input": sentence} for sentence in SENTENCES], response_format="pcm", voice="alloy")
    assert (told["total"], told["succeeded"], told["failed"]) == (3, 3, 0)
    assert [sound(result) for result in told["results"]] == alone

    formats = ["wav", "mp3", "flac"]
    items = [{"input": s, "response_format": f} for s, f in zip(SENTENCES, formats, strict=True)]
    results = (await batch(api, items))["results"]
    for result, words, pcm in zip(results, WORDS, alone, strict=True):
        assert decode(sound(result)).seconds == pytest.approx(len(from_pcm(pcm)) / RATE, abs=0.1)
        assert words in (await api.heard(sound(result))).lower()
        assert result["usage"]["output_tokens"] == pytest.approx(20 * len(pcm) / 2 / RATE, abs=1)
    data = sound(results[0])
    assert int.from_bytes(data[40:44], "little") == len(data) - 44


async def test_32_items_of_which_some_cannot_be_spoken(api: Api) -> None:
    items = [{"input": "😄"} if n % 4 == 3 else {"input": SENTENCES[n % 4]} for n in range(31)]
    told = await batch(api, [*items, {"input": "Hi.", "voice": "nobody"}], response_format="pcm")
    assert (told["total"], told["succeeded"], told["failed"]) == (32, 24, 8)
    for n, result in enumerate(told["results"][:-1]):
        assert result["index"] == n
        if n % 4 == 3:
            assert result["error"]["code"] == "nothing_to_speak" and "audio_data" not in result
        else:
            assert result["audio_data"] == told["results"][n % 4]["audio_data"]
            assert is_audible(sound(result))
    assert told["results"][-1]["error"]["param"] == "voice"
    assert WORDS[0] in (await api.heard(wav(sound(told["results"][0])))).lower()


async def test_a_client_that_leaves_ends_all_items(api: Api) -> None:
    cancelled = (await api.idle()).cancelled
    items = [{"input": " ".join(SENTENCES * 20)}] * 8
    task = asyncio.create_task(batch(api, items))
    await api.wait_for(lambda fleet: fleet.running + fleet.queued >= 8)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await api.idle()).cancelled == cancelled + 8


async def test_voices_cannot_be_brought_along(api: Api, spoken_question: Any) -> None:
    data = spoken_question.read_bytes()
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    for more, param in (
        ({"ref_audio": url}, "ref_audio"),
        ({"references": [{"audio_path": url, "text": "A question."}]}, "references"),
        ({"ref_text": "A question."}, "ref_text"),
        ({"task_type": "Base"}, "task_type"),
        ({"max_new_tokens": 100}, "max_new_tokens"),
    ):
        error = (await api.speech("Hello.", **more)).error
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    form = aiohttp.FormData({"name": "me", "consent": "yes"})
    form.add_field("audio_sample", data, filename="me.wav", content_type="audio/wav")
    async with api.session.post(f"{api.url}/v1/audio/voices", data=form) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "unsupported_endpoint"
    assert "uploaded_voices" in json.loads((await api.get("/v1/audio/voices")).data)
