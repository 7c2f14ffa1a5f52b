"""How the running system is, seen through the gateway, and what to tell people about it."""

from collections.abc import Collection, Set
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from omni_common.frames import Fleet

#: Seconds for an answer of the gateway on this host.
TIMEOUT_S = 2.0
#: Seconds until a worker must have found a scheduler that is new.
UNKNOWN_S = 10.0
#: Seconds that a process may take to end once the scheduler which knew it has declared it dead, or heard its goodbye.
FENCED_S = 3.0


@dataclass(frozen=True, slots=True)
class Look:
    """One look. `fleet` is None while the gateway or the scheduler does not answer; `trouble` says why."""

    ready: bool = False
    fleet: Fleet | None = None
    trouble: str = ""


class Probe:
    """Asks the gateway at `base` for its readiness and the fleet."""

    def __init__(self, base: str, api_key: str = "") -> None:
        self._base = base
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        # A fresh connection each time: one kept alive would have to be closed before the gateway can end.
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def look(self) -> Look:
        try:
            async with self._session.get(f"{self._base}/health/ready") as answer:
                ready = answer.status == 200
            async with self._session.get(f"{self._base}/omni/status") as answer:
                if answer.status == 503:
                    return Look(trouble="the scheduler does not answer")
                if answer.status != 200:
                    return Look(trouble=f"the gateway answers {answer.status} to /omni/status")
                return Look(ready, msgspec.json.decode(await answer.read(), type=Fleet))
        except (aiohttp.ClientError, TimeoutError):
            return Look(trouble="the gateway does not answer")
        except msgspec.MsgspecError as error:
            return Look(trouble=f"the gateway's /omni/status cannot be understood: {error}")


@dataclass(frozen=True, slots=True)
class Condition:
    """The state of the whole. Stages that are `missing` make another condition, why they are does not."""

    ready: bool
    trouble: str = ""
    missing: frozenset[str] = frozenset()


class Announcer:
    """Turns looks into lines for people, one on every change; of the start it tells what is still waited for."""

    def __init__(self, stages: Set[str]) -> None:
        self._stages = stages
        self._said: Condition | None = None
        self._was_ready = False

    def line(self, look: Look, own_pids: Collection[int] | None) -> str:
        """What to say now, empty when nothing is new. `own_pids`: of our workers that run; None: we run no workers."""
        now = self._condition(look, own_pids)
        if now == self._said:
            return ""
        self._said = now
        self._was_ready |= now.ready
        if now.ready:
            return "ready"
        reasons = {status.stage: status.missing for status in look.fleet.stages} if look.fleet else {}
        missing = [f"{s} ({reasons[s]})" if reasons.get(s) else s for s in sorted(now.missing)]
        if self._was_ready:
            return f"degraded: {now.trouble}" if now.trouble else f"degraded: missing {', '.join(missing)}"
        return f"waiting for {', '.join(missing)}" if missing else ""

    def _condition(self, look: Look, own_pids: Collection[int] | None) -> Condition:
        if look.fleet is None:
            return Condition(False, look.trouble)
        if own_pids is not None and not any(replica.pid in own_pids for replica in look.fleet.replicas):
            # Also when another server answers at this address.
            return Condition(False, "none of the workers has joined")
        there = {status.stage for status in look.fleet.stages if status.ready}
        missing = (self._stages | {status.stage for status in look.fleet.stages}) - there
        if not missing and not look.ready:
            return Condition(False, "the gateway is not ready")
        return Condition(not missing, missing=frozenset(missing))


class Watchdog:
    """Watches one life of a worker process for what its exit cannot tell: that it is stuck. Pure."""

    def __init__(self, started: float, load_s: float) -> None:
        self._load_until = started + load_s
        self._load_s = load_s
        self._was_ready = False
        #: The scheduler that knew it last.
        self._known_to = ""
        self._unknown_since: float | None = None

    def verdict(self, now: float, *, scheduler: str, known: bool, ready: bool) -> str:
        """Why the process has to be killed, empty if it has not.

        `known`: the scheduler with incarnation `scheduler` lists it. One that is new may not have heard of it yet; one
        that knew it has declared it dead, and only a fresh process can take part again.
        """
        self._was_ready |= ready
        if known:
            self._known_to = scheduler
            self._unknown_since = None
        elif self._known_to and self._unknown_since is None:
            self._unknown_since = now
        if not self._was_ready and now > self._load_until:
            return f"not ready after {self._load_s:g} s"
        patience = FENCED_S if scheduler == self._known_to else UNKNOWN_S
        if self._unknown_since is not None and now - self._unknown_since > patience:
            return f"the scheduler does not list it, and it has not ended in {patience:g} s"
        return ""
