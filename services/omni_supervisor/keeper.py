"""Keeps one unit running: starts its process, starts it again when it ends, until the unit is told to leave."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable

from omni_supervisor.health import Watchdog
from omni_supervisor.plan import Unit
from omni_supervisor.process import Child
from omni_supervisor.restart import GiveUp, Policy, Restarts


class Keeper:
    """One unit. `run` is its whole life; everything else may be called at any time from the loop.

    `start(unit)` starts a process (raises OSError), `say(text)` tells people.
    """

    def __init__(
        self, unit: Unit, start: Callable[[Unit], Awaitable[Child]], policy: Policy, say: Callable[[str], None]
    ) -> None:
        self.unit = unit
        #: The process that runs now.
        self.child: Child | None = None
        #: It serves.
        self.ready = asyncio.Event()
        #: There will be no further process.
        self.ended = asyncio.Event()
        #: Why the unit is not started any more although nobody asked for its end.
        self.given_up = ""
        self._start = start
        self._say = say
        self._restarts = Restarts(policy)
        self._watchdog = Watchdog(0.0, unit.load_s)
        self._leaving = False
        self._renewing = False
        #: Signals for a process whose start was under way.
        self._signals: tuple[signal.Signals, ...] = ()
        self._hurry = asyncio.Event()

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def leaving(self) -> bool:
        return self._leaving

    @property
    def settled(self) -> bool:
        """Nothing is expected to become ready here."""
        return self.ready.is_set() or self._leaving or self.ended.is_set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._leaving:
                reason = await self._live()
                if self._leaving:
                    return
                if self._renewing:
                    continue
                step = self._restarts.exited(loop.time())
                if isinstance(step, GiveUp):
                    starts = "1 failed start" if step.failed_starts == 1 else f"{step.failed_starts} failed starts"
                    self.given_up = f"{self.name} given up after {starts}: {reason}"
                    return
                when = f"in {step.after_s:g} s" if step.after_s else "at once"
                self._say(f"{self.name} has ended ({reason}), starting it again {when}")
                await self._pause(step.after_s)
        finally:
            self.ended.set()

    async def _live(self) -> str:
        """Run one process; returns why it ended."""
        self._renewing = False
        self._watchdog = Watchdog(asyncio.get_running_loop().time(), self.unit.load_s)
        try:
            child = await self._start(self.unit)
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        self.child = child
        try:
            self._signal(*self._signals)
            await child.wait()
        finally:
            self.child = None
            self.ready.clear()
            child.signal(signal.SIGKILL)
        return child.reason()

    async def _pause(self, seconds: float) -> None:
        self._hurry.clear()
        if not self._leaving:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), seconds)

    # ---------------------------------------------------------------------------------------------- what others know

    def serves(self) -> None:
        """The running process was seen to serve."""
        if self.child is not None and not self._renewing:
            self._restarts.ready()
            self.ready.set()

    def judge(self, now: float, *, scheduler: str, known: bool) -> None:
        """Kill a worker's process that is stuck; see `Watchdog.verdict`."""
        if self._leaving or self._renewing or self.child is None:
            return
        why = self._watchdog.verdict(now, scheduler=scheduler, known=known, ready=self.ready.is_set())
        if why:
            self._say(f"killing {self.name}: {why}")
            self.child.signal(signal.SIGKILL)

    # ------------------------------------------------------------------------------------------- what others ask for

    def hold(self) -> None:
        """Start no further process; the one that runs is left alone."""
        self._leaving = True
        self._hurry.set()

    def leave(self) -> None:
        """Finish what runs, then be gone."""
        self.hold()
        self._end()

    def kill(self) -> None:
        self.hold()
        self._signals = (signal.SIGKILL,)
        self._signal(*self._signals)

    async def renew(self, limit_s: float) -> None:
        """Finish what runs, then another process at once. One that has not ended after `limit_s` is killed.

        Returns when the old process is gone, which is no statement about the new one.
        """
        old = self.child
        if old is None:
            self._hurry.set()
            return
        self._renewing = True
        self.ready.clear()
        self._end()
        if not await old.ends(limit_s):
            self._say(f"killing {self.name}: not ended {limit_s:g} s after it was told to")
            old.signal(signal.SIGKILL)
            await old.ends(limit_s)

    def _end(self) -> None:
        # A process that somebody stopped finishes its work too.
        signals = (signal.SIGTERM, signal.SIGCONT)
        if self._leaving:
            self._signals = signals
        self._signal(*signals)

    def _signal(self, *numbers: signal.Signals) -> None:
        if self.child is not None:
            for number in numbers:
                self.child.signal(number)
