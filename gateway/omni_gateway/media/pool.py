"""Threads for media work, so that no event loop ever computes. libav and numpy give up the interpreter lock in them."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_CORES = os.cpu_count() or 1


class Pool:
    """A fixed number of threads; what does not fit waits its turn."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `call(*args, **kwargs)`. Cancelled before its turn it never runs; afterwards it runs to its end."""
        future = self._executor.submit(call, *args, **kwargs)
        return await asyncio.wrap_future(future)


#: Short calls, a few for each second of outgoing sound.
ENCODERS = Pool("encode", min(4, _CORES))
#: Whole uploads, up to a second or so each: apart, so that no upload holds up sound that is being played.
DECODERS = Pool("decode", min(4, _CORES))
