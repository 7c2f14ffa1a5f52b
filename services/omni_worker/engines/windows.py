"""Cutting audio of any length into windows that a speech recogniser takes, at places where nobody speaks.

Boundaries depend on the samples alone, never on how they arrived or on what was recognised: a replica that takes over
cuts at the same places. Energy is enough for that, and unlike the recogniser's own time stamps it can be had beforehand
(the idea of "cut and merge": Bain et al., "WhisperX", 2023).
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from omni_worker.engines.mel import RATE, Floats

#: Samples: what energy is measured over, the pause that a cut looks for, and what is kept around speech.
_FRAME = RATE // 50
_PAUSE = RATE * 3 // 10
_MARGIN = RATE // 5
#: Root mean square of a frame below which it is silent, at full scale 1 (-60 dB), and relative to the loudest (-40 dB).
_SILENT = 1e-3
_FAINT = 1e-2


@dataclass(frozen=True, slots=True)
class Window:
    """Samples [offset, offset + len(samples)) of audio number `index`, float32 at 16 kHz."""

    index: int
    offset: int
    samples: Floats
    #: The last window of its audio, and of the whole input.
    ends_audio: bool
    last: bool = False


class Splitter:
    """Takes the audios of one request piece by piece and gives windows of at most `limit` samples, in order.

    Nothing is lost or doubled; every audio ends with a window (an empty one when there is no sound).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._index = 0
        self._offset = 0
        self._length = 0
        self._pieces: deque[Floats] = deque()

    def push(self, index: int, samples: Floats) -> list[Window]:
        """Windows that are settled now. `samples` of audio `index`: float32 [n], kept until they are in a window.

        Raises ValueError when the audio is neither the current nor the next one.
        """
        windows = []
        if index == self._index + 1:
            windows.append(self._end(last=False))
        elif index != self._index:
            raise ValueError(f"audio {index} came after audio {self._index}")
        self._pieces.append(samples)
        self._length += len(samples)
        while self._length > self._limit:
            windows.append(self._take(quietest(self._head(self._limit)), ends_audio=False))
        return windows

    def close(self) -> list[Window]:
        """The rest, when no more input comes."""
        return [self._end(last=True)]

    def _end(self, last: bool) -> Window:
        window = self._take(self._length, ends_audio=True, last=last)
        self._index += 1
        self._offset = 0
        return window

    def _take(self, size: int, ends_audio: bool, last: bool = False) -> Window:
        head = self._head(size)
        self._pieces[0] = self._pieces[0][size:]
        window = Window(self._index, self._offset, head, ends_audio, last)
        self._offset += size
        self._length -= size
        return window

    def _head(self, size: int) -> Floats:
        """The first `size` samples, joined into the first piece."""
        parts: list[Floats] = [np.zeros(0, np.float32)] if not self._pieces else [self._pieces.popleft()]
        have = len(parts[0])
        while have < size:
            parts.append(self._pieces.popleft())
            have += len(parts[-1])
        self._pieces.appendleft(np.concatenate(parts) if len(parts) > 1 else parts[0])
        return self._pieces[0][:size]


def quietest(samples: Floats) -> int:
    """Where to cut: the middle of the quietest 0.3 s in the second half of `samples`, the latest of equals.

    `samples`: float32 [n] at 16 kHz, at least 0.6 s.
    """
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    starts = np.arange(len(samples) // 2, len(samples) - _PAUSE + 1, RATE // 100)
    over = energy[starts + _PAUSE] - energy[starts]
    return int(starts[len(over) - 1 - int(np.argmin(over[::-1]))]) + _PAUSE // 2


def sounding(samples: Floats) -> tuple[int, int]:
    """The range of `samples` (float32 [n]) that is louder than silence, with 0.2 s around it; (0, 0) when none is."""
    frames = np.pad(samples, (0, -len(samples) % _FRAME)).reshape(-1, _FRAME)
    level = np.sqrt(np.mean(np.square(frames, dtype=np.float64), axis=1))
    loud = np.flatnonzero(level > max(_SILENT, _FAINT * level.max(initial=0.0)))
    if not len(loud):
        return 0, 0
    return max(0, int(loud[0]) * _FRAME - _MARGIN), min(len(samples), (int(loud[-1]) + 1) * _FRAME + _MARGIN)
