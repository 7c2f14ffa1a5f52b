"""The end of a gateway without a failed request: clients move to its successor before their connections close.

A connection that the server closes while it is idle may be chosen by its client at that very moment, and a POST is not
sent again. So every answer of a draining gateway says that its connection is the last, and connections are only closed
once nothing has been asked for a while.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection

from aiohttp import hdrs, web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: Seconds without a request after which connections count as idle.
QUIET_S = 1.0


class Drain:
    """Knows what runs. Both methods are hooks of the application."""

    def __init__(self) -> None:
        self._running = 0
        self._draining = False
        self._changed = asyncio.Event()

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware."""
        self._running += 1
        self._changed.set()
        try:
            return await handler(request)
        finally:
            self._running -= 1
            self._changed.set()

    async def last_answer(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler: no further request over this connection."""
        if self._draining:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"

    async def wait(self, connections: Callable[[], Collection[object]], limit_s: float) -> None:
        """Until nothing runs and no connection is in use, at the longest `limit_s`. Nothing must be accepted any more.

        `connections()`: those of the server.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while connections():
                    self._changed.clear()
                    try:
                        await asyncio.wait_for(self._changed.wait(), QUIET_S)
                    except TimeoutError:
                        if not self._running:
                            return
