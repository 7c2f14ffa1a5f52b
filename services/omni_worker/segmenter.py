"""Cuts streaming text into pieces that can be spoken one after the other.

Speech starts while the text is still being written, so the first piece ends early (at the first sentence end, or at a
clause mark once `FIRST_CLAUSE` characters are there); later pieces are whole sentences. The cutter is a state machine
over characters: a cut in front of a character depends on that character and on those before it, never on how the text
was chunked or when it came. Pieces concatenate to the text exactly; those with nothing to say are marked, not dropped.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

#: Characters after which the first piece may end at a clause mark: a tenth of a second of a small model's writing.
FIRST_CLAUSE = 40
#: Characters after which a piece is cut at the best place so far, a quarter of a minute of speech. Where there is no
#: place but inside one user-perceived character (a thousand combining marks), twice as many.
LIMIT = 240
#: A line this long that goes on with a lower-case letter was wrapped, not ended.
WRAPPED_LINE = 40

Boundary = Literal["sentence", "clause", "bound"]

_WIDE_TERMINATORS = "。！？｡"
_TERMINATORS = ".!?…؟।" + _WIDE_TERMINATORS
_CLOSERS = "\"'”’»›)]}」』）】》〉*_`~"
_OPENERS = "\"'“‘«‹([{*_`~"
_WIDE_CLAUSES = "，、；："
_CLAUSES = ",;:—–" + _WIDE_CLAUSES
_NEWLINES = "\n\r\v\f\x85\u2028\u2029"
_ZWJ = "\u200d"
_FLAG_LETTERS = "".join(map(chr, range(0x1F1E6, 0x1F200)))

#: Abbreviations that go on with a name or a word of the same sentence, in lower case, without the last period.
_ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "st", "mt", "ft", "gen", "gov", "sen", "rep", "capt", "lt", "col", "sgt",
    "cmdr", "rev", "hon", "pres", "supt", "cpl", "maj", "adm", "fr", "msgr", "jr", "sr", "vs", "approx", "est",
    "dept", "inc", "ltd", "co", "corp", "bros", "univ", "al", "cf", "viz", "messrs", "mme", "mlle",
}  # fmt: skip
#: Those that are abbreviations only in front of a number.
_BEFORE_NUMBER = {
    "no", "nos", "fig", "figs", "eq", "vol", "ch", "sec", "art", "p", "pp", "pt", "jan", "feb", "mar", "apr",
    "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
}  # fmt: skip
_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}")
_MARK = re.compile(rf"[{re.escape(_TERMINATORS + _CLAUSES)}][{re.escape(_CLOSERS)}]*\s+|[{_WIDE_CLAUSES}]|—(?=\w)")


@dataclass(frozen=True, slots=True)
class Utterance:
    """A piece of the text: its characters [start, end) of the whole."""

    text: str
    start: int
    end: int
    #: False when it has neither letters nor digits: punctuation, emoji, white space.
    speakable: bool
    #: What the cut behind it is: the end of a sentence or line, of a clause, or only of the patience.
    boundary: Boundary


class Segmenter:
    """Feed text as it comes, finish once; both return the pieces that became certain. Linear in the text's length."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        self._first = True
        #: Characters of the current line and of the last one that was not empty.
        self._column = 0
        self._line = 0

    def feed(self, text: str) -> list[Utterance]:
        """Take the next characters of the text."""
        pieces: list[Utterance] = []
        for char in text:
            self._take(char, pieces)
            if char not in _NEWLINES:
                self._column += 1
            elif self._column:
                self._line, self._column = self._column, 0
        return pieces

    def finish(self) -> list[Utterance]:
        """The text has ended: return what is left, nothing or one piece."""
        pieces: list[Utterance] = []
        if self._text:
            self._cut(len(self._text), "sentence", pieces)
        return pieces

    def _take(self, char: str, pieces: list[Utterance]) -> None:
        cut, boundary = self._decide(char)
        if cut:
            # A forced cut lies further back: what follows it is scanned again, once, being shorter than the limit.
            rest = self._text[cut:]
            self._cut(cut, boundary, pieces)
            for again in rest:
                self._take(again, pieces)
        self._text += char

    def _cut(self, at: int, boundary: Boundary, pieces: list[Utterance]) -> None:
        text = self._text[:at]
        speakable = any(map(str.isalnum, text))
        pieces.append(Utterance(text, self._start, self._start + at, speakable, boundary))
        self._first = self._first and not speakable
        self._start += at
        self._text = ""

    def _decide(self, char: str) -> tuple[int, Boundary]:
        """Where to cut the pending text, now that `char` is known to follow it; 0: nowhere."""
        text = self._text
        size = len(text)
        if size >= 2 * LIMIT:
            return size, "bound"
        if not text or char.isspace() or _joined(text, char):
            return 0, "bound"
        if text[-1].isspace():
            head = text.rstrip()
            if head and self._ends_sentence(head, text[len(head) :], char):
                return size, "sentence"
            if head and self._first and size >= FIRST_CLAUSE and _ends_clause(head):
                return size, "clause"
        elif char not in _CLOSERS and char not in _TERMINATORS and _bare(text)[-1:] in tuple(_WIDE_TERMINATORS):
            return size, "sentence"
        elif self._first and size >= FIRST_CLAUSE and _ends_wide_clause(text, char):
            return size, "clause"
        return _forced(text) if size >= LIMIT else (0, "bound")

    def _ends_sentence(self, head: str, gap: str, char: str) -> bool:
        """Whether a sentence or line ends with `head`, before white space `gap` and `char`."""
        newlines = sum(c in _NEWLINES for c in gap.replace("\r\n", "\n"))
        if newlines > 1 or (newlines and not (char.islower() and self._line >= WRAPPED_LINE)):
            return True
        core = _bare(head)
        if not core or core[-1] not in _TERMINATORS:
            return False
        if core[-1] in "!?؟":
            return not (char.islower() and len(core) < len(head))
        if char.islower():
            return False
        return core[-1] != "." or core.endswith("..") or not _abbreviated(core[:-1], char)


