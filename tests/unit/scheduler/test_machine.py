"""The scheduler's machine without sockets: every interleaving of a small system, and the rules one by one."""

import itertools
import logging
import math
from collections.abc import Iterator

import pytest

from omni_common.frames import (
    PROTOCOL_VERSION,
    Beat,
    Bye,
    Cancel,
    Close,
    Closed,
    Done,
    Failed,
    Fenced,
    Hello,
    Holding,
    Lost,
    Place,
    Placed,
    Plain,
    Refused,
    Rejected,
    State,
    Submit,
    Welcome,
)
from omni_common.pipeline import Limits, Pipeline, Stage, Task
from omni_scheduler.machine import MISSING_S, Scheduler
from omni_scheduler.request import ENDED, Phase, Send

REQUEST = "r" * 32


def pipeline(slots: int = 1, queue: int = 64) -> Pipeline:
    return Pipeline(
        name="two",
        stages={
            "first": Stage(engine="fake", slots=slots, stall_s=10.0),
            "second": Stage(engine="fake", slots=slots, inputs=["first"]),
        },
        tasks={
            "chat": Task(input={"text": "first"}, output={"text": "first", "audio": "second"}),
        },
        limits=Limits(queue=queue, queue_s=10.0, total_s=60.0),
    )


class System:
    """A scheduler with peers that are only names; `mail` collects what each was sent."""

    def __init__(self, slots: int = 1, queue: int = 64) -> None:
        self.now = 100.0
        self.pipeline = pipeline(slots, queue)
        self.machine = Scheduler("s" * 16, {"two": self.pipeline})
        self.mail: dict[str, list[Plain]] = {}

    def take(self, sends: list[Send]) -> list[Send]:
        for send in sends:
            self.mail.setdefault(send.peer, []).append(send.frame)
        self.machine.check()
        return sends

    def says(self, peer: str, frame: Plain) -> list[Send]:
        return self.take(self.machine.received(peer, frame, self.now))

    def dies(self, peer: str) -> list[Send]:
        return self.take(self.machine.gone(peer, "its process ended", self.now))

    def passes(self, seconds: float) -> list[Send]:
        """Time passes in ticks, with everybody's beats."""
        sends = []
        step = 0.25 if seconds < 10 else 2.0
        for _ in range(math.ceil(seconds / step)):
            self.now += step
            for peer in list(self.machine.fleet.peers):
                self.says(peer, Beat())
            sends += self.take(self.machine.tick(self.now))
        return sends

    def joins(self, peer: str, stage: str = "", ready: bool = True) -> list[Send]:
        hello = Hello(PROTOCOL_VERSION, "worker" if stage else "gateway", peer, peer, inbox=f"ipc://{peer}")
        if stage:
            hello.stage, hello.slots = stage, self.pipeline.stages[stage].slots
            hello.digest = self.pipeline.stages[stage].digest(stage)
        sends = self.says(peer, hello)
        return sends + self.says(peer, State("ready")) if ready and stage else sends

    def submits(self, request_id: str = REQUEST, outputs: tuple[str, ...] = ("text", "audio")) -> list[Send]:
        return self.says(
            "gate", Submit(request_id, "two", "chat", ["text"], list(outputs), seed=1, queue_s=10.0, total_s=60.0)
        )

    def got(self, peer: str, kind: type[Plain]) -> list[Plain]:
        return [frame for frame in self.mail.get(peer, []) if isinstance(frame, kind)]

    @property
    def phase(self) -> Phase | None:
        request = self.machine.requests.get(REQUEST)
        return request.phase if request else None


def full_system(slots: int = 1, queue: int = 64) -> System:
    system = System(slots, queue)
    system.joins("gate")
    system.joins("w1", "first")
    system.joins("w2", "second")
    return system


def test_a_request_is_placed_with_both_ends_of_every_edge() -> None:
    system = full_system()
    sends = system.submits()
    assert [(send.peer, type(send.frame)) for send in sends] == [("w2", Place), ("w1", Place), ("gate", Placed)]
    first, second, placed = sends[1].frame, sends[0].frame, sends[2].frame
    assert [(link.edge, link.incarnation, link.inbox) for link in first.sinks] == [
        ("first>second", "w2", "ipc://w2"),
        ("first>client", "gate", "ipc://gate"),
    ]
    assert [(link.edge, link.incarnation) for link in second.sources] == [("first>second", "w1")]
    assert [link.edge for link in placed.sources] == ["first>client", "second>client"]
    assert [link.edge for link in placed.sinks] == ["client>first"]


def test_text_only_needs_no_audio_stage() -> None:
    system = System()
    system.joins("gate")
    system.joins("w1", "first")
    sends = system.submits(outputs=("text",))
    assert [(send.peer, type(send.frame)) for send in sends] == [("w1", Place), ("gate", Placed)]


