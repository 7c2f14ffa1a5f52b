"""Carries out the steps of one order on the running processes, and tells how it goes."""

import asyncio
from collections.abc import Callable, Mapping

from omni_common.errors import OmniError
from omni_supervisor.crew import Crew
from omni_supervisor.keeper import Keeper
from omni_supervisor.orders import Add, Leave, Replace, Step
from omni_supervisor.plan import Unit

#: Seconds that a process gets to finish what runs: a worker's own limit for draining is 30, and it says goodbye.
LEAVE_S = 40.0
#: Beyond a unit's own time to load, until it has been seen ready.
SEEN_S = 10.0


class Rollout:
    """`workers[stage](number)` describes a further replica; `say(text)` tells whoever ordered it."""

    def __init__(self, crew: Crew, workers: Mapping[str, Callable[[int], Unit]], say: Callable[[str], None]) -> None:
        self._crew = crew
        self._workers = workers
        self._say = say

    async def run(self, steps: list[Step]) -> None:
        """Raises OmniError when a new process does not become ready; what has been done by then stays done."""
        for step in steps:
            match step:
                case Add(stage, numbers):
                    await self._add([self._workers[stage](number) for number in numbers])
                case Leave(names):
                    await self._leave([self._crew.find(name) for name in names])
                case Replace(name, stop_first):
                    await self._replace(self._crew.find(name), stop_first)
        if not steps:
            self._say("nothing to do")

    async def _add(self, units: list[Unit]) -> None:
        fresh = [self._crew.add(unit, trial=True) for unit in units]
        failures = await asyncio.gather(*(self._prove(keeper) for keeper in fresh))
        if any(failures):
            raise OmniError("; ".join(filter(None, failures)), code="not_ready")

    async def _prove(self, keeper: Keeper) -> str:
        """Wait until a new unit serves and accept it, or be rid of it; returns what is wrong."""
        try:
            await self._until_ready(keeper)
        except OmniError as error:
            await self._crew.leave([keeper], 0.0)
            return error.message
        self._crew.accept(keeper)
        return ""

    async def _leave(self, keepers: list[Keeper]) -> None:
        pids = {keeper.name: keeper.child.pid for keeper in keepers if keeper.child}
        started = _now()
        killed = await self._crew.leave(keepers, LEAVE_S)
        for name, pid in pids.items():
            how = f"was killed, it had not finished in {LEAVE_S:g} s" if name in killed else "has left"
            self._say(f"{name}: process {pid} {how} ({_now() - started:.1f} s)")

    async def _replace(self, old: Keeper, stop_first: bool) -> None:
        if stop_first and not old.given_up:
            if old.child:
                self._say(f"{old.name}: process {old.child.pid} finishes")
            await old.renew(LEAVE_S)
            await self._until_ready(old)
            return
        fresh = self._crew.add(old.unit, trial=True)
        failure = await self._prove(fresh)
        if failure:
            raise OmniError(f"{failure}; {old.name} is left as it was", code="not_ready")
        if old in self._crew.keepers:
            await self._leave([old])

    async def _until_ready(self, keeper: Keeper) -> None:
        """Raises OmniError with the reason when it does not come up."""
        started = _now()
        ready, ended = (asyncio.ensure_future(event.wait()) for event in (keeper.ready, keeper.ended))
        limit_s = keeper.unit.load_s + SEEN_S
        try:
            await asyncio.wait((ready, ended), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if keeper.ready.is_set() and keeper.child:
            self._say(f"{keeper.name}: process {keeper.child.pid} is ready after {_now() - started:.1f} s")
        elif keeper.ended.is_set():
            raise OmniError(keeper.given_up or f"{keeper.name} has left", code="not_ready")
        else:
            raise OmniError(f"{keeper.name} is not ready after {limit_s:g} s", code="not_ready")


def _now() -> float:
    return asyncio.get_running_loop().time()
