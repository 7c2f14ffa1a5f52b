"""Reasoning in chat over a rig bus whose stage writes what it is told to, and tokens as a preprocessor counts them."""

from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from omni_common.frames import Prompt, PromptFacts, Text
from omni_common.pipeline import Formats
from omni_gateway.stream import Ask, Event
from unit.gateway.rig_bus import RigBus, Script, event
from unit.gateway.test_chat import USER, ask, check_refused, stream

TOKENS = ["<think>", "\n", "One", " and", " one.", "\n", "</think>", "\n\n", "Two", "."]
#: Those from the first tag to the last.
THOUGHT = 7
TOOL = {"type": "function", "function": {"name": "f"}}


def writes(tokens: list[str], facts: PromptFacts, prompt_tokens: int = 50) -> Script:
    def script(_: Ask) -> Iterable[Event]:
        for at, token in enumerate(tokens):
            yield event("text", Text(token, ids=[at], prompt=None if at else facts), at, at + 1)
        end = Text(finish="stop", prompt_tokens=prompt_tokens)
        yield event("text", end, len(tokens), len(tokens), last=True)

    return script


@pytest.fixture
def bus() -> RigBus:
    """The model of the pipelines thinks."""
    bus = RigBus()
    for name, pipeline in bus.pipelines.items():
        bus.pipelines[name] = msgspec.structs.replace(pipeline, formats=Formats(tools="hermes", reasoning="think"))
    bus.script = writes(TOKENS, PromptFacts())
    return bus


def asked(bus: RigBus, number: int = 0) -> Prompt:
    body = bus.asks[number].given[0].body
    assert isinstance(body, Prompt)
    return body


@pytest.mark.parametrize("opened", [False, True])
async def test_a_whole_answer(url: str, http: aiohttp.ClientSession, bus: RigBus, opened: bool) -> None:
    bus.script = writes(TOKENS[opened:], PromptFacts(reasoning=opened))
    _, body = await ask(http, url)
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "One and one."
    assert message["content"] == "Two."
    details = body["usage"]["completion_tokens_details"]
    assert body["usage"]["completion_tokens"] == len(TOKENS) - opened
    assert details["reasoning_tokens"] == THOUGHT - opened


@pytest.mark.parametrize("opened", [False, True])
async def test_a_streamed_answer(url: str, http: aiohttp.ClientSession, bus: RigBus, opened: bool) -> None:
    bus.script = writes(TOKENS[opened:], PromptFacts(reasoning=opened))
    events = await stream(http, url, stream_options={"include_usage": True})
    deltas = [e["choices"][0]["delta"] for e in events[:-2]]
    thought = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert "".join(thought) == "One and one." and len(thought) == 3
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == thought
    told = [delta["content"] for delta in deltas if delta.get("content")]
    assert told == ["Two", "."]
    assert events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == THOUGHT - opened


