"""The decoder: latents of speech to sound, a stretch at a time.

Input is the talker's `Latent` (see `hibari_talker` for its arrays); output is `Audio` with `samples` [n] float32 at
24 kHz; edge unit: samples. Where a stretch ends depends on positions only, and each stretch is computed from its unit's
latent with the context that it needs, so nothing depends on load, on other jobs, or on what was computed before.
"""

from collections import deque
from typing import Any

import numpy as np

from omni_common.errors import OmniError, invalid
from omni_common.frames import Audio, Latent
from omni_worker.engine import Job, LoadContext, Output, Piece
from omni_worker.models import hibari_graph, hibari_synth
from omni_worker.models.hibari_synth import HOP, RATE

#: Frames of the first stretch (0.3 s), and of a large one (2.4 s, some 15 ms of work).
FIRST, LARGE = 24, 192


def stretch(position: int, left: int) -> int:
    """Frames to make audible at frame `position` of a job when its unit has `left`.

    Small at first, then four times as many as were sent: sound is made much faster than it is heard, and the context
    is work that long stretches save. What would leave less than half a stretch over takes it along.
    """
    size = min(4 * position, LARGE) or FIRST
    return left if left < 1.5 * size else size


class Model:
    """hibari's decoder and synthesis. One stretch of one job is computed at a time."""

    def load(self, context: LoadContext) -> None:
        """Cut the graph and decode silence at the usual lengths."""
        context.progress("cut the graph", 0.1)
        self._session = hibari_graph.session(hibari_graph.cut()[1], context.threads)
        context.progress("warm up", 0.6)
        for frames in (FIRST, LARGE):
            unit = _Unit(0, np.zeros((130, frames), np.float32), np.zeros(frames, np.float32), 0, frames, "")
            self.render(0, unit, 0, frames)

    def open(self, job: Job) -> "Decode":
        """Begin a job."""
        return Decode(self, job.request_id, job.seed)

    def render(self, seed: int, unit: "_Unit", start: int, end: int) -> np.ndarray[Any, Any]:
        """Samples [(end - start) * 300] of a unit's frames [start, end). Raises OmniError when they are not finite."""
        total = unit.z.shape[1]
        first, stop = hibari_synth.frames_for(start, end, total)
        low, high = hibari_synth.context_for(first, stop, total)
        z = np.ascontiguousarray(unit.z[None, :, low:high])
        spectra = [part[0, :, first - low : stop - low] for part in self._session.run(None, {"z": z})]
        noise = hibari_synth.noise(seed, unit.index, first, stop)
        with np.errstate(invalid="ignore", over="ignore"):
            samples = hibari_synth.render(spectra, unit.source.spectrum(first, stop), noise, start, end, total)
        if not np.isfinite(samples).all():
            raise OmniError("the decoder's samples are not finite", code="numerical_error")
        return samples


class _Unit:
    """An independently rendered piece of speech, and how far it has been rendered."""

    def __init__(
        self, index: int, z: np.ndarray[Any, Any], f0: np.ndarray[Any, Any], begin: int, end: int, text: str
    ) -> None:
        self.index = index
        self.z = z
        self.at = begin
        self.end = end
        self.text = text
        self._f0 = f0
        self._source: hibari_synth.Source | None = None

    @property
    def source(self) -> hibari_synth.Source:
        if self._source is None:
            self._source = hibari_synth.Source(self._f0)
        return self._source


class Decode:
    """One job: `Latent` units in, `Audio` stretches out, and an empty last one."""

    def __init__(self, model: Model, request_id: str, seed: int) -> None:
        self._model = model
        self._request_id = request_id
        self._seed = seed
        self._units: deque[_Unit] = deque()
        self._count = 0
        self._ended = False
        #: Text of what has no sound.
        self._unsaid = ""
        self._frame = 0

    @property
    def ready(self) -> bool:
        return bool(self._units or self._ended)

    def push(self, piece: Piece) -> None:
        """Take a unit."""
        if isinstance(piece.body, Latent):
            if piece.arrays:
                begin, end = (int(frame) for frame in piece.arrays["heard"])
                self._units.append(
                    _Unit(self._count, piece.arrays["z"], piece.arrays["f0"], begin, end, piece.body.text)
                )
                self._count += 1
            else:
                self._unsaid += piece.body.text
        elif piece.body is not None:
            raise invalid(f"code2wav takes latents, not {type(piece.body).__name__}")
        self._ended = self._ended or piece.last

    def advance(self) -> Output | None:
        """Make the next stretch."""
        if not self._units:
            return self._output(np.zeros(0, np.float32), self._unsaid, last=True) if self._ended else None
        unit = self._units[0]
        start, end = unit.at, unit.at + stretch(self._frame, unit.end - unit.at)
        samples = self._model.render(self._seed, unit, start, end)
        text, unit.text, unit.at = unit.text, "", end
        if end == unit.end:
            self._units.popleft()
        return self._output(samples, text, last=False)

    def _output(self, samples: np.ndarray[Any, Any], text: str, last: bool) -> Output:
        position = self._frame * HOP
        self._frame += len(samples) // HOP
        if not (len(samples) or text):
            return Output(self._request_id, position, position, last)
        body = Audio(rate=RATE, text=text)
        return Output(self._request_id, position, position + len(samples), last, body, {"samples": samples})
