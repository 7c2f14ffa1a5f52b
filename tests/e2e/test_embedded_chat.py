"""Chat with the real pipeline, as it goes over the wire."""

import asyncio
import os
from typing import Any

import aiohttp
import pytest

from e2e.clients.api import Api, join, say
from e2e.clients.instance import Instance, wait_until
from e2e.clients.sound import is_audible

pytestmark = pytest.mark.embedded

CHAT = "/v1/chat/completions"
#: Bytes that the memory of a process may differ by without being a leak.
SLACK = 16 << 20
#: Each greedy answer differs from the others; some end by themselves, most are cut.
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is the capital of Germany?",
    "What color is the sky?",
    "What is the opposite of hot?",
    "Name three fruits.",
    "Name three primary colors.",
    "Who wrote Romeo and Juliet?",
    "How many days are in a week?",
    "What is water?",
    "What do cats eat?",
    "Why do we sleep?",
    "What is a computer?",
    "Tell me about the moon.",
    "What is music?",
    "What is gravity?",
]


async def test_several_sentences_are_heard_before_the_text_has_ended(api: Api) -> None:
    """The order of events in the stream says it, not the time."""
    answer = await api.chat_stream(say("Tell me about the moon.", max_tokens=96))
    assert answer.text.count(". ") >= 2, answer.text
    kinds = [kind for kind, _ in answer.pieces]
    audible = next(at for at, (kind, piece) in enumerate(answer.pieces) if kind == "sound" and is_audible(piece))
    last_words = len(kinds) - 1 - kinds[::-1].index("text")
    assert audible < last_words
    assert kinds[audible:].count("text") > 20


async def test_sixteen_at_a_time_get_what_each_gets_alone(api: Api, instance: Instance) -> None:
    """B052: words and samples, and nothing is left of them afterwards."""
    bodies = [say(question, max_tokens=24) for question in QUESTIONS]
    alone = [await api.chat_stream(body) for body in bodies]
    assert len({answer.text for answer in alone}) == len(QUESTIONS)
    await api.idle()
    before, shm = footprint(instance), set(os.listdir("/dev/shm"))
    done = (await api.fleet()).completed

    async with aiohttp.ClientSession() as session:
        sixteen = Api(session, api.url)
        together = await asyncio.gather(*(sixteen.chat_stream(body) for body in bodies))
    for question, one, many in zip(QUESTIONS, alone, together, strict=True):
        assert many.text == one.text, question
        assert many.finish == one.finish, question
        assert many.sound == one.sound, question

    fleet = await api.idle()
    assert fleet.completed == done + len(QUESTIONS) and fleet.failed == fleet.deaths == 0

    def back() -> bool:
        after = footprint(instance)
        grown = [name for name in after if name not in before or after[name][2] > before[name][2] + SLACK]
        return not grown and [now[:2] for now in after.values()] == [then[:2] for then in before.values()]

    await asyncio.to_thread(wait_until, back, f"back to {before}, from {footprint(instance)}", 10.0)
    assert set(os.listdir("/dev/shm")) <= shm


def footprint(instance: Instance) -> dict[str, tuple[int, int, int]]:
    """Of each process: its id, descriptors, and bytes of memory of its own."""
    return {
        name: (process.pid, process.num_fds(), process.memory_full_info().uss)
        for name, process in sorted(instance.processes().items())
    }


async def test_the_sound_says_the_words_of_each(api: Api) -> None:
    """Neighbours in a batch, each heard by the recogniser."""
    capitals = {"France": "Paris", "Japan": "Tokyo", "Germany": "Berlin"}
    bodies = [say(f"What is the capital of {country}?", audio={"format": "wav"}, stream=True) for country in capitals]
    answers = await asyncio.gather(*(api.events(CHAT, body) for body in bodies))
    for events, city in zip(answers, capitals.values(), strict=True):
        answer = join(events)
        assert city in answer.text and city in await api.heard(answer.sound)


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None])
async def test_usage_comes_once_and_only_when_asked_for(api: Api, options: dict[str, bool] | None) -> None:
    """B015."""
    events = await api.events(CHAT, say("Say hello.", max_tokens=4, stream=True, stream_options=options))
    assert events.pop() == "[DONE]"
    without_choices = [event for event in events if not event["choices"]]
    if options and options["include_usage"]:
        assert without_choices == [events[-1]]
        assert events[-1]["usage"]["completion_tokens_details"]["audio_tokens"] > 0
        assert all(event["usage"] is None for event in events[:-1])
    else:
        assert without_choices == []
        assert not any(event.get("usage") for event in events)
    reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}


async def test_the_fields_of_a_spoken_delta(api: Api) -> None:
    """B014: one id, whole samples in every piece, the time of expiry last, then the reason."""
    events = await api.events(CHAT, say("Say hello.", stream=True))
    assert events.pop() == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    audios = [audio for event in events for choice in event["choices"] if (audio := choice["delta"].get("audio"))]
    assert [audio["id"] for audio in audios if "id" in audio] == [audios[0]["id"]]
    assert set(audios[-1]) == {"expires_at"}
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    pieces = [piece for kind, piece in join([*events, "[DONE]"]).pieces if kind == "sound"]
    assert pieces and all(len(piece) % 2 == 0 for piece in pieces)


async def test_unknown_fields_and_nulls_change_nothing(api: Api) -> None:
    """B017."""
    body = say("What is the capital of Japan?")
    plain = await api.chat(body)
    more: dict[str, Any] = {"foo": 1, "user": "u", "metadata": {}, "store": True, "parallel_tool_calls": False}
    nulls = ("stream", "stream_options", "top_p", "top_k", "stop", "n", "tools", "response_format", "logprobs")
    noisy = body | more | dict.fromkeys(nulls)
    noisy["messages"] = [{**body["messages"][0], "name": "somebody", "audio": None, "tool_calls": None}]
    answer = await api.chat(noisy)
    assert answer["choices"][0]["message"]["audio"]["data"] == plain["choices"][0]["message"]["audio"]["data"]


async def test_a_client_that_leaves_stops_every_stage(api: Api) -> None:
    before = await api.idle()
    body = say("What is gravity?", max_tokens=512, stream=True)
    async with api.session.post(api.url + CHAT, json=body) as response:
        async for line in response.content:
            if b'"data":' in line:
                break
        response.close()
    after = await api.wait_for(lambda now: now.cancelled == before.cancelled + 1)
    assert after.admitted == after.completed + after.cancelled
    await api.idle()