async def test_openai_reads_it(url: str, bus: RigBus) -> None:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        messages: Any = USER
        whole = await client.chat.completions.create(model="omnibus", messages=messages)
        assert (whole.choices[0].message.model_extra or {})["reasoning_content"] == "One and one."
        assert whole.usage and whole.usage.completion_tokens_details
        assert whole.usage.completion_tokens_details.reasoning_tokens == THOUGHT
        chunks = await client.chat.completions.create(model="omnibus", messages=messages, stream=True)
        thought = [(chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or "" async for chunk in chunks]
        assert "".join(thought) == "One and one."


async def test_an_answer_that_never_stops_thinking_has_no_content(
    url: str, http: aiohttp.ClientSession, bus: RigBus
) -> None:
    bus.script = writes(["\n", "One", " and"], PromptFacts(reasoning=True))
    _, body = await ask(http, url)
    message = body["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"] == "One and"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


async def test_without_thoughts_nothing_is_told_of_them(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    bus.script = writes(["Two", "."], PromptFacts())
    _, body = await ask(http, url)
    assert body["choices"][0]["message"].keys() == {"content", "audio", "role", "refusal"}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    bus.script = writes(TOKENS, PromptFacts())
    _, body = await ask(http, url, include_reasoning=False)
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["choices"][0]["message"]["content"] == "Two."
    events = await stream(http, url, include_reasoning=False)
    assert not any("reasoning_content" in e["choices"][0]["delta"] for e in events[:-1])


async def test_thoughts_before_a_call(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    bus.script = writes(["Call ", call, "?", "</think>", "\n\n", call], PromptFacts(reasoning=True))
    _, body = await ask(http, url, tools=[TOOL])
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == f"Call {call}?" and message["content"] is None
    assert [called["function"]["name"] for called in message["tool_calls"]] == ["f"]


async def test_earlier_thoughts_go_back_to_the_model(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    for at, said in enumerate(({"reasoning_content": "Hm."}, {"reasoning": "Hm.", "reasoning_content": ""})):
        messages = [*USER, {"role": "assistant", "content": "Two.", **said}, *USER]
        status, body = await ask(http, url, messages=messages)
        assert status == 200, body
        assert [message.reasoning for message in asked(bus, at).messages] == ["", "Hm.", ""]
    status, _ = await ask(http, url, messages=[{**USER[0], "reasoning": {"effort": 3}}])
    assert status == 200


@pytest.mark.parametrize(
    ("body", "template"),
    [
        ({}, {}),
        ({"chat_template_kwargs": None, "reasoning_effort": None}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, {"reasoning_effort": "high"}),
    ],
)
async def test_how_much_it_thinks_is_the_templates(
    url: str, http: aiohttp.ClientSession, bus: RigBus, body: Any, template: Any
) -> None:
    status, answered = await ask(http, url, **body)
    assert status == 200, answered
    assert asked(bus).template == template


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"reasoning_effort": "{{ x }}"}}, "chat_template_kwargs.reasoning_effort"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"include_reasoning": "no"}, "include_reasoning"),
    ],
)
async def test_refused_by_the_name_of_the_field(
    url: str, http: aiohttp.ClientSession, bus: RigBus, body: Any, param: str
) -> None:
    check_refused(*await ask(http, url, **body), param, bus)


async def test_a_model_that_does_not_think(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    for name, pipeline in bus.pipelines.items():
        bus.pipelines[name] = msgspec.structs.replace(pipeline, formats=Formats())
    wrong = {"chat_template_kwargs": {"enable_thinking": True}}
    check_refused(*await ask(http, url, **wrong), "chat_template_kwargs.enable_thinking", bus)
    status, body = await ask(http, url, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert status == 200 and not asked(bus).template
    assert body["choices"][0]["message"]["content"] == "".join(TOKENS)


async def test_tokens_that_a_preprocessor_counted(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    """Sounds and images are in the prompt already: nothing is added for them."""
    bus.script = writes(["Two"], PromptFacts(audio_tokens=13, image_tokens=20), prompt_tokens=50)
    _, body = await ask(http, url)
    assert body["usage"]["prompt_tokens"] == 50 and body["usage"]["total_tokens"] == 51
    details = body["usage"]["prompt_tokens_details"]
    assert (details["text_tokens"], details["audio_tokens"], details["image_tokens"]) == (17, 13, 20)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("verbosity", "low"),
        ("guided_json", {}),
        ("structured_outputs", {"choice": ["a"]}),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [1]),
        ("use_beam_search", True),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("chat_template", "{{ x }}"),
        ("documents", [{}]),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    url: str, http: aiohttp.ClientSession, bus: RigBus, field: str, value: Any
) -> None:
    check_refused(*await ask(http, url, **{field: value}), field, bus)


async def test_what_changes_no_answer_is_ignored(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    harmless = {
        "store": True, "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"}, "verbosity": "medium",
        "service_tier": "auto", "safety_identifier": "u", "prompt_cache_key": "k", "user": "u", "documents": [],
        "add_generation_prompt": True, "continue_final_message": False, "use_beam_search": False,
    }  # fmt: skip
    status, body = await ask(http, url, **harmless)
    assert status == 200, body
    assert asked(bus) == Prompt(asked(bus).messages)
