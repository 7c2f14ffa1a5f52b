"""The supervisor with tiny programs as children and a scripted look at the system."""

import asyncio
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable

import pytest

from omni_common.errors import OmniError
from omni_common.frames import Fleet, Replica, StageStatus
from omni_supervisor.health import Look, Probe
from omni_supervisor.merged_log import MergedLog
from omni_supervisor.orders import Drain, Order, Restart, Scale
from omni_supervisor.plan import Role, Unit
from omni_supervisor.restart import Policy
from omni_supervisor.supervisor import Supervisor

PATIENCE_S = 10.0
QUICK = Policy(first_s=0.01, max_s=0.01, max_failed_starts=3)
#: Numbers of replicas of stage `a` that cannot start.
BROKEN_NUMBERS = {7}

CALM = """
    import os, signal, threading
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    print("pid", os.getpid())
    print("up")
    done.wait()
    print("bye")
"""
STUBBORN = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("pid", os.getpid())
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
        workers = {"a": lambda number: unit(f"a-{number}", BROKEN if number in BROKEN_NUMBERS else CALM)}
        self.supervisor = Supervisor(list(units), workers, self.probe, self.log, lambda: ["ready"], stop_s, policy)
        self.task = asyncio.create_task(self.supervisor.run())

    def running(self) -> list[tuple[str, int]]:
        """Names and pids, in the order of their start."""
        crew = self.supervisor._crew
        return [(keeper.name, keeper.child.pid) for keeper in crew.keepers if keeper.child] if crew else []

    def pid(self, name: str) -> int:
        return dict(self.running())[name]

    def fleet(self, **states: str) -> None:
        """From now on the system looks as if these workers were in these states, and all others that are up ready."""

        def look() -> Look:
            up = [(name, pid) for name, pid in self.running() if self.log.count(rf"\| pid {pid}$")]
            if "scheduler" not in dict(up):
                return Look(trouble="the scheduler does not answer")
            names = [(name, pid) for name, pid in up if name not in ("scheduler", "gateway")]
            replicas = [
                Replica(name, str(pid), name[0], states.get(name.replace("-", "_"), "ready"), pid=pid)
                for name, pid in names
            ]
            stages = {r.stage: StageStatus(stage=r.stage, ready=int(r.state == "ready"), waiting=0) for r in replicas}
            return Look(
                all(s.ready for s in stages.values()),
                # As a scheduler's incarnation, its process id is just as good.
                Fleet(
                    scheduler=str(self.pid("scheduler")),
                    stages=[*stages.values()],
                    replicas=replicas,
                    gateway_pids=[pid for name, pid in up if name == "gateway"],
                ),
            )

        self.probe.answer = look

    async def order(self, order: Order) -> list[str]:
        said: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            await self.supervisor.carry_out(order, said.append)
        return said

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
    assert rig.log.count(r"a-0 has ended \(killed by SIGKILL: up\), starting it again (at once|in 0\.01 s)") == 1
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
    rig.supervisor._crew.find("b-0").unit = unit("b-0")
    rig.fleet(a_0="ready", b_0="ready")
    await rig.log.seen(r"^b-0 \| up", 2)
    assert rig.pid("b-0") != first
    rig.supervisor.stop()
    assert await rig.end() == 0


# ------------------------------------------------------------------------------------------------------------- orders


async def running(*workers: Unit) -> Rig:
    rig = Rig(*system(*workers))
    await rig.log.seen("up$", 2 + len(workers))
    rig.fleet()
    await rig.log.seen(r"^omni \| ready")
    return rig


async def stop(rig: Rig) -> None:
    rig.supervisor.stop()
    assert await rig.end() == 0


async def test_a_killed_worker_that_was_ready_is_started_again_at_once() -> None:
    rig = await running(unit("a-0"))
    for life in (2, 3):
        await asyncio.wait_for(rig.supervisor._crew.find("a-0").ready.wait(), PATIENCE_S)
        os.kill(rig.pid("a-0"), signal.SIGKILL)
        await rig.log.seen(r"^a-0 \| up", life)
    assert rig.log.count(r"a-0 has ended .*, starting it again at once") == 2
    await stop(rig)


async def test_scale_up_and_down() -> None:
    rig = await running(unit("a-0"))
    said = await rig.order(Scale("a", 3))
    assert [line.split(":")[0] for line in sorted(said)] == ["a-1", "a-2"] and all("is ready" in s for s in said)
    assert sorted(name for name, _ in rig.running()) == ["a-0", "a-1", "a-2", "gateway", "scheduler"]
    assert await rig.order(Scale("a", 3)) == ["nothing to do"]
    os.kill(rig.pid("a-2"), signal.SIGKILL)
    await rig.log.seen(r"^a-2 \| up", 2)
    said = await rig.order(Scale("a", 1))
    assert len(said) == 2 and all("has left" in line for line in said)
    assert sorted(name for name, _ in rig.running()) == ["a-0", "gateway", "scheduler"]
    await stop(rig)


