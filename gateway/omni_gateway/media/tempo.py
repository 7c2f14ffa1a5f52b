"""Speech faster or slower than a model can speak it, at the same pitch."""

from omni_gateway.media.graph import MonoChain, Samples
from omni_gateway.media.owned import Owned


class Tempo(Owned):
    """Overlap-add time stretching (libav's `atempo`). `factor` 2 halves the duration; 0.25 to 4 are sensible."""

    def __init__(self, rate: int, factor: float) -> None:
        super().__init__()
        # One atempo is good from a half to twice; beyond it drops samples, so two share the work.
        steps = [factor] if 0.5 <= factor <= 2.0 else [factor**0.5] * 2
        self._rate, self._filters = rate, [("atempo", f"{step:.6f}") for step in steps]
        self._chain: MonoChain | None = None

    async def feed(self, samples: Samples) -> Samples:
        """What is ready after float32 [n]; it lags the input by some 50 ms."""
        return await self._call(lambda: self._open().push(samples))

    async def finish(self) -> Samples:
        return await self._call(lambda: self._open().finish())

    def _open(self) -> MonoChain:
        if self._chain is None:
            self._chain = MonoChain(self._rate, self._filters)
        return self._chain

    def _free(self) -> None:
        self._chain = None
