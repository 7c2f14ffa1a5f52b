"""Answers taken apart, however their text is cut into pieces."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_gateway.chat_split import Called, Part, Said, Splitter, Thought

TOOLS = ("get_weather", "f")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = Called(0, "f", '{"a": 1}')


def split(*pieces: str, opened: bool = False, **settings: Any) -> list[Part]:
    """Neighbours of a kind are joined: how text is cut on the way is nobody's business."""
    splitter = Splitter(**settings)
    if opened:
        splitter.open()
    parts: list[Part] = []
    for part in [part for piece in pieces for part in splitter.push(piece)] + splitter.end():
        last = parts[-1] if parts else None
        if isinstance(part, Said) and isinstance(last, Said):
            parts[-1] = Said(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            parts[-1] = Thought(last.text + part.text)
        else:
            parts.append(part)
    return parts


CASES: dict[str, tuple[dict[str, Any], str, list[Part]]] = {
    "text alone": ({"tools": TOOLS}, " Hello <b>you</b>. ", [Said(" Hello <b>you</b>. ")]),
    "a call alone": ({"tools": TOOLS}, CALL, [F]),
    "white space around a call": ({"tools": TOOLS}, f"\n {CALL}\n\n", [F]),
    "text, then a call": ({"tools": TOOLS}, f"Let me see.\n{CALL}", [Said("Let me see.\n"), F]),
    "two calls": ({"tools": TOOLS}, f"{CALL}\n{CALL}", [F, Called(1, "f", '{"a": 1}')]),
    "two, and one is wanted": ({"tools": TOOLS, "single": True}, f"Hm. {CALL}\n{CALL} More.", [Said("Hm. "), F]),
    "text after a call": ({"tools": TOOLS}, f"{CALL}\n There.", [F, Said("There.")]),
    "no arguments": ({"tools": TOOLS}, '<tool_call>{"name": "f"}</tool_call>', [Called(0, "f", "{}")]),
    "the end is missing": ({"tools": TOOLS}, CALL.removesuffix("</tool_call>"), [F]),
    "arguments stay as they were written": (
        {"tools": TOOLS},
        '<tool_call>{"arguments": {"é": 1e2, "b":[ ]} , "name":"f"}</tool_call>',
        [Called(0, "f", '{"é": 1e2, "b":[ ]}')],
    ),
    "no such tool": ({"tools": ["g"]}, f"So: {CALL}!", [Said(f"So: {CALL}!")]),
    "no tools": ({"reasoning": True}, f"So: {CALL}!", [Said(f"So: {CALL}!")]),
    "no JSON": ({"tools": TOOLS}, "<tool_call>f(1)</tool_call>.", [Said("<tool_call>f(1)</tool_call>.")]),
    "no object": (
        {"tools": TOOLS},
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [Said('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')],
    ),
    "cut in mid-call": ({"tools": TOOLS}, '<tool_call>{"name": "f", "ar', [Said('<tool_call>{"name": "f", "ar')]),
    "cut in a tag": ({"tools": TOOLS}, "Hm <tool_", [Said("Hm <tool_")]),
    "a wrong call, then a right one": (
        {"tools": TOOLS},
        f"<tool_call>f</tool_call>{CALL}",
        [Said("<tool_call>f</tool_call>"), F],
    ),
    "a forced call": ({"tools": TOOLS, "forced": "f"}, ' {"a": 1}}\n</tool_call>\nAnd', [F]),
    "a forced call that is cut": ({"tools": TOOLS, "forced": "f"}, ' {"a": "x', [Called(0, "f", '{"a": "x')]),
    "a forced call of nothing": ({"tools": TOOLS, "forced": "f"}, "", [Called(0, "f", "")]),
    "thought, then text": (
        {"reasoning": True},
        "<think>\nWell, 1 < 2.\n\nYes.\n</think>\n\nTwo.",
        [Thought("Well, 1 < 2.\n\nYes."), Said("Two.")],
    ),
    "opened by the prompt": (
        {"reasoning": True, "opened": True},
        "\nWell.\n</think>\n\n Two.",
        [Thought("Well."), Said(" Two.".lstrip())],
    ),
    "opened twice": (
        {"reasoning": True, "opened": True},
        "\n<think>\nWell.</think>Two.",
        [Thought("Well."), Said("Two.")],
    ),
    "never closed": ({"reasoning": True, "opened": True}, "Well, </thin", [Thought("Well, </thin")]),
    "no thought": ({"reasoning": True}, "Two.", [Said("Two.")]),
    "an empty thought": ({"reasoning": True}, "<think>\n\n</think>\n\nTwo.", [Said("Two.")]),
    "thinking is a word later on": (
        {"reasoning": True},
        "Write <think>x</think>.",
        [Said("Write <think>x</think>.")],
    ),
    "once is enough": (
        {"reasoning": True},
        "<think>a</think><think>b</think>",
        [Thought("a"), Said("<think>b</think>")],
    ),
    "a call within thoughts is thought": (
        {"reasoning": True, "tools": TOOLS, "opened": True},
        f"I'd say {CALL}.</think>{CALL}",
        [Thought(f"I'd say {CALL}."), F],
    ),
    "not opened without reasoning": ({"tools": TOOLS, "opened": True}, "Two.", [Said("Two.")]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same(name: str) -> None:
    settings, text, expected = CASES[name]
    assert split(text, **settings) == expected
    assert split(*text, **settings) == expected
    for at in range(len(text)):
        assert split(text[:at], text[at:], **settings) == expected


WORDS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<", "tool", "_call>", "</", " ", "\n", "a", CALL, "{}"]


@given(words=st.lists(st.sampled_from(WORDS), max_size=12), cuts=st.lists(st.integers(1, 9)), think=st.booleans())
@example(words=["<think>", "a", "\n", "</think>"], cuts=[1] * 30, think=True)
def test_any_text_in_any_pieces(words: list[str], cuts: list[int], think: bool) -> None:
    text, pieces, at = "".join(words), [], 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    for settings in ({"tools": TOOLS}, {"tools": TOOLS, "reasoning": True, "opened": think}):
        parts = split(*pieces, **settings)
        assert parts == split(text, **settings)
        for part in parts:
            assert isinstance(part, Called) or part.text
        assert [part.index for part in parts if isinstance(part, Called)] == list(
            range(sum(isinstance(part, Called) for part in parts))
        )


def test_text_is_held_no_longer_than_it_must() -> None:
    splitter = Splitter(tools=TOOLS, reasoning=True)
    assert splitter.push("Hello") == [Said("Hello")]
    assert splitter.push(" <") == [Said(" ")]
    assert splitter.push("b> ") == [Said("<b> ")]
    assert splitter.push("\n") == [Said("\n")]
    thinking = Splitter(reasoning=True)
    thinking.open()
    assert thinking.push("Well") == [Thought("Well")]
    assert thinking.push(", x") == [Thought(", x")]
    assert thinking.thinking
    assert thinking.push("</think>\n\nT") == [Said("T")] and not thinking.thinking
