"""One log of all processes: every line with the name of who wrote it."""

import contextlib
import os
import zlib
from typing import TextIO

#: A line longer than this is broken: a child that never ends its line must not fill the memory.
MAX_LINE_BYTES = 64 * 1024
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class MergedLog:
    """Writes `name | line`; in colour on a terminal, unless NO_COLOR is set."""

    def __init__(self, stream: TextIO, width: int = 0) -> None:
        self._stream = stream
        self._width = width
        self._colour = stream.isatty() and not os.environ.get("NO_COLOR")

    def line(self, name: str, text: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if self._colour:
            prefix = f"\033[{_COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]}m{prefix}\033[0m"
        # Whoever read the log is gone: the service outlives its readers.
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(f"{prefix} {text}\n")
            self._stream.flush()


class LineSplitter:
    """Bytes in, whole lines of text out. Of a line that was redrawn with carriage returns the last state counts."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[str]:
        self._rest += data
        *whole, rest = bytes(self._rest).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            whole.append(rest)
            rest = b""
        self._rest = bytearray(rest)
        return [_text(line) for line in whole]

    def end(self) -> list[str]:
        """The last line, which has no end."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
