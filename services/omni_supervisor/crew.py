"""The keepers of one system: they join, leave, and stop in order."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from omni_common.errors import OmniError
from omni_supervisor.keeper import Keeper
from omni_supervisor.orders import Kept
from omni_supervisor.plan import STOP_ORDER, Unit
from omni_supervisor.process import Child
from omni_supervisor.restart import Policy


class Crew:
    """Keepers by order of arrival. Usable inside `group`, which runs them.

    `on_given_up(keeper)` is called when a unit that was needed is started no more.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        start: Callable[[Unit], Awaitable[Child]],
        policy: Policy,
        say: Callable[[str], None],
        on_given_up: Callable[[Keeper], None],
    ) -> None:
        self.keepers: list[Keeper] = []
        #: Something had to be killed.
        self.killed = False
        self._group = group
        self._start = start
        self._policy = policy
        self._say = say
        self._on_given_up = on_given_up
        #: Their first failed start is the last one: who asked for them is told.
        self._on_trial: set[Keeper] = set()

    def add(self, unit: Unit, *, trial: bool = False) -> Keeper:
        """Start a unit. One on `trial` is not counted among the kept ones until `accept`."""
        policy = replace(self._policy, max_failed_starts=1) if trial else self._policy
        keeper = Keeper(unit, self._start, policy, self._say)
        self.keepers.append(keeper)
        if trial:
            self._on_trial.add(keeper)
        self._group.create_task(self._keep(keeper), name=unit.name)
        return keeper

    async def _keep(self, keeper: Keeper) -> None:
        await keeper.run()
        if keeper.given_up and keeper not in self._on_trial:
            self._on_given_up(keeper)

    def accept(self, keeper: Keeper) -> None:
        """The trial is over. A unit of that name which was given up is forgotten."""
        self._on_trial.discard(keeper)
        self.keepers = [k for k in self.keepers if k is keeper or k.name != keeper.name or not k.given_up]

    def kept(self) -> list[Kept]:
        """Who is here to stay, for decisions."""
        return [
            Kept(keeper.name, keeper.unit.role, keeper.unit.stage, lost=bool(keeper.given_up))
            for keeper in self.keepers
            if not keeper.leaving and keeper not in self._on_trial
        ]

    def find(self, name: str) -> Keeper:
        """The one of that name that is here to stay. Raises OmniError when it has been told to leave meanwhile."""
        for keeper in self.keepers:
            if keeper.name == name and not keeper.leaving and keeper not in self._on_trial:
                return keeper
        raise OmniError(f"{name} is leaving", code="leaving", status=409)

    async def leave(self, keepers: list[Keeper], limit_s: float) -> set[str]:
        """Let them finish and go; returns the names of those that had to be killed after `limit_s`."""
        for keeper in keepers:
            keeper.leave()
        late = await self._ended(keepers, limit_s)
        for keeper in late:
            keeper.kill()
        await self._ended(late)
        self.keepers = [keeper for keeper in self.keepers if keeper not in keepers]
        self._on_trial -= set(keepers)
        return {keeper.name for keeper in late}

    async def stop(self, limit_s: float) -> None:
        """End everything, from the outside in; after `limit_s` with force."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        for keeper in self.keepers:
            keeper.hold()
        for role in STOP_ORDER:
            keepers = [keeper for keeper in self.keepers if keeper.unit.role == role]
            for keeper in keepers:
                keeper.leave()
            late = await self._ended(keepers, max(0.0, deadline - loop.time()))
            if late:
                names = ", ".join(sorted(keeper.name for keeper in late))
                self._say(f"killing {names}: not ended {limit_s:g} s after it was told to stop")
                self.kill()
                await self._ended(late)

    def kill(self) -> None:
        self.killed = True
        for keeper in self.keepers:
            keeper.kill()

    async def _ended(self, keepers: list[Keeper], within_s: float | None = None) -> list[Keeper]:
        """Those that have not ended within `within_s`."""
        if keepers:
            waits = [asyncio.ensure_future(keeper.ended.wait()) for keeper in keepers]
            try:
                await asyncio.wait(waits, timeout=within_s)
            finally:
                for wait in waits:
                    wait.cancel()
        return [keeper for keeper in keepers if not keeper.ended.is_set()]
