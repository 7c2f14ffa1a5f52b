"""Kills the processes of a real instance, one blow after another, while clients stream over it.

    python -m chaos.drive --seed 1 --blows 160      (with tests/ on PYTHONPATH)
    python -m chaos.drive --minutes 60 --json chaos.json

The instance has two replicas of every stage. A blow waits for its event, is noted when it hit a request that its client
has not got whole, and is over when every request that it hit has gone on. Then what died is started again. Replays that
must wait for the restart happen too: when all replicas of a stage die at once.
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos.clients import Asked, Clients
from chaos.plan import SCHEDULER, STAGES, Blow, make_plan
from chaos.report import Report
from omni_common.frames import Fleet
from support.rig import Rig, fake, running, until

#: A moment that does not come within this time is missed.
MOMENT_S = 3.0
#: Longest time until a request that was hit goes on: a silent worker's death, or a scheduler's wait for claims, on top.
RESUME_S = 45.0


@dataclass(slots=True)
class Wound:
    """What a blow did."""

    at: float
    #: Names of processes in the rig that are (about to be) dead.
    names: list[str]
    #: Requests that were hit, and how much their clients had heard then.
    hit: list[tuple[Asked, int]] = field(default_factory=list)


def heard(asked: Asked) -> int:
    """Pieces of sound that the client has: these went through every stage, so one more is a step of each.

    A request that goes on with its words alone makes no progress in the stages behind, and three deaths of one of these
    in a row would be its fault.
    """
    return sum(event.modality == "audio" for event in asked.events)


class Drive:
    def __init__(self, rig: Rig, notes: Path, clients: Clients, report: Report) -> None:
        self._rig, self._notes, self._clients, self._report = rig, notes, clients, report
        self._wounds: list[Wound] = []
        #: Processes that took an order, by stage and event.
        self._struck: dict[tuple[str, str], set[int]] = defaultdict(set)
        self._begun = time.monotonic()

    # ------------------------------------------------------------------------------------------------- the instance

    def _fleet(self) -> Fleet:
        fleet = self._rig.link.fleet
        assert fleet is not None
        return fleet

    def _replicas(self, stage: str) -> list[str]:
        """Names of the stage's live processes."""
        return [
            name
            for name, process in self._rig.processes.items()
            if (name == stage or name.startswith(f"{stage}-")) and process.poll() is None
        ]

    def _name_of(self, pid: int) -> str:
        return next(name for name, process in self._rig.processes.items() if process.pid == pid)

    def _working_on(self, stage: str, pid: int) -> list[Asked]:
        """Requests that are at this process and not whole at their client."""
        path = self._notes / stage / f"{pid}.log"
        if not path.exists():
            return []
        mine = {line.split()[1] for line in path.read_text().splitlines() if line.startswith("job ")}
        return [asked for asked in self._clients.live.values() if asked.request_id in mine]

    def _busiest(self, stage: str) -> str:
        replicas = self._replicas(stage)
        return max(replicas, key=lambda name: len(self._working_on(stage, self._rig.processes[name].pid)))

    # ------------------------------------------------------------------------------------------------------- blows

    async def run(self, plan: list[Blow], until: float = float("inf")) -> None:
        for blow in plan:
            if time.monotonic() > until:
                return
            if self._report.lost:
                return
            await self._strike(blow)

    async def _strike(self, blow: Blow) -> None:
        wound = await self._wound(blow)
        if wound is None:
            self._report.misses[str(blow)] += 1
            return
        report = self._report
        if wound.hit:
            report.hits[blow.victims[0], blow.phase] += 1
            report.signals[signal.Signals(blow.number).name] += 1
            report.together["+".join(blow.victims)] += len(blow.victims) > 1
        else:
            report.misses[str(blow)] += 1
        print(f"{time.monotonic() - self._begun:7.2f} {blow}: {', '.join(wound.names)}", file=sys.stderr)
        if blow.number == signal.SIGKILL:
            await self._bury(wound.names)
        if blow.number == signal.SIGSTOP:
            await self._declared_dead(wound)
        await self._resumed(wound)
        self._wounds.append(wound)
        if blow.number == signal.SIGSTOP:
            for name in wound.names:
                self._rig.kill(name, signal.SIGCONT)
        if blow.number != signal.SIGKILL:
            await self._bury(wound.names)
        await self._rig.all_ready()

    async def _bury(self, names: list[str]) -> None:
        """Wait for the ends of processes and start them again, the scheduler first."""
        for name in sorted(names, key=lambda name: name != SCHEDULER):
            await self._rig.wait(name)
            self._report.deaths += 1
            if name == SCHEDULER:
                self._rig.scheduler()
            else:
                self._rig.worker(name.partition("-")[0], name)

    async def _declared_dead(self, wound: Wound) -> None:
        """The scheduler has given up on what was stopped."""
        pids = {self._rig.processes[name].pid for name in wound.names}
        await until(lambda: not pids & {replica.pid for replica in self._fleet().replicas}, RESUME_S)

    async def _resumed(self, wound: Wound) -> None:
        """Every request that was hit has gone on, or has ended."""
        deadline = wound.at + RESUME_S
        for asked, before in wound.hit:
            while asked.state != "over" and heard(asked) <= before and time.monotonic() < deadline:
                await asyncio.sleep(0.002)
            if asked.state != "over" and heard(asked) <= before:
                self._report.lost.append(f"request {asked.number} {asked.request_id} did not go on ({asked.state})")

    async def _wound(self, blow: Blow) -> Wound | None:
        victim = blow.victims[0]
        if victim == SCHEDULER:
            if not await self._moment(SCHEDULER_MOMENTS[blow.phase]) and blow.phase != "recovery":
                return None
            if blow.phase == "recovery":
                first = await self._inside(Blow(("talker",), "mid"))
                if first is None:
                    return None
                second = self._outside(blow)
                return Wound(first.at, [*first.names, *second.names], first.hit)
            return self._outside(blow)
        if blow.phase == "queued":
            if not await self._moment(lambda live: any(asked.state == "submitting" for asked in live)):
                return None
            return self._outside(blow, [self._busiest(victim)])
        if blow.phase == "recovery":
            other = STAGES[(STAGES.index(victim) + 1) % len(STAGES)]
            first = await self._inside(Blow((other,), "mid"))
            if first is None:
                return None
            second = self._outside(blow, [self._busiest(victim)])
            return Wound(first.at, [*first.names, *second.names], first.hit + second.hit)
        return await self._inside(blow)

    async def _moment(self, when: Callable[[list[Asked]], bool]) -> bool:
        deadline = time.monotonic() + MOMENT_S
        while not when(list(self._clients.live.values())):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.001)
        return True

    async def _inside(self, blow: Blow) -> Wound | None:
        """The victim hits itself when the event happens in its engine; the others are hit then."""
        stage, folder = blow.victims[0], self._notes / blow.victims[0]
        order = folder / blow.phase
        # A SIGTERM to itself would be served when the engine's step is over: as from outside.
        order.with_suffix(".new").write_text(str(int(blow.number)))
        order.with_suffix(".new").rename(order)
        deadline = time.monotonic() + MOMENT_S
        while order.exists():
            if time.monotonic() > deadline:
                try:
                    order.unlink()
                except FileNotFoundError:
                    break
                return None
            await asyncio.sleep(0.001)
        pids = {int(path.suffix[1:]) for path in folder.glob(f"{blow.phase}.*") if path.suffix != ".new"}
        (pid,) = pids & {process.pid for process in self._rig.processes.values()} - self._struck[stage, blow.phase]
        self._struck[stage, blow.phase].add(pid)
        wound = Wound(time.monotonic(), [self._name_of(pid)])
        wound.hit = [(asked, heard(asked)) for asked in self._working_on(stage, pid)]
        if len(blow.victims) > 1:
            others = [name for victim in blow.victims for name in self._all(victim) if name not in wound.names]
            also = self._outside(blow, others)
            wound.names += also.names
            wound.hit += [pair for pair in also.hit if pair[0] not in [asked for asked, _ in wound.hit]]
        return wound

    def _all(self, victim: str) -> list[str]:
        return [SCHEDULER] if victim == SCHEDULER else self._replicas(victim)

    def _outside(self, blow: Blow, names: list[str] | None = None) -> Wound:
        """Hit these (default: all of the victims') now."""
        wound = Wound(time.monotonic(), names or [name for victim in blow.victims for name in self._all(victim)])
        for name in wound.names:
            process = self._rig.processes[name]
            hit = (
                list(self._clients.live.values())
                if name == SCHEDULER
                else self._working_on(name.partition("-")[0], process.pid)
            )
            wound.hit += [(asked, heard(asked)) for asked in hit if asked not in [a for a, _ in wound.hit]]
            os.kill(process.pid, blow.number)
        return wound

    # ------------------------------------------------------------------------------------------------------- judgement

    def judge_silence(self) -> None:
        """The longest pause between two events after a blow that killed a stage, by request that was hit."""
        for wound in self._wounds:
            for asked, before in wound.hit if SCHEDULER not in wound.names else ():
                times = [wound.at, *asked.times[before:]]
                self._report.resumed.append(max((b - a for a, b in itertools.pairwise(times)), default=0.0))

    def judge_work(self) -> None:
        """No process computes a position of a request twice. A job that a second process gets is a replay."""
        jobs: Counter[tuple[str, str]] = Counter()
        for path in self._notes.glob("*/*.log"):
            reached: dict[str, int] = {}
            for line in path.read_text().splitlines():
                kind, request_id, *rest = line.split()
                jobs[path.parent.name, request_id] += kind == "job"
                if kind == "out":
                    start, end = int(rest[0]), int(rest[1])
                    self._report.recomputed += max(min(end, reached.get(request_id, 0)) - start, 0)
                    reached[request_id] = max(end, reached.get(request_id, 0))
        self._report.replays = sum(times - 1 for times in jobs.values())


