"""Runs the processes of one system: starts them, watches, carries out orders, stops them in order."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping

from omni_common.errors import OmniError
from omni_supervisor.crew import Crew
from omni_supervisor.health import Announcer, Look, Probe
from omni_supervisor.keeper import Keeper
from omni_supervisor.merged_log import MergedLog
from omni_supervisor.orders import Order, steps
from omni_supervisor.plan import Unit
from omni_supervisor.process import Child, ParentPipe, spawn
from omni_supervisor.restart import Policy
from omni_supervisor.rollout import Rollout

#: The supervisor's own name in the merged log.
NAME = "omni"
#: Seconds between looks at the system: while something is expected to become ready, and else.
LOOK_SOON_S = 0.2
LOOK_S = 1.0
#: Python prints at once, and says where it was when it is killed by a fault.
CHILD_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


class Supervisor:
    """Runs `units` until it is told to stop.

    `workers[stage](number)` describes a further replica of a stage. `on_ready()` gives the lines to print when
    everything is ready.
    """

    def __init__(
        self,
        units: list[Unit],
        workers: Mapping[str, Callable[[int], Unit]],
        probe: Probe,
        log: MergedLog,
        on_ready: Callable[[], list[str]],
        stop_s: float,
        policy: Policy | None = None,
    ) -> None:
        self._units = units
        self._workers = workers
        self._probe = probe
        self._log = log
        self._on_ready = on_ready
        self._stop_s = stop_s
        self._policy = policy or Policy()
        self._pipe = ParentPipe()
        self._crew: Crew | None = None
        self._stopping = asyncio.Event()
        self._order: asyncio.Task[None] | None = None
        self._doing = ""
        #: The scheduler that was seen last, and the one that a new scheduler process takes the place of.
        self._scheduler = ""
        self._former_scheduler = ""
        self._hopeless = False
        #: A process was started, and is to be seen ready.
        self._started = asyncio.Event()

    def stop(self) -> None:
        """Stop in order; called again, kill. Safe from a signal handler of the loop."""
        if self._stopping.is_set():
            self._say("killing what still runs")
            if self._crew:
                self._crew.kill()
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
                crew = self._crew = Crew(group, self._start, self._policy, self._say, self._on_given_up)
                for unit in self._units:
                    crew.add(unit)
                watcher = group.create_task(self._watch(crew), name="watch")
                await self._stopping.wait()
                watcher.cancel()
                if self._order:
                    self._order.cancel()
                    await asyncio.wait({self._order})
                await crew.stop(self._stop_s)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            self._pipe.close()
        return 1 if crew.killed or self._hopeless else 0

    def carry_out(self, order: Order, say: Callable[[str], None]) -> "asyncio.Task[None]":
        """Begin to do what is asked for; the task ends when it is done, and raises OmniError when it fails.

        Raises OmniError at once when it cannot be begun: it makes no sense here (404, 409), another order is being
        carried out (409), or the system stops (503).
        """
        if self._crew is None or self._stopping.is_set():
            raise OmniError("this omni serve is stopping", code="stopping", status=503)
        if self._order is not None and not self._order.done():
            raise OmniError(f"busy with another order: {self._doing}", code="busy", status=409)

        def tell(text: str) -> None:
            self._say(text)
            say(text)

        todo = steps(order, self._crew.kept(), self._workers)
        self._doing = str(order)
        self._say(f"asked to {self._doing}")
        self._order = asyncio.create_task(Rollout(self._crew, self._workers, tell).run(todo), name="order")
        return self._order

    def _say(self, text: str) -> None:
        self._log.line(NAME, text)

    async def _start(self, unit: Unit) -> Child:
        self._started.set()
        if unit.role == "scheduler":
            self._former_scheduler = self._scheduler
        return await spawn(unit.name, unit.argv, self._pipe, self._log.line, CHILD_ENV | unit.env, unit.fds)

    def _on_given_up(self, keeper: Keeper) -> None:
        """A system without its scheduler, its gateway or any worker serves nobody; without one stage it is degraded."""
        self._say(keeper.given_up)
        self._hopeless = True
        assert self._crew is not None
        workers = [unit for unit in self._crew.kept() if unit.role == "worker"]
        if keeper.unit.role != "worker" or all(unit.lost for unit in workers):
            self._stopping.set()

    # ---------------------------------------------------------------------------------------------------- the system

    async def _watch(self, crew: Crew) -> None:
        announcer = Announcer({unit.stage for unit in self._units if unit.stage})
        has_workers = any(unit.role == "worker" for unit in self._units)
        while True:
            look = await self._probe.look()
            own = {k.child.pid for k in crew.keepers if k.child and k.unit.role == "worker"}
            self._judge(crew.keepers, look, own)
            line = announcer.line(look, own if has_workers else None)
            if line == "ready":
                for text in self._on_ready():
                    self._say(text)
            elif line:
                self._say(line)
            if all(keeper.settled for keeper in crew.keepers):
                self._started.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._started.wait(), LOOK_S)
            else:
                await asyncio.sleep(LOOK_SOON_S)

    def _judge(self, keepers: list[Keeper], look: Look, own: set[int]) -> None:
        """Tell the keepers what the look says of their processes."""
        if look.fleet is None or (own and not own & {replica.pid for replica in look.fleet.replicas}):
            return  # Perhaps another server answers at this address.
        self._scheduler = look.fleet.scheduler
        states = {(replica.stage, replica.pid): replica.state for replica in look.fleet.replicas}
        now = asyncio.get_running_loop().time()
        for keeper in keepers:
            if keeper.child is None:
                continue
            state = states.get((keeper.unit.stage, keeper.child.pid))
            serves = {
                "scheduler": self._scheduler != self._former_scheduler,
                "gateway": keeper.child.pid in look.fleet.gateway_pids,
                "worker": state == "ready",
            }
            if serves[keeper.unit.role]:
                keeper.serves()
            if keeper.unit.role == "worker":
                keeper.judge(now, scheduler=self._scheduler, known=state is not None)
