"""Native objects that pool threads work on: one call at a time, freed once, also when their owner is cancelled."""

import asyncio
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from omni_gateway.media.pool import ENCODERS

P = ParamSpec("P")
R = TypeVar("R")


class Owned:
    """Base of what has one owner for one response: subclasses work in `self._call(...)` and free in `_free`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    async def _call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        def locked() -> R:
            with self._lock:
                if self._closed:
                    raise RuntimeError(f"{type(self).__name__} is closed")
                return call(*args, **kwargs)

        return await ENCODERS.run(locked)

    async def close(self) -> None:
        """Free it. Idempotent. A call that a cancelled task left running in its thread ends first."""

        def release() -> None:
            with self._lock:
                if not self._closed:
                    self._closed = True
                    self._free()

        # Cancelling the closing task must not take the release out of the pool's queue.
        await asyncio.shield(ENCODERS.run(release))

    def _free(self) -> None:
        raise AssertionError("a subclass frees what it holds")
