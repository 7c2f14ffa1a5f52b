"""Tools in chat over a rig bus whose stage writes what it is told to: what is asked, comes back, is refused."""

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from omni_common.frames import Message, Prompt, Text, TextPart, ToolCall
from omni_common.pipeline import Formats
from omni_gateway.stream import Ask, Event
from unit.gateway.rig_bus import PROMPT_TOKENS, RigBus, Script, event
from unit.gateway.test_chat import SPOKEN, USER, ask, check_refused, stream

SESSION = Path(__file__).parent / "openai_tools.py"
#: Major version of openai-python -> where it is installed; the tests' own environment has the newest.
VERSIONS = {"2": str(Path(sys.prefix) / "openai2"), "3": ""}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Nice"}}\n</tool_call>'
)
ASSISTANT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "grey"}


def writes(text: str, finish: Any = "stop", size: int = 3) -> Script:
    """A stage that writes `text`, in pieces of `size` characters, a token each."""

    def script(_: Ask) -> Iterable[Event]:
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for at, piece in enumerate(pieces):
            yield event("text", Text(piece, ids=[at]), at, at + 1)
        yield event("text", Text(finish=finish, prompt_tokens=PROMPT_TOKENS), len(pieces), len(pieces), last=True)

    return script


@pytest.fixture
def bus() -> RigBus:
    """The pipelines' models call tools."""
    bus = RigBus()
    for name, pipeline in bus.pipelines.items():
        bus.pipelines[name] = msgspec.structs.replace(pipeline, formats=Formats(tools="hermes"))
    bus.script = writes(f"Let me see.\n{CALLS}")
    return bus


def prompt_of(bus: RigBus, number: int = 0) -> Prompt:
    body = bus.asks[number].given[0].body
    assert isinstance(body, Prompt)
    return body


# ------------------------------------------------------------------------------------------------------- what is asked