def _some(state: str) -> Callable[[list[Asked]], bool]:
    return lambda live: any(asked.state == state for asked in live)


SCHEDULER_MOMENTS: dict[str, Callable[[list[Asked]], bool]] = {
    "queued": _some("submitting"),
    "placed": _some("placed"),
    "first": lambda live: any(0 < heard(asked) < 4 for asked in live),
    "mid": lambda live: sum(asked.state == "running" for asked in live) >= 4,
    "last": lambda live: any(asked.ended("text") and not asked.ended("audio") for asked in live),
    "sent": lambda live: any(asked.state == "submitting" and asked.number > 8 for asked in live),
    "idle": lambda live: bool(live) and all(asked.state == "running" for asked in live),
    "recovery": lambda live: True,
}


async def chaos(seed: int, blows: int = 0, minutes: float = 0.0, entropy: bool = True, streams: int = 8) -> Report:
    """One run. With `minutes` blows go on for so long, else `blows` of them."""
    report = Report(seed)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="notes") as folder:
        notes = Path(folder)
        overrides = [f"stages.{stage}.options.notes={notes / stage}" for stage in STAGES]
        overrides.append(f"stages.thinker.options.entropy={str(entropy).lower()}")
        async with running(fake("chaos"), *overrides) as rig:
            for stage in STAGES:
                rig.worker(stage, f"{stage}-b")
            while any(rig.ready(stage) < 2 for stage in STAGES):
                await asyncio.sleep(0.01)
            clients = Clients(rig, report, streams, entropy=entropy)
            drive = Drive(rig, notes, clients, report)
            plan = make_plan(seed, blows or 100_000)
            await drive.run(plan, begun + minutes * 60 if minutes else float("inf"))
            await clients.stop()
            await rig.idle()
            fleet = drive._fleet()
            report.duplicates = rig.link._node.duplicates + sum(replica.duplicates for replica in fleet.replicas)
            report.resends = rig.link._node.resends + sum(replica.resends for replica in fleet.replicas)
            report.evicted = sum(replica.evicted for replica in fleet.replicas)
            drive.judge_work()
            drive.judge_silence()
    report.seconds = time.monotonic() - begun
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blows", type=int, default=160)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="words that are not random")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = asyncio.run(chaos(arguments.seed, arguments.blows, arguments.minutes, not arguments.plain))
    print(report.table())
    print("\n".join(report.lost))
    if arguments.json:
        arguments.json.write_text(report.json())
    return bool(report.lost or report.recomputed)


if __name__ == "__main__":
    sys.exit(main())
