"""Threads for media work, so that no event loop ever computes. libav and numpy give up the interpreter lock in them."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from omni_common.errors import OmniError

P = ParamSpec("P")
R = TypeVar("R")

_CORES = os.cpu_count() or 1


class Pool:
    """A fixed number of threads; what does not fit waits its turn, at most `waiting` calls if that is given."""

    def __init__(self, name: str, threads: int, waiting: int | None = None) -> None:
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._calls = 0
        self._most = None if waiting is None else threads + waiting

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `call(*args, **kwargs)`. Cancelled before its turn it never runs; afterwards it runs to its end.

        Raises OmniError 429 `queue_full` when too many wait already.
        """
        if self._most is not None and self._calls >= self._most:
            message = "Too many uploads wait to be decoded."
            raise OmniError(message, status=429, code="queue_full", retry_after_s=1.0)
        future = self._executor.submit(call, *args, **kwargs)
        self._calls += 1
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls -= 1


#: Short calls, a few for each second of outgoing sound.
ENCODERS = Pool("encode", min(4, _CORES))
#: Whole uploads, up to a second or so each: apart, so that no upload holds up sound that is being played.
#: Each that waits holds its whole body, 25 MiB at the usual limit.
DECODERS = Pool("decode", min(4, _CORES), waiting=32)