def test_an_ended_request_is_a_tombstone_until_every_holder_has_closed() -> None:
    system = full_system()
    system.submits()
    system.says("gate", Done(REQUEST))
    assert system.got("w1", Close) and system.got("w2", Close)
    assert system.phase is Phase.COMPLETED
    system.says("w1", Closed(REQUEST))
    assert not system.got("gate", Closed)
    system.says("w2", Closed(REQUEST))
    assert len(system.got("gate", Closed)) == 1
    assert system.phase is None


def test_a_dead_worker_fails_its_requests_at_once_and_names_the_stage() -> None:
    system = full_system()
    system.submits()
    system.dies("w2")
    (failed,) = system.got("gate", Failed)
    assert (failed.code, failed.stage, failed.status) == ("stage_lost", "second", 503)
    assert system.got("w1", Close) and system.got("w1", Lost) and system.got("gate", Lost)
    system.says("w1", Closed(REQUEST))
    assert system.phase is None


def test_a_restarted_worker_is_used_without_restarting_anything_else() -> None:
    system = full_system()
    system.dies("w2")
    system.submits()
    assert system.phase is Phase.QUEUED
    system.joins("w2b", "second")
    assert system.phase is Phase.RUNNING
    assert system.got("w2b", Place)


def test_least_loaded_replica() -> None:
    system = full_system(slots=4)
    system.joins("w1b", "first")
    for number in range(4):
        system.submits(f"{number:032}", outputs=("text",))
    assert len(system.got("w1", Place)) == len(system.got("w1b", Place)) == 2


def test_queue_is_bounded_and_in_order() -> None:
    system = full_system(slots=1, queue=2)
    ids = [f"{number:032}" for number in range(5)]
    for request_id in ids:
        system.submits(request_id)
    rejected = system.got("gate", Rejected)
    assert [frame.request_id for frame in rejected] == ids[3:]
    assert {(frame.status, frame.code) for frame in rejected} == {(429, "queue_full")}
    assert all(frame.retry_after_s > 0 for frame in rejected)
    for done, next_up in itertools.pairwise(ids[:3]):
        system.says("gate", Done(done))
        for worker in ("w1", "w2"):
            system.says(worker, Closed(done))
        assert system.got("w1", Place)[-1].request_id == next_up


def test_a_text_request_passes_one_that_waits_for_another_stage() -> None:
    system = full_system(slots=1)
    system.joins("w1b", "first")
    system.submits("a" * 32)
    system.submits("b" * 32)
    assert system.machine.requests["b" * 32].phase is Phase.QUEUED
    system.submits("c" * 32, outputs=("text",))
    assert system.machine.requests["c" * 32].phase is Phase.RUNNING


def test_missing_stage_is_refused_soon_and_a_loading_one_is_waited_for() -> None:
    system = System()
    system.joins("gate")
    system.joins("w1", "first")
    system.submits()
    system.passes(MISSING_S + 0.5)
    (rejected,) = system.got("gate", Rejected)
    assert (rejected.status, rejected.code) == (503, "stage_missing")
    assert "second" in rejected.message
    system.joins("w2", "second", ready=False)
    system.submits("b" * 32)
    system.passes(MISSING_S + 3)
    assert system.machine.requests["b" * 32].phase is Phase.QUEUED
    system.passes(6)
    assert system.got("gate", Rejected)[-1].code == "queue_timeout"
    assert system.got("gate", Rejected)[-1].status == 504


def test_total_deadline() -> None:
    system = full_system()
    system.submits()
    system.passes(61)
    (failed,) = system.got("gate", Failed)
    assert (failed.code, failed.status) == ("deadline_exceeded", 504)
    assert system.got("w1", Close)


def test_silence_is_death_and_the_dead_is_fenced() -> None:
    system = full_system()
    system.submits()
    for _ in range(24):
        system.now += 0.25
        for peer in ("gate", "w1"):
            system.says(peer, Beat())
        system.take(system.machine.tick(system.now))
    assert system.got("gate", Failed)[0].code == "stage_lost"
    system.says("w2", Beat())
    assert isinstance(system.mail["w2"][-1], Fenced)
    system.joins("w2", "second")
    assert isinstance(system.mail["w2"][-1], Fenced)
    assert "w2" not in system.machine.fleet.peers


def test_a_scheduler_that_was_stopped_reads_before_it_judges() -> None:
    system = full_system()
    system.take(system.machine.tick(system.now))
    system.now += 30
    system.take(system.machine.tick(system.now))
    assert set(system.machine.fleet.peers) == {"gate", "w1", "w2"}


def test_busy_without_progress_is_hung() -> None:
    system = full_system()
    system.submits()
    for step in range(48):
        system.now += 0.25
        for peer in ("gate", "w2"):
            system.says(peer, Beat())
        system.says("w1", Beat(busy=True, steps=min(step, 4)))
        system.take(system.machine.tick(system.now))
    (failed,) = system.got("gate", Failed)
    assert failed.stage == "first" and "hung" in failed.message


