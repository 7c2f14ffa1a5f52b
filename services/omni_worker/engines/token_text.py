"""From sampled tokens to text that may be shown: whole characters only, and nothing of a stop string. Pure."""

from collections.abc import Callable

_BROKEN = "\ufffd"
#: Tokens after the first that may be needed for one character: UTF-8 has at most four bytes.
_MORE = 3


class TokenText:
    """The text of one answer, token by token.

    `detokenize(ids)` gives the text of ids together, with U+FFFD for bytes that are no whole character. Bytes that
    cannot become a character come out as U+FFFD; a character that the end of the answer cuts does not come out.
    """

    def __init__(self, detokenize: Callable[[list[int]], str], stop: list[str]) -> None:
        self._detokenize = detokenize
        self._stop = stop
        #: Ids since the last point where a character ended with its token, and how much of their text is out.
        self._pending: list[int] = []
        self._out = 0
        self._waited = 0
        #: Text that may be the beginning of a stop string.
        self._held = ""
        self.stopped = False

    def push(self, token: int, piece: str, *, may_stop: bool = True) -> str:
        """The text that can be shown now that `token` is there; `piece` is its text alone.

        Sets `stopped` when a stop string is complete: the text then ends before it.
        """
        self._held += self._characters(token, piece)
        if not may_stop:
            return self._release(len(self._held))
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text = self._release(min(found))
            self._held = ""
            return text
        return self._release(len(self._held) - self._overlap())

    def flush(self) -> str:
        """What was held back as the beginning of a stop string, at the end of an answer without one."""
        return self._release(len(self._held))

    def _characters(self, token: int, piece: str) -> str:
        if not self._pending and _BROKEN not in piece:
            return piece
        self._pending.append(token)
        text = self._detokenize(self._pending)
        whole = len(text.rstrip(_BROKEN))
        if whole > self._out:
            self._waited = 0
        elif whole < len(text) and self._waited == _MORE:
            whole = len(text)
        else:
            self._waited += 1
        new = text[self._out : whole]
        self._out = max(self._out, whole)
        if whole == len(text):
            self._pending, self._out, self._waited = [], 0, 0
        return new

    def _overlap(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max((len(stop) for stop in self._stop), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
