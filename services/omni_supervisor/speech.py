"""What the command line does with speech: keeps it in a file, plays it, or both."""

import asyncio
import contextlib
import shutil
import wave
from pathlib import Path
from types import TracebackType
from typing import Self

from omni_common.errors import OmniError

#: Rate of the API's `pcm` and `pcm16`: 16-bit little endian, mono.
PCM_RATE = 24_000
#: Players that take PCM on their standard input, in order of preference.
_PLAYERS = {
    "aplay": ["-q", "-t", "raw", "-f", "S16_LE", "-r", str(PCM_RATE), "-c", "1", "-"],
    "paplay": ["--raw", "--format=s16le", f"--rate={PCM_RATE}", "--channels=1"],
    "ffplay": ["-v", "error", "-nodisp", "-autoexit", "-f", "s16le", "-sample_rate", str(PCM_RATE), "-i", "-"],
}
#: File suffix -> the API's name of the format. A .wav is asked for as PCM: its header needs the length.
_FORMATS = {
    ".wav": "pcm",
    ".pcm": "pcm",
    ".mp3": "mp3",
    ".flac": "flac",
    ".opus": "opus",
    ".ogg": "opus",
    ".aac": "aac",
}


class Speech:
    """Takes a stream of audio bytes. Nothing is written to the file before the end: half an answer is not kept."""

    def __init__(self, out: Path | None, play: bool) -> None:
        """Raises OmniError when the suffix is no format, nothing can play, or `out` cannot be played."""
        self._out = out
        self._play = play
        self._kept = bytearray()
        self._player: asyncio.subprocess.Process | None = None
        suffix = out.suffix.lower() if out else ".pcm"
        if suffix not in _FORMATS:
            raise OmniError(f"{out}: the name must end in one of {', '.join(_FORMATS)}")
        #: As the speech endpoint calls it; chat completions call `pcm` `pcm16`.
        self.format = _FORMATS[suffix]
        if play and self.format != "pcm":
            raise OmniError(f"--play goes with a .wav file, not with {out}")
        if play and not any(map(shutil.which, _PLAYERS)):
            raise OmniError(f"nothing here can play: none of {', '.join(_PLAYERS)} is installed")

    async def write(self, data: bytes) -> None:
        self._kept += data
        if not self._play:
            return
        if self._player is None:
            name = next(name for name in _PLAYERS if shutil.which(name))
            self._player = await asyncio.create_subprocess_exec(name, *_PLAYERS[name], stdin=asyncio.subprocess.PIPE)
        assert self._player.stdin is not None
        try:
            self._player.stdin.write(data)
            await self._player.stdin.drain()
        except ConnectionError:
            raise OmniError("the player has ended") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The stream has ended. If it is whole, write the file and wait until all was played."""
        if kind is None and self._out is not None:
            self._save(self._out)
        if self._player is not None:
            assert self._player.stdin is not None
            self._player.stdin.close()
            if kind is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._player.kill()
            await self._player.wait()

    def _save(self, out: Path) -> None:
        try:
            if out.suffix.lower() != ".wav":
                out.write_bytes(self._kept)
                return
            with wave.open(str(out), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(PCM_RATE)
                file.writeframes(self._kept)
        except OSError as error:
            raise OmniError(f"{out}: {error.strerror}") from None
