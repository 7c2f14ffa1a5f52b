"""A fake decoder of sound for the `codec` engine: samples are whole numbers that say which frame and where it stood."""

from pathlib import Path
from types import ModuleType

import numpy as np

from omni_common.errors import invalid
from omni_common.params import Voiced
from omni_worker.engine import Job, LoadContext
from omni_worker.engines.codec import Decoding, Samples

PART = "fake_sound"
#: Codes at which something breaks: in `decode`, in the samples.
BAD_CODE, NO_NUMBER = 900, 901
RATE = 24_000
#: Ends of the first chunks; then every LAST frames.
ENDS, LAST = (2, 5), 4


def sound(frames: list[int], start: int, end: int) -> list[float]:
    """Two samples a frame: the code beside its place, and a sum with what stands before it."""
    made: list[float] = []
    for at in range(start, end):
        before = frames[at - 1] if at else 0
        made += [frames[at] * 1000.0 + at, float(frames[at] + before)]
    return made


def ends(count: int) -> list[int]:
    """Where the chunks of a speech of `count` frames end."""
    found = [end for end in ENDS if end < count]
    found += range(ENDS[-1] + LAST, count, LAST)
    return [*found, count] if count else []


class Model:
    """Of `omni_worker.engines.codec.Model`."""

    rate = RATE

    def load(self, folder: Path, context: LoadContext) -> None:
        #: Requests of each `decode`.
        self.batches: list[list[str]] = []

    def open(self, job: Job) -> Decoding:
        assert isinstance(job.params, Voiced)
        if job.params.voice:
            raise invalid("voice: a fake has none", "voice")
        return Decoding(job)

    def due(self, decoding: Decoding) -> int:
        have, done = len(decoding.frames), decoding.decoded
        end = next(iter([e for e in ENDS if e > done]), 0)
        end = end or ENDS[-1] + ((done - ENDS[-1]) // LAST + 1) * LAST
        if have == done:
            return 0
        return end if end <= have else have if decoding.ended else 0

    def decode(self, chunks: list[tuple[Decoding, int]]) -> list[Samples]:
        self.batches.append([decoding.job.request_id for decoding, _ in chunks])
        made = []
        for decoding, end in chunks:
            codes = [frame[0] for frame in decoding.frames]
            if BAD_CODE in codes[decoding.decoded : end]:
                raise RuntimeError("a code that breaks")
            samples = np.array(sound(codes, decoding.decoded, end), np.float32)
            if NO_NUMBER in codes[decoding.decoded : end]:
                samples[-1] = np.nan
            made.append(samples)
        return made


def module() -> ModuleType:
    made = ModuleType(f"omni_worker.models.{PART}")
    made.Model = Model  # type: ignore[attr-defined]
    return made