def test_wrong_digest_version_and_stage_are_refused_with_the_reason() -> None:
    system = System()
    for change, word in (({"digest": "0"}, "digest"), ({"version": 99}, "version"), ({"stage": "third"}, "third")):
        hello = Hello(PROTOCOL_VERSION, "worker", "w9", "w9", stage="first", slots=1)
        hello.digest = system.pipeline.stages["first"].digest("first")
        for key, value in change.items():
            setattr(hello, key, value)
        (send,) = system.says("w9", hello)
        assert isinstance(send.frame, Refused) and word in send.frame.reason


def test_a_new_scheduler_closes_what_nobody_owns() -> None:
    system = System()
    hello = Hello(PROTOCOL_VERSION, "worker", "w1", "w1", stage="first", slots=1)
    hello.digest = system.pipeline.stages["first"].digest("first")
    hello.holding = [Holding("x" * 32, "first", 1)]
    welcome, close = system.says("w1", hello)
    assert isinstance(welcome.frame, Welcome)
    assert isinstance(close.frame, Close) and close.frame.request_id == "x" * 32


def test_goodbye_of_an_idle_worker_is_no_death() -> None:
    system = full_system()
    system.says("w2", Bye("stop"))
    assert system.machine.counts["deaths"] == 0
    assert isinstance(system.mail["w2"][-1], Bye)
    assert system.got("gate", Lost)


def test_unknown_peers_are_asked_for_a_hello() -> None:
    system = System()
    (send,) = system.says("stranger", Beat())
    assert send.frame.code == "unknown_peer"


STEPS = {
    "submit": lambda system: system.submits(),
    "done": lambda system: system.says("gate", Done(REQUEST)),
    "cancel": lambda system: system.says("gate", Cancel(REQUEST, "gone")),
    "fail w1": lambda system: system.says("w1", Failed(REQUEST, "bad", "bad", "first", attempt=1)),
    "fail w2": lambda system: system.says("w2", Failed(REQUEST, "bad", "bad", "second", attempt=1)),
    "closed w1": lambda system: system.says("w1", Closed(REQUEST)),
    "closed w2": lambda system: system.says("w2", Closed(REQUEST)),
    "death w1": lambda system: system.dies("w1"),
    "death w2": lambda system: system.dies("w2"),
    "death gate": lambda system: system.dies("gate"),
    "time": lambda system: system.passes(61),
}
ANSWERS = (Close, Closed, Failed, Rejected)


def interleavings() -> Iterator[tuple[str, ...]]:
    """Every order of up to five different events, once with the submission first and once with it anywhere."""
    others = [name for name in STEPS if name != "submit"]
    for length in range(5):
        for order in itertools.permutations(others, length):
            yield ("submit", *order)
            if order:
                yield (order[0], "submit", *order[1:])


def test_every_interleaving_ends_with_one_answer_and_nothing_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "omni.scheduler")
    count = 0
    for order in interleavings():
        count += 1
        system = full_system()
        for name in order:
            STEPS[name](system)
        # Whatever happened, the workers that live close what they were told to, and the gateway's time runs out.
        system.passes(75)
        for worker in ("w1", "w2"):
            for frame in system.got(worker, Close):
                system.says(worker, Closed(frame.request_id))
        assert not system.machine.requests, (order, system.machine.requests)
        assert not system.machine.queue, order
        assert all(not peer.placed for peer in system.machine.fleet.peers.values()), order
        gate = system.mail["gate"]
        terminal = [frame for frame in gate if isinstance(frame, Failed | Rejected | Closed)]
        if "death gate" not in order:
            kinds = [type(frame) for frame in terminal if frame.request_id == REQUEST]
            assert kinds.count(Failed) + kinds.count(Rejected) <= 1, (order, kinds)
            assert kinds, order
        counts = system.machine.counts
        assert counts["admitted"] <= 1, order
        assert sum(counts[phase.value] for phase in ENDED) <= 1, order
    assert count > 10_000


@pytest.mark.parametrize("phase", sorted(ENDED, key=lambda phase: phase.value))
def test_late_events_of_an_ended_request_change_nothing(phase: Phase) -> None:
    system = full_system()
    end = {
        Phase.COMPLETED: Done(REQUEST),
        Phase.CANCELLED: Cancel(REQUEST),
        Phase.FAILED: None,
        Phase.REJECTED: None,
    }[phase]
    if phase is Phase.REJECTED:
        system.dies("w2")
    system.submits()
    if phase is Phase.FAILED:
        system.says("w1", Failed(REQUEST, "bad", "bad", "first", attempt=1))
    elif end is not None:
        system.says("gate", end)
    else:
        system.passes(4)
    before = {peer: len(frames) for peer, frames in system.mail.items()}
    for frame in (Done(REQUEST), Cancel(REQUEST)):
        system.says("gate", frame)
    system.says("w1", Failed(REQUEST, "bad", "bad", "first", attempt=1))
    after = {peer: len(frames) for peer, frames in system.mail.items()}
    if phase is Phase.REJECTED:
        # It is gone already: the gateway hears that nothing is left, each time that it asks.
        assert after["gate"] == before["gate"] + 2
    else:
        assert after == before
        assert system.phase is phase
