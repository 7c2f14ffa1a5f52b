"""Where streaming text is cut into pieces to speak."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_worker.segmenter import FIRST_CLAUSE, LIMIT, Segmenter, Utterance


def cut(*chunks: str) -> list[Utterance]:
    segmenter = Segmenter()
    return [piece for chunk in chunks for piece in segmenter.feed(chunk)] + segmenter.finish()


def texts(text: str) -> list[str]:
    return [piece.text for piece in cut(text)]


@pytest.mark.parametrize(
    "pieces",
    [
        ["The capital of France is Paris."],
        ["Hello there! ", "How are you? ", "Fine."],
        ["no end"],
        # Numbers.
        ["Pi is 3.14. ", "It costs $9.99 or 1,250 yen at 7:30. ", "Done."],
        ["It was 2024. ", "Then came 2025."],
        # Abbreviations, initials, lists.
        ["Dr. Who met Mrs. Smith. ", "J. K. Rowling wrote it, e.g. that one."],
        ["He lives in the U.S. Army base. ", "So do I. ", "She left at 7 p.m. ", "He did too."],
        ["See No. 5 and Fig. 2. ", "No. ", "Not that."],
        ["1. Apples. ", "Pears."],
        ["Here are three:\n", "1. Apples\n", "2. Pears\n\n", "- Plums"],
        ["Ask Prof. (Emeritus) Lee vs. Kim. ", "Ok."],
        # Ellipses, runs, lower case after a terminator.
        ["Wait... what? ", "Well… ", "I see!? ", "Yes!!! ", "ok. then."],
        # Quotes and brackets behind a terminator.
        ['He said "Stop." ', "Then he left. ", '"Really?" she asked. ', "(Yes.) ", "“Fine.” ", "‘Ok.’"],
        ["This is **bold.** ", "Next `code.` ", "_End._"],
        # CJK: no space needed.
        ["你好。", "我是医生！", "「好的。」", "真的？！", "谢谢"],
        ["はい。 ", "Yes."],
        # Lines and debris.
        ["```\n", "---\n", "# How to\n", "Go on"],
        ["One\r\n", "Two\r\n\r\n", "Three"],
        ["A line that was wrapped by some editor at eighty\nand goes on here. ", "End."],
        ["Fruits:\n", "apples\n", "pears"],
        # Emoji.
        ["Great! ", "😄 Next. ", "👩‍👩‍👧‍👦 family 👍🏽! ", "🇫🇷🇩🇪."],
        ["Nice!😄 ", "Next."],
        ["  Leading. ", "End.  \n "],
    ],
)
def test_cuts(pieces: list[str]) -> None:
    assert texts("".join(pieces)) == pieces


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("The sun comes up, and then it is morning.", "The sun comes up, and then it is morning."),
        (
            "When the sun comes up over the old hills, birds sing, and so on.",
            "When the sun comes up over the old hills, ",
        ),
        ("Over the many years of this long century; it went.", "Over the many years of this long century; "),
        ("Over the many years of this long century — it went.", "Over the many years of this long century — "),
        ("Over the many years of this long century—it went.", "Over the many years of this long century—"),
        ("Over the many years of this long century - it went.", "Over the many years of this long century - "),
        ("There were in the whole of that country 1,250,000 people.", None),
        ("在" * FIRST_CLAUSE + "，然后。", "在" * FIRST_CLAUSE + "，"),
    ],
)
def test_first_piece_ends_at_a_clause_once_it_is_long(text: str, first: str | None) -> None:
    pieces = cut(text)
    assert pieces[0].text == (first or text)
    if first and first != text:
        assert pieces[0].boundary == "clause"
        assert [p.boundary for p in pieces[1:]] == ["sentence"]


def test_later_pieces_are_whole_sentences() -> None:
    sentence = "When the sun comes up over the old hills, birds sing, and so on."
    assert texts("Hello. " + sentence) == ["Hello. ", sentence]


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "😄", "...", "—", "！？", "\u200b", "```", "👩‍👩‍👧", "?! ... 😄😄\n\n---\n", "\u0301"]
)
def test_nothing_to_say(text: str) -> None:
    pieces = cut(text)
    assert not any(piece.speakable for piece in pieces)
    assert "".join(piece.text for piece in pieces) == text


def test_a_piece_is_out_as_soon_as_the_next_character_is_known() -> None:
    segmenter = Segmenter()
    assert segmenter.feed("Is pi 3.") == []
    assert segmenter.feed("14? ") == []
    assert [p.text for p in segmenter.feed("Y")] == ["Is pi 3.14? "]
    assert [p.text for p in segmenter.finish()] == ["Y"]
    assert segmenter.finish() == []


@pytest.mark.parametrize(
    "unit", ["word ", "x", "! ", "好", "é" * 9 + ", ", "👩‍👩‍👧‍👦", "🇫🇷", "\n", '"', ". A", "a\u0301"]
)
def test_ten_thousand_characters(unit: str) -> None:
    text = (unit * 10_000)[: 10_000 // len(unit) * len(unit)]
    began = time.process_time()
    pieces = cut(*text)
    assert time.process_time() - began < 5  # quadratic work takes minutes
    assert "".join(p.text for p in pieces) == text
    assert max(len(p.text) for p in pieces) <= (2 * LIMIT if unit.isspace() else LIMIT + 20)
    if unit.strip() and unit[-1] not in " \n":
        assert all(len(p.text) % len(unit) == 0 for p in pieces) or unit in ('"', ". A")
    if unit == "word ":
        assert all(p.text.endswith(" ") for p in pieces)


def test_a_character_without_end_is_cut_too() -> None:
    assert [len(p.text) for p in cut("Z" + "\u0301" * 1000)] == [2 * LIMIT, 2 * LIMIT, 1001 - 4 * LIMIT]


def test_the_limit_prefers_a_clause() -> None:
    text = "Hi. Word " + "word " * 30 + "word, " + "word " * 40
    assert texts(text)[1].endswith("word, ")


fragments = st.sampled_from(
    [
        *(
            "Dr. ",
            "3.14",
            "e.g. ",
            "U.S. ",
            "No. 5",
            "...",
            "。",
            "，",
            "! ",
            "?",
            ". ",
            ", ",
            "— ",
            "\n",
            "\n\n",
            "\r\n",
        ),
        *(" ", '"', "”", ")", "**", "- ", "1. ", "word", "The", "x" * 90, " word" * 20, "世界", "e\u0301"),
        *("\U0001f469\u200d\U0001f469\u200d\U0001f467", "🇫🇷", "👍🏽", "😄"),
    ]
)
anything = st.one_of(st.text(), st.lists(fragments, max_size=40).map("".join))


@given(anything, st.lists(st.integers(0, 400), max_size=12))
def test_cuts_do_not_depend_on_chunks_and_nothing_is_lost(text: str, points: list[int]) -> None:
    whole = cut(text)
    assert "".join(piece.text for piece in whole) == text
    position = 0
    for piece in whole:
        assert piece.text
        assert (piece.start, piece.end) == (position, position + len(piece.text))
        position = piece.end
    bounds = sorted({0, len(text), *(point for point in points if point < len(text))})
    assert cut(*(text[a:b] for a, b in pairwise(bounds))) == whole
    assert cut(*text) == whole


@given(anything, anything)
def test_what_is_out_does_not_change_with_what_follows(text: str, more: str) -> None:
    early = Segmenter().feed(text)
    assert Segmenter().feed(text + more)[: len(early)] == early
