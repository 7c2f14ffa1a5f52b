"""The supervisor with tiny programs as children and a scripted look at the system."""

import asyncio
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable

import pytest

from omni_common.frames import Fleet, Replica, StageStatus
from omni_supervisor.health import Look, Probe
from omni_supervisor.merged_log import MergedLog
from omni_supervisor.plan import Role, Unit
from omni_supervisor.restart import Policy
from omni_supervisor.supervisor import Supervisor

PATIENCE_S = 10.0
QUICK = Policy(first_s=0.01, max_s=0.01, max_failed_starts=3)

CALM = """
    import signal, threading
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    print("up")
    done.wait()
    print("bye")
"""
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up")
    time.sleep(60)
"""
BROKEN = """
    raise SystemExit("no weights")
"""


class Log(MergedLog):
    """Keeps lines and lets a test wait for one."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def line(self, name: str, text: str) -> None:
        self.lines.append(f"{name} | {text}")
        self._changed.set()

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.lines)

    async def seen(self, pattern: str, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.count(pattern) < times:
                self._changed.clear()
                await self._changed.wait()


class Script(Probe):
    """A look that the test decides."""

    def __init__(self) -> None:
        super().__init__("http://unused")
        self.answer: Callable[[], Look] = lambda: Look(trouble="the gateway does not answer")

    async def look(self) -> Look:
        return self.answer()


class Rig:
    def __init__(self, *units: Unit, stop_s: float = PATIENCE_S, policy: Policy = QUICK) -> None:
        self.log = Log()
        self.probe = Script()
        self.supervisor = Supervisor(list(units), self.probe, self.log, lambda: ["ready"], stop_s, policy)
        self.task = asyncio.create_task(self.supervisor.run())

    def pid(self, name: str) -> int:
        return self.supervisor._lives[name].child.pid

    def fleet(self, **states: str) -> None:
        """From now on the system looks as if these workers were in these states."""

        def look() -> Look:
            replicas = [
                Replica(name=n, incarnation=n, stage=n.split("_")[0], state=state, pid=self.pid(n.replace("_", "-")))
                for n, state in states.items()
                if n.replace("_", "-") in self.supervisor._lives
            ]
            stages = {r.stage: StageStatus(stage=r.stage, ready=int(r.state == "ready"), waiting=0) for r in replicas}
            return Look(
                all(s.ready for s in stages.values()),
                Fleet(scheduler="s", stages=[*stages.values()], replicas=replicas),
            )

        self.probe.answer = look

    async def end(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


def unit(name: str, program: str = CALM, role: Role = "worker", load_s: float = 60.0) -> Unit:
    stage = name.split("-")[0] if role == "worker" else ""
    return Unit(name, role, (sys.executable, "-c", textwrap.dedent(program)), stage, load_s)


def system(*workers: Unit) -> list[Unit]:
    return [unit("scheduler", role="scheduler"), *workers, unit("gateway", role="gateway")]


async def test_stops_from_the_outside_in() -> None:
    rig = Rig(*system(unit("a-0"), unit("b-0")))
    await rig.log.seen("up$", 4)
    rig.supervisor.stop()
    assert await rig.end() == 0
    byes = [line.split()[0] for line in rig.log.lines if line.endswith("bye")]
    assert byes[0] == "gateway" and byes[3] == "scheduler" and set(byes[1:3]) == {"a-0", "b-0"}


async def test_signals_stop_it() -> None:
    rig = Rig(*system(unit("a-0")))
    await rig.log.seen("up$", 3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await rig.end() == 0
    assert rig.log.count("bye$") == 3


async def test_a_dead_worker_comes_back_and_others_are_not_touched() -> None:
    rig = Rig(*system(unit("a-0"), unit("b-0")))
    await rig.log.seen("up$", 4)
    before = {name: rig.pid(name) for name in ("scheduler", "b-0", "gateway")}
    dead = rig.pid("a-0")
    os.kill(dead, signal.SIGKILL)
    await rig.log.seen(r"^a-0 \| up", 2)
    assert rig.pid("a-0") != dead
    assert {name: rig.pid(name) for name in before} == before
    assert rig.log.count(r"a-0 has ended \(killed by SIGKILL: up\), starting it again in 0\.01 s") == 1
    rig.supervisor.stop()
    assert await rig.end() == 0


async def test_one_stage_that_never_starts_leaves_the_others_running() -> None:
    rig = Rig(*system(unit("a-0", BROKEN), unit("b-0")))
    await rig.log.seen(r"a-0 given up after 3 failed starts: exit status 1: no weights")
    await rig.log.seen("up$", 3)
    assert not rig.task.done()
    rig.supervisor.stop()
    assert await rig.end() == 1


@pytest.mark.parametrize("broken", ["a-0", "scheduler", "gateway"])
async def test_a_system_that_cannot_serve_ends_with_the_reason(broken: str) -> None:
    units = [unit(u.name, BROKEN, u.role) if u.name == broken else u for u in system(unit("a-0"))]
    rig = Rig(*units)
    assert await rig.end() == 1
    assert rig.log.count(f"{broken} given up after 3 failed starts: exit status 1: no weights") == 1


async def test_what_cannot_be_executed_is_given_up_too() -> None:
    rig = Rig(Unit("a-0", "worker", ("/nonexistent/python",), "a"))
    assert await rig.end() == 1
    assert rig.log.count("cannot be started: No such file or directory") == 3


async def test_a_second_request_kills_at_once() -> None:
    rig = Rig(*system(unit("a-0", STUBBORN)))
    await rig.log.seen("up$", 3)
    rig.supervisor.stop()
    await rig.log.seen(r"^gateway \| bye")
    rig.supervisor.stop()
    assert await rig.end() == 1


async def test_the_deadline_kills_what_does_not_stop() -> None:
    rig = Rig(*system(unit("a-0", STUBBORN)), stop_s=0.3)
    await rig.log.seen("up$", 3)
    rig.supervisor.stop()
    assert await rig.end() == 1
    assert rig.log.count(r"killing a-0: not ended 0\.3 s after") == 1


async def test_a_stop_does_not_wait_for_a_restart_that_is_due() -> None:
    rig = Rig(*system(unit("a-0"), unit("b-0")), policy=Policy(first_s=60.0, max_s=60.0))
    await rig.log.seen("up$", 4)
    os.kill(rig.pid("a-0"), signal.SIGKILL)
    await rig.log.seen("a-0 has ended")
    rig.supervisor.stop()
    assert await rig.end() == 0


async def test_ready_is_said_once_then_what_is_missing() -> None:
    rig = Rig(*system(unit("a-0"), unit("b-0")))
    await rig.log.seen("up$", 4)
    rig.fleet(a_0="ready", b_0="loading")
    await rig.log.seen("waiting for b$")
    rig.fleet(a_0="ready", b_0="ready")
    await rig.log.seen(r"^omni \| ready")
    rig.fleet(a_0="ready", b_0="failed")
    await rig.log.seen("degraded: missing b$")
    assert rig.log.count(r"^omni \| ready") == 1
    rig.supervisor.stop()
    assert await rig.end() == 0


async def test_a_worker_that_does_not_become_ready_is_killed_and_started_again() -> None:
    rig = Rig(*system(unit("a-0"), unit("b-0", load_s=0.0)))
    await rig.log.seen("up$", 4)
    first = rig.pid("b-0")
    rig.fleet(a_0="ready", b_0="loading")
    await rig.log.seen("killing b-0: not ready after 0 s")
    rig.fleet(a_0="ready", b_0="ready")
    await rig.log.seen(r"^b-0 \| up", 2)
    assert rig.pid("b-0") != first
    rig.supervisor.stop()
    assert await rig.end() == 0