def _abbreviated(core: str, char: str) -> bool:
    """Whether the period behind `core` and before `char` belongs to an abbreviation, an initial or a list number."""
    words = core.split()
    if not words or core[-1].isspace():
        return False
    word = words[-1].lstrip(_OPENERS)
    if _DOTTED.fullmatch(word):
        return not (word.lower() in ("a.m", "p.m") and char.isupper())
    if len(word) == 1 and word.isupper():
        return word != "I"
    if word.isdigit() and len(word) <= 3:
        line = core[: len(core) - len(word)]
        return not line.strip() or line.rstrip(" \t" + _OPENERS)[-1:] in tuple(_NEWLINES)
    return word.lower() in _ABBREVIATIONS or (word.lower() in _BEFORE_NUMBER and char.isdigit())


def _ends_clause(head: str) -> bool:
    core = _bare(head)
    return core[-1:] in tuple(_CLAUSES) or (core.endswith("-") and core[-2:-1].isspace())


def _ends_wide_clause(text: str, char: str) -> bool:
    """Whether a clause ends with `text` though no space follows."""
    return text[-1] in _WIDE_CLAUSES or (text[-1] == "—" and char.isalnum())


def _bare(text: str) -> str:
    """Without the closing quotes, brackets, emphasis marks and emoji at its end."""
    end = len(text)
    while end and (text[end - 1] in _CLOSERS or unicodedata.category(text[end - 1]) in ("So", "Sk", "Mn", "Cf")):
        end -= 1
    return text[:end]


def _forced(text: str) -> tuple[int, Boundary]:
    """The best place in a text that has reached the limit: behind the last mark, else a space, else its end."""
    marks = [match.end() for match in _MARK.finditer(text) if match.end() > LIMIT // 3]
    if marks:
        return marks[-1], "clause"
    for end in range(len(text), 0, -1):
        if text[end - 1].isspace():
            return end, "bound"
    return len(text), "bound"


def _joined(text: str, char: str) -> bool:
    """Whether `char` makes one user-perceived character with the end of `text` (UAX #29, what matters here)."""
    if text[-1] == _ZWJ:
        return True
    if char in _FLAG_LETTERS:
        return (len(text) - len(text.rstrip(_FLAG_LETTERS))) % 2 == 1
    return (
        char > "\u02ff" and unicodedata.category(char) in ("Mn", "Me", "Mc", "Cf")
    ) or "\U0001f3fb" <= char <= "\U0001f3ff"
