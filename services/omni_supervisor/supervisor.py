"""Keeps the processes of one system running: start, watch, restart, stop in order."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass

from omni_supervisor.health import Announcer, Look, Probe, Watchdog
from omni_supervisor.merged_log import MergedLog
from omni_supervisor.plan import STOP_ORDER, Role, Unit
from omni_supervisor.process import Child, ParentPipe, spawn
from omni_supervisor.restart import GiveUp, Policy, Restarts

#: The supervisor's own name in the merged log.
NAME = "omni"
#: Seconds between looks at the system: until it is ready, and after.
LOOK_SOON_S = 0.2
LOOK_S = 1.0
#: Python prints at once, and says where it was when it is killed by a fault.
CHILD_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


@dataclass(slots=True)
class _Life:
    """One run of a unit's process."""

    child: Child
    watchdog: Watchdog
    restarts: Restarts


class Supervisor:
    """Runs `units` until it is told to stop. `on_ready()` gives the lines to print when everything is ready."""

    def __init__(
        self,
        units: list[Unit],
        probe: Probe,
        log: MergedLog,
        on_ready: Callable[[], list[str]],
        stop_s: float,
        policy: Policy | None = None,
    ) -> None:
        self._units = units
        self._probe = probe
        self._log = log
        self._on_ready = on_ready
        self._stop_s = stop_s
        self._policy = policy or Policy()
        self._pipe = ParentPipe()
        self._lives: dict[str, _Life] = {}
        self._stopping = asyncio.Event()
        self._killing = False
        #: Units that were given up.
        self._lost: set[str] = set()
        self._clean = True

    def stop(self) -> None:
        """Stop in order; called again, kill. Safe from a signal handler of the loop."""
        if self._stopping.is_set():
            self._say("killing what still runs")
            self._kill()
        else:
            self._say("stopping")
            self._stopping.set()

    async def run(self) -> int:
        """Exit status: 0 after a clean stop, 1 when something failed for good or had to be killed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self._say(f"starting {', '.join(unit.name for unit in self._units)}")
        try:
            async with self._probe, asyncio.TaskGroup() as group:
                keepers: dict[Role, list[asyncio.Task[None]]] = {role: [] for role in STOP_ORDER}
                for unit in self._units:
                    keepers[unit.role].append(group.create_task(self._keep(unit), name=unit.name))
                watcher = group.create_task(self._watch(), name="watch")
                await self._stopping.wait()
                watcher.cancel()
                await self._stop_in_order(keepers)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            self._pipe.close()
        return 0 if self._clean else 1

    def _say(self, text: str) -> None:
        self._log.line(NAME, text)

    # ---------------------------------------------------------------------------------------------------- one unit

    async def _keep(self, unit: Unit) -> None:
        restarts = Restarts(self._policy)
        while not self._stopping.is_set():
            reason = await self._live(unit, restarts)
            if self._stopping.is_set():
                return
            step = restarts.exited(asyncio.get_running_loop().time())
            if isinstance(step, GiveUp):
                self._give_up(unit, f"{unit.name} given up after {step.failed_starts} failed starts: {reason}")
                return
            self._say(f"{unit.name} has ended ({reason}), starting it again in {step.after_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), step.after_s)

    async def _live(self, unit: Unit, restarts: Restarts) -> str:
        """Run the unit's process once; returns why it ended."""
        started = asyncio.get_running_loop().time()
        try:
            child = await spawn(unit.name, unit.argv, self._pipe, self._log.line, CHILD_ENV | unit.env)
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        self._lives[unit.name] = _Life(child, Watchdog(started, unit.load_s), restarts)
        try:
            if self._killing:
                child.signal(signal.SIGKILL)
            elif self._stopping.is_set():
                child.signal(signal.SIGTERM)
            await child.wait()
        finally:
            del self._lives[unit.name]
            child.signal(signal.SIGKILL)
        return child.reason()

    def _give_up(self, unit: Unit, why: str) -> None:
        """A system without its scheduler, its gateway or any worker serves nobody; without one stage it is degraded."""
        self._say(why)
        self._clean = False
        self._lost.add(unit.name)
        workers = {other.name for other in self._units if other.role == "worker"}
        if unit.role != "worker" or workers <= self._lost:
            self._stopping.set()

    # ---------------------------------------------------------------------------------------------------- the system

    async def _watch(self) -> None:
        announcer = Announcer({unit.stage for unit in self._units if unit.stage})
        has_workers = any(unit.role == "worker" for unit in self._units)
        wait = LOOK_SOON_S
        while True:
            look = await self._probe.look()
            own = {life.child.pid for name, life in self._lives.items() if self._unit(name).role == "worker"}
            line = announcer.line(look, own if has_workers else None)
            if line == "ready":
                wait = LOOK_S
                for text in self._on_ready():
                    self._say(text)
            elif line:
                self._say(line)
            self._judge(look, own)
            await asyncio.sleep(wait)

    def _unit(self, name: str) -> Unit:
        return next(unit for unit in self._units if unit.name == name)

    def _judge(self, look: Look, own: set[int]) -> None:
        """Tell each life what the look says of it, and kill what is stuck."""
        if look.fleet is None:
            return
        known = {(replica.stage, replica.pid): replica.state for replica in look.fleet.replicas}
        if not own & {replica.pid for replica in look.fleet.replicas}:
            return  # Perhaps another server answers at this address.
        now = asyncio.get_running_loop().time()
        for name, life in self._lives.items():
            unit = self._unit(name)
            if unit.role != "worker":
                life.restarts.ready(now)
                continue
            state = known.get((unit.stage, life.child.pid))
            if state == "ready":
                life.restarts.ready(now)
            why = life.watchdog.verdict(now, known=state is not None, ready=state == "ready")
            if why:
                self._say(f"killing {name}: {why}")
                life.child.signal(signal.SIGKILL)

    # ----------------------------------------------------------------------------------------------------- the end

    async def _stop_in_order(self, keepers: dict[Role, list[asyncio.Task[None]]]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._stop_s
        for role in STOP_ORDER:
            for name, life in self._lives.items():
                if self._unit(name).role == role:
                    life.child.signal(signal.SIGTERM)
            if not keepers[role]:
                continue
            _, late = await asyncio.wait(keepers[role], timeout=max(0.0, deadline - loop.time()))
            if late:
                names = ", ".join(sorted(task.get_name() for task in late))
                self._say(f"killing {names}: not ended {self._stop_s:g} s after it was told to stop")
                self._kill()
                await asyncio.wait(late)

    def _kill(self) -> None:
        self._killing = True
        self._clean = False
        for life in self._lives.values():
            life.child.signal(signal.SIGKILL)