async def test_tools_and_earlier_calls_reach_the_stage(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    messages = [*USER, ASSISTANT, RESULT, {**ASSISTANT, "content": "Again."}]
    status, body = await ask(http, url, messages=messages, tools=[strict, TIME])
    assert status == 200, body
    prompt = prompt_of(bus)
    assert json.loads(prompt.tools) == [WEATHER, TIME]
    call = ToolCall("call_1", "get_weather", '{"city": "Köln"}')
    assert prompt.messages[1:] == [
        Message("assistant", [], [call]),
        Message("tool", [TextPart("grey")], tool_call_id="call_1"),
        Message("assistant", [TextPart("Again.")], [call]),
    ]
    assert not prompt.prefix


async def test_without_tools_nothing_changes(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    for extra in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {"parallel_tool_calls": False}):
        status, body = await ask(http, url, **extra)
        assert status == 200, body
        assert body["choices"][0]["message"]["content"] == f"Let me see.\n{CALLS}"
        assert "tool_calls" not in body["choices"][0]["message"] and body["choices"][0]["finish_reason"] == "stop"
    assert all(prompt_of(bus, number) == prompt_of(bus, 0) for number in range(4))
    status, body = await ask(http, url, messages=[*USER, ASSISTANT, RESULT], **SPOKEN)
    assert status == 200, "results may be spoken"


# --------------------------------------------------------------------------------------------------- what comes back


async def test_calls_of_a_whole_answer(url: str, http: aiohttp.ClientSession) -> None:
    _, body = await ask(http, url, tools=[WEATHER])
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see.\n"
    first, second = choice["message"]["tool_calls"]
    assert first.keys() == {"id", "type", "function"} and first["type"] == "function"
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    assert json.loads(second["function"]["arguments"]) == {"city": "Nice"} and first["id"] != second["id"]


async def test_an_answer_of_nothing_but_calls_has_no_content(
    url: str, http: aiohttp.ClientSession, bus: RigBus
) -> None:
    bus.script = writes(CALLS)
    _, body = await ask(http, url, tools=[WEATHER], parallel_tool_calls=False)
    message = body["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    events = await stream(http, url, tools=[WEATHER])
    assert not any(e["choices"][0]["delta"].get("content") for e in events[:-1])


async def test_calls_are_streamed_and_text_before_them_at_once(
    url: str, http: aiohttp.ClientSession, bus: RigBus
) -> None:
    events = await stream(http, url, tools=[WEATHER], stream_options={"include_usage": True})
    assert events[-1] == "[DONE]" and events[-2]["usage"]["completion_tokens"] > 10
    deltas = [e["choices"][0]["delta"] for e in events[:-2]]
    told = [delta["content"] for delta in deltas if delta.get("content")]
    assert "".join(told) == "Let me see.\n" and told[:3] == ["Let", " me", " se"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1] and all(call["type"] == "function" for call in calls)
    assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Köln", "Nice"]
    assert [e["choices"][0]["finish_reason"] for e in events[:-2]][-1] == "tool_calls"
    assert len({call["id"] for call in calls}) == 2


async def test_what_is_no_call_stays_text(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    for text in (CALLS.replace("{", "["), CALLS.replace("get_weather", "launch_rocket"), CALLS[:40]):
        bus.script = writes(text)
        _, body = await ask(http, url, tools=[WEATHER])
        [choice] = body["choices"]
        assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


async def test_a_cut_answer_says_length(url: str, http: aiohttp.ClientSession, bus: RigBus) -> None:
    bus.script = writes(CALLS[:-30], finish="length")
    _, body = await ask(http, url, tools=[WEATHER])
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([WEATHER, TIME], {"type": "function", "function": {"name": "get_time"}}),
        ([TIME], "required"),
    ],
)
async def test_a_call_can_be_forced(
    url: str, http: aiohttp.ClientSession, bus: RigBus, tools: Any, choice: Any
) -> None:
    """By beginning the answer with it; the stage goes on from there."""
    bus.script = writes(' {"zone": "CET"}}\n</tool_call>')
    _, body = await ask(http, url, tools=tools, tool_choice=choice)
    assert prompt_of(bus).prefix == '<tool_call>\n{"name": "get_time", "arguments":'
    message = body["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_time", "arguments": '{"zone": "CET"}'}
    ]
    assert message["content"] is None and body["choices"][0]["finish_reason"] == "tool_calls"
    bus.script = writes(' {"zone": "C', finish="length")
    events = await stream(http, url, tools=tools, tool_choice=choice)
    [call] = [call for e in events[:-1] for call in e["choices"][0]["delta"].get("tool_calls", [])]
    assert call["function"] == {"name": "get_time", "arguments": '{"zone": "C'}
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("version", VERSIONS)
async def test_openai_puts_calls_together(url: str, bus: RigBus, version: str) -> None:
    def script(asked: Ask) -> Iterable[Event]:
        body = asked.given[0].body
        assert isinstance(body, Prompt)
        return writes(f"Let me see.\n{CALLS}" if body.tools else "Grey.")(asked)

    bus.script = script
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SESSION),
        f"{url}/v1",
        env=os.environ | {"PYTHONPATH": VERSIONS[version]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    told = json.loads(out)
    assert told["version"].split(".")[0] == version
    for way in ("whole", "streamed"):
        assert told[way]["content"] == "Let me see.\n" and told[way]["finish"] == "tool_calls"
        assert [call[1:] for call in told[way]["calls"]] == [
            ["function", "get_weather", '{"city": "Köln"}'],
            ["function", "get_weather", '{"city": "Nice"}'],
        ]
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= set(told["kinds"])
    assert told["next"] == "Grey."
    [*_, last] = bus.asks
    body = last.given[0].body
    assert isinstance(body, Prompt) and [m.role for m in body.messages] == ["user", "assistant", "tool", "tool"]


# ---------------------------------------------------------------------------------------------------- what is refused


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TIME, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [tool(name="no spaces")]}, "tools[0].function.name"),
        ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(name='f"}')]}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=nested(33))]}, "tools[0].function.parameters"),
        ({"tools": [tool(description="x" * 4097)]}, "tools[0].function.description"),
        ({"tools": [tool(description="x" * 1001)]}, "tools"),
        ({"tools": [tool(name=f"f{n}") for n in range(129)]}, "tools"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TIME, WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice.function.name"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"tools": [TIME], "tool_choice": 3}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [TIME], **SPOKEN}, "tools"),
        ({"tools": [TIME], "audio": {}}, "tools"),
        ({"messages": [*USER, RESULT]}, "messages[1].tool_call_id"),
        ({"messages": [*USER, ASSISTANT, {**RESULT, "tool_call_id": "call_2"}]}, "messages[2].tool_call_id"),
        ({"messages": [*USER, ASSISTANT, {"role": "tool", "content": "x"}]}, "messages[2].tool_call_id"),
        ({"messages": [*USER, ASSISTANT, {**RESULT, "content": None}]}, "messages[2].content"),
        ({"messages": [{**ASSISTANT, "role": "user"}]}, "messages[0].tool_calls"),
        ({"messages": [{**ASSISTANT, "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{**ASSISTANT, "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [*USER, {"role": "function", "content": "x"}]}, "messages[1].role"),
        ({"messages": [*USER, {**ASSISTANT, "tool_calls": None, "function_call": {"name": "f"}}]},
         "messages[1].function_call"),
    ],
)  # fmt: skip
async def test_refused_by_the_name_of_the_field(
    url: str, http: aiohttp.ClientSession, bus: RigBus, body: Any, param: str
) -> None:
    for streamed in ({}, {"stream": True}):
        check_refused(*await ask(http, url, **{**streamed, **body}), param, bus)


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": [1, null]}', json.dumps(nested(32))])
async def test_arguments_are_a_json_object(url: str, http: aiohttp.ClientSession, bus: RigBus, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    status, body = await ask(http, url, messages=[*USER, {**ASSISTANT, "tool_calls": [call]}, RESULT])
    assert status == 200, body
    assert prompt_of(bus).messages[1].tool_calls == [ToolCall("call_1", "f", arguments or "{}")]


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "null", '{"a": NaN}', json.dumps(nested(33)), "[" * 900, '{"a": "' + "x" * 1000 + '"}']
)
async def test_other_arguments_are_refused(url: str, http: aiohttp.ClientSession, bus: RigBus, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    status, body = await ask(http, url, messages=[*USER, {**ASSISTANT, "tool_calls": [call]}])
    check_refused(status, body, "messages[1].tool_calls[0].function.arguments", bus)