async def test_a_drained_worker_is_not_started_again_until_it_is_asked_for() -> None:
    rig = await running(unit("a-0"), unit("b-0"))
    assert ["has left" in line for line in await rig.order(Drain("a"))] == [True]
    assert "a-0" not in dict(rig.running())
    assert rig.log.count("a-0 has ended") == 0
    with pytest.raises(OmniError, match="no replica here; start one with: omni scale a=1"):
        await rig.order(Restart("a"))
    await rig.order(Scale("a", 1))
    assert "a-0" in dict(rig.running())
    await stop(rig)


async def test_the_new_process_is_ready_before_the_old_one_is_told_to_leave() -> None:
    rig = await running(unit("a-0"), unit("a-1"))
    before = dict(rig.running())
    said = await rig.order(Restart("a"))
    after = dict(rig.running())
    assert said[0].startswith(f"a-0: process {after['a-0']} is ready") and f"{before['a-0']} has left" in said[1]
    assert said[2].startswith(f"a-1: process {after['a-1']} is ready") and f"{before['a-1']} has left" in said[3]
    assert {name for name in before if before[name] != after[name]} == {"a-0", "a-1"}
    assert rig.log.count("has ended") == 0
    await stop(rig)


async def test_stop_first_ends_the_old_process_before_the_new_one_starts() -> None:
    rig = await running(unit("a-0"))
    old = rig.pid("a-0")
    said = await rig.order(Restart("a", stop_first=True))
    assert said[0] == f"a-0: process {old} finishes" and "is ready" in said[1] and len(said) == 2
    lines = [line for line in rig.log.lines if line.startswith("a-0 |") and "pid" not in line]
    assert lines == ["a-0 | up", "a-0 | bye", "a-0 | up"]
    await stop(rig)


async def test_restart_all_replaces_every_process() -> None:
    rig = await running(unit("a-0"), unit("b-0"))
    before = dict(rig.running())
    await rig.order(Restart("all"))
    after = dict(rig.running())
    assert before.keys() == after.keys() and not set(before.values()) & set(after.values())
    await rig.order(Restart("all"))
    await stop(rig)


async def test_a_successor_that_does_not_come_up_leaves_the_old_process_alone() -> None:
    rig = await running(unit("a-0"))
    old = rig.pid("a-0")
    rig.supervisor._crew.find("a-0").unit = unit("a-0", BROKEN)
    with pytest.raises(OmniError, match="1 failed start: exit status 1: no weights; a-0 is left as it was"):
        await rig.order(Restart("a-0"))
    assert rig.running()[1] == ("a-0", old) and len(rig.running()) == 3
    await stop(rig)


async def test_replicas_that_do_not_come_up_are_dropped_and_the_others_stay() -> None:
    rig = await running(unit("a-0"))
    with pytest.raises(OmniError, match="a-7 given up after 1 failed start: exit status 1: no weights"):
        await rig.order(Scale("a", 9))
    assert [kept.name for kept in rig.supervisor._crew.kept() if kept.stage] == [f"a-{n}" for n in range(9) if n != 7]
    await stop(rig)


async def test_what_was_given_up_can_be_started_again() -> None:
    rig = Rig(*system(unit("a-0", BROKEN), unit("b-0")))
    await rig.log.seen("a-0 given up")
    rig.fleet()
    await rig.order(Scale("a", 1))
    assert [kept.lost for kept in rig.supervisor._crew.kept() if kept.name == "a-0"] == [False]
    rig.supervisor.stop()
    assert await rig.end() == 1


async def test_a_worker_that_does_not_finish_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_supervisor.rollout.LEAVE_S", 0.1)
    rig = await running(unit("a-0", STUBBORN), unit("a-1", STUBBORN))
    assert "was killed, it had not finished in 0.1 s" in (await rig.order(Drain("a-0")))[0]
    assert "is ready" in (await rig.order(Restart("a-1", stop_first=True)))[1]
    assert rig.log.count("killing a-1: not ended 0.1 s after") == 1
    rig.supervisor.stop()
    rig.supervisor.stop()
    assert await rig.end() == 1


async def test_one_order_at_a_time_and_none_at_the_end() -> None:
    rig = await running(unit("a-0", STUBBORN))
    first = rig.supervisor.carry_out(Drain("a"), lambda _: None)
    with pytest.raises(OmniError, match="busy with another order: drain a") as error:
        rig.supervisor.carry_out(Scale("a", 2), lambda _: None)
    assert error.value.status == 409
    await asyncio.sleep(0)
    rig.supervisor.stop()
    with pytest.raises(OmniError, match="stopping"):
        rig.supervisor.carry_out(Scale("a", 2), lambda _: None)
    rig.supervisor.stop()
    assert await rig.end() == 1
    assert first.cancelled()


@pytest.mark.parametrize("order", [Scale("a", 3), Restart("a"), Restart("all")])
async def test_a_stop_in_the_middle_of_an_order_ends_everything(order: Order) -> None:
    rig = await running(unit("a-0"))
    # Nothing new becomes ready any more.
    rig.probe.answer = lambda: Look(trouble="the gateway does not answer")
    before = len(rig.running())
    task = rig.supervisor.carry_out(order, lambda _: None)
    await rig.log.seen("asked to")
    async with asyncio.timeout(PATIENCE_S):
        while len(rig.running()) == before and rig.log.count("finishes") == 0:
            await asyncio.sleep(0.001)
    await stop(rig)
    assert task.cancelled()
    assert rig.running() == []
