"""A chain of libav audio filters, fed frame by frame, that gives mono float32."""

from fractions import Fraction
from itertools import pairwise
from typing import Any

import av
import numpy as np
from av.error import BlockingIOError as NothingYet
from av.error import EOFError as NoMore
from av.filter import Graph

Samples = np.ndarray[Any, np.dtype[np.float32]]
EMPTY: Samples = np.zeros(0, np.float32)


def resample_to(rate: int) -> tuple[str, str]:
    """The filter that mixes down to mono and resamples to `rate`.

    Channels are weighted as ITU-R BS.775 has it (front 0.7, centre 1, surround 0.5, low-frequency effects 0), scaled so
    that the weights sum to 1: nothing clips, and a sound that is on every channel keeps its level. 128 taps with the
    edge at 0.96 of the lower Nyquist frequency leave aliases below -90 dB.
    """
    return "aresample", f"osr={rate}:ochl=mono:osf=flt:rematrix_maxval=1.0:filter_size=128:cutoff=0.96"


class FilterChain:
    """Not thread-safe. `filters` are (name, arguments); the last must give mono `flt`."""

    def __init__(self, rate: int, layout: str, sample_format: str, filters: list[tuple[str, str]]) -> None:
        self._graph = Graph()
        source = self._graph.add_abuffer(
            sample_rate=rate, format=sample_format, layout=layout, time_base=Fraction(1, rate)
        )
        chain = [source, *(self._graph.add(name, args) for name, args in filters), self._graph.add("abuffersink")]
        for left, right in pairwise(chain):
            left.link_to(right)
        self._graph.configure()

    def push(self, frame: av.AudioFrame | None) -> Samples:
        """Feed a frame, or None for the end. Returns what is ready, float32 [n]. Raises av.error.FFmpegError."""
        self._graph.push(frame)
        blocks: list[Samples] = []
        while True:
            try:
                blocks.append(np.asarray(self._graph.pull().to_ndarray(), np.float32).reshape(-1))
            except (NothingYet, NoMore):
                return np.concatenate(blocks) if blocks else EMPTY


class MonoChain:
    """Filters from mono float32 blocks to mono float32 blocks."""

    def __init__(self, rate: int, filters: list[tuple[str, str]]) -> None:
        self._chain = FilterChain(rate, "mono", "flt", filters)
        self._rate = rate
        self._fed = 0

    def push(self, samples: Samples) -> Samples:
        if not samples.size:
            return EMPTY
        frame = mono_frame(samples, "flt", self._rate, self._fed)
        self._fed += samples.size
        return self._chain.push(frame)

    def finish(self) -> Samples:
        return self._chain.push(None) if self._fed else EMPTY


def mono_frame(samples: np.ndarray[Any, Any], sample_format: str, rate: int, start: int) -> av.AudioFrame:
    """`samples` [n], of the dtype that `sample_format` has, as a frame that begins at sample `start`."""
    frame = av.AudioFrame.from_ndarray(samples[None, :], format=sample_format, layout="mono")
    frame.sample_rate = rate
    frame.pts = start
    frame.time_base = Fraction(1, rate)
    return frame
