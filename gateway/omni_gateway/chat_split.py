"""An answer's text, piece by piece, taken apart into what is read, the way to it, and calls of tools. Pure.

Nothing that is read waits longer than it must: held back is only what may still become a tag, and white space at the
edges of tags, which belongs to them. What stands between the tags of a call is a call if it is of one of the tools that
were offered, with a JSON object of arguments; all else stays text, tags included.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import msgspec

from omni_common.formats import CALL, THINK, UNCALL, UNTHINK, forced_call


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is read."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the way to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a tool, as a whole."""

    #: Among the calls of the answer.
    index: int
    name: str
    #: The JSON object as the model wrote it. Of a forced call it may be cut, or no JSON.
    arguments: str


Part = Said | Thought | Called


class _Written(msgspec.Struct):
    """What stands between the tags of a call."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class Splitter:
    """Of one answer: `push` its text as it comes, `end` when it is over."""

    def __init__(
        self, *, reasoning: bool = False, tools: Collection[str] = (), forced: str = "", single: bool = False
    ) -> None:
        """`reasoning`: the model may think first. `tools`: names that may be called. `forced`: the prompt ends within a
        call of this one, and that is all of the answer. `single`: what follows the first call is dropped."""
        self._tools, self._forced, self._single = tools, forced, single
        self._mode: Literal["read", "think", "call", "over"] = "call" if forced else "read"
        self._reasons = reasoning
        #: Thinking may still begin: there was nothing yet.
        self._may_think = reasoning and not forced
        #: Nothing has come since the answer began or a tag ended; and it was a tag, so white space belongs to it.
        self._edge = True
        self._tagged = False
        self._calls = 0
        self._held = ""

    @property
    def thinking(self) -> bool:
        return self._mode == "think"

    def open(self) -> None:
        """The prompt has begun the reasoning. To be called before the first text."""
        if self._reasons:
            self._mode, self._may_think = "think", False

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        parts: list[Part] = []
        if self._mode == "call":
            self._close(held, "", parts)
        elif self._mode == "think":
            # A tag that did not become one is a word.
            self._think_of(held.rstrip(), parts)
        elif self._mode == "read":
            self._say(held, parts)
        return parts

    # ----------------------------------------------------------------------------------------------------- one step

    def _step(self, parts: list[Part]) -> bool:
        """Go on to the end of the next tag in what is held; false when there is none yet."""
        if self._mode == "read":
            return self._read(parts)
        if self._mode == "think":
            return self._think(parts)
        if self._mode == "call":
            return self._call(parts)
        self._held = ""
        return False

    def _read(self, parts: list[Part]) -> bool:
        if self._may_think:
            begun = self._held.lstrip()
            if THINK.startswith(begun) and begun != THINK:
                return False
            self._may_think = False
            if begun.startswith(THINK):
                self._enter("think", begun.removeprefix(THINK))
                return True
        if self._edge and not self._held.strip():
            return False
        at = self._held.find(CALL) if self._tools else -1
        if at >= 0:
            self._say(self._held[:at], parts)
            self._enter("call", self._held[at + len(CALL) :])
            return True
        free = len(self._held) - (_overlap(self._held, CALL) if self._tools else 0)
        self._say(self._held[:free], parts)
        self._held = self._held[free:]
        return False

    def _think(self, parts: list[Part]) -> bool:
        if self._edge:
            # A model may say again what its prompt has ended with.
            begun = self._held.lstrip()
            if THINK.startswith(begun) and begun != THINK:
                return False
            self._held = begun.removeprefix(THINK).lstrip()
        at = self._held.find(UNTHINK)
        if at >= 0:
            self._think_of(self._held[:at].rstrip(), parts)
            self._enter("read", self._held[at + len(UNTHINK) :].lstrip())
            return True
        free = len(self._held[: len(self._held) - _overlap(self._held, UNTHINK)].rstrip())
        self._think_of(self._held[:free], parts)
        self._held = self._held[free:]
        return False

    def _call(self, parts: list[Part]) -> bool:
        at = self._held.find(UNCALL)
        if at < 0:
            return False
        written, after = self._held[:at], self._held[at + len(UNCALL) :]
        self._close(written, UNCALL, parts)
        self._held = after
        return True

    def _enter(self, mode: Literal["read", "think", "call"], held: str) -> None:
        self._mode, self._held, self._edge, self._tagged = mode, held, True, True

    # ------------------------------------------------------------------------------------------------- what comes out

    def _close(self, written: str, tag: str, parts: list[Part]) -> None:
        """A call has ended, by its `tag` or with the answer."""
        forced = self._forced
        call = _parse(forced_call(forced).removeprefix(CALL) + written if forced else written)
        if forced:
            parts.append(Called(0, *(call or (forced, written.strip()))))
            self._mode = "over"
        elif call is not None and call[0] in self._tools:
            parts.append(Called(self._calls, *call))
            self._calls += 1
            self._enter("read", "")
            if self._single:
                self._mode = "over"
        else:
            self._enter("read", "")
            self._say(CALL + written + tag, parts)

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._edge and self._tagged:
            text = text.lstrip()
        if text.strip() or (text and not self._edge):
            self._edge = False
            parts.append(Said(text))

    def _think_of(self, text: str, parts: list[Part]) -> None:
        if text:
            self._edge = False
            parts.append(Thought(text))


def _parse(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call."""
    try:
        written = msgspec.json.decode(text.encode(), type=_Written)
        arguments = bytes(written.arguments).decode().strip()
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return (written.name, arguments) if arguments.startswith("{") else None


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` with which `tag` begins, itself left out."""
    longest = min(len(tag) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if tag.startswith(text[-length:])), 0)
