"""The lifeline: a Unix socket that every process on the host holds open to the scheduler. Its end proves a death.

The kernel closes it when a process ends, however it ends, within a millisecond; a stopped process keeps it open. No
bytes but the incarnation ever travel over it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from omni_common.ids import is_incarnation

log = logging.getLogger(__name__)

RETRY_S = 0.1


class LifelineServer:
    """The scheduler's side: `on_gone(incarnation)` when a process that held on is gone."""

    def __init__(self, path: Path, on_gone: Callable[[str], None]) -> None:
        self._path = path
        self._on_gone = on_gone
        self._server: asyncio.Server | None = None
        self._held: dict[str, asyncio.StreamWriter] = {}

    async def start(self) -> None:
        # The scheduler's lock is held: whatever socket lies here belonged to a dead one.
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._hold, self._path)
        self._path.chmod(0o660)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incarnation = ""
        try:
            line = await reader.readline()
            name = line.removesuffix(b"\n").decode("latin-1")
            if not is_incarnation(name):
                return
            incarnation = name
            self._held[incarnation] = writer
            await reader.read()
        except (ConnectionError, ValueError):
            log.debug("lifeline of %s broke", incarnation or "an unknown peer")
        finally:
            writer.close()
            if incarnation and self._held.get(incarnation) is writer:
                del self._held[incarnation]
                self._on_gone(incarnation)

    def holds(self, incarnation: str) -> bool:
        return incarnation in self._held

    async def close(self) -> None:
        """Let go of everybody without calling them gone."""
        held, self._held = self._held, {}
        for writer in held.values():
            writer.close()
        if self._server:
            self._server.close()
            await self._server.wait_closed()
        self._path.unlink(missing_ok=True)


class Lifeline:
    """A process's side. `on_held` is called after every (re)connection, `on_lost` when the scheduler is gone."""

    def __init__(self, path: Path, incarnation: str, on_held: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self._path = path
        self._incarnation = incarnation
        self._on_held = on_held
        self._on_lost = on_lost
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="lifeline")

    async def _keep(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                writer.write(self._incarnation.encode() + b"\n")
                self._on_held()
                await reader.read()
                self._on_lost()
            except ConnectionError:
                self._on_lost()
            finally:
                writer.close()

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
