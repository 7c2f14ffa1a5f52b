"""The scheduler's machine without sockets: every interleaving of a small system, and the rules one by one."""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator

import pytest

from omni_common.frames import (
    PROTOCOL_VERSION,
    Beat,
    Bye,
    Cancel,
    Close,
    Closed,
    Decision,
    Done,
    Drain,
    Failed,
    Fenced,
    Fleet,
    Held,
    Hello,
    Holding,
    Look,
    Lost,
    Place,
    Placed,
    Plain,
    Recover,
    Refused,
    Rejected,
    Relink,
    State,
    Submit,
    Text,
)
from omni_common.pipeline import Limits, Pipeline, Stage, Task
from omni_scheduler.events import Send
from omni_scheduler.machine import MISSING_S, Scheduler
from omni_scheduler.request import ENDED, Phase

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
        #: How many `recover` each has answered.
        self.answered: Counter[str] = Counter()

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

    def answers(self, peer: str, position: int = 0) -> None:
        """The peer answers every `recover` that it has not answered, in order."""
        for frame in self.got(peer, Recover)[self.answered[peer] :]:
            self.answered[peer] += 1
            self.says(peer, Held(frame.request_id, frame.edge, frame.incarnation, decisions(position)))

    def got(self, peer: str, kind: type[Plain]) -> list[Plain]:
        return [frame for frame in self.mail.get(peer, []) if isinstance(frame, kind)]

    @property
    def phase(self) -> Phase | None:
        request = self.machine.requests.get(REQUEST)
        return request.phase if request else None


def decisions(count: int) -> list[Decision]:
    return [Decision(number, number + 1, False, Text(f"{number}")) for number in range(count)]


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


def test_a_dead_stage_goes_on_elsewhere_from_what_its_consumers_have() -> None:
    system = full_system(slots=4)
    system.joins("w1b", "first")
    system.submits()
    dead, other = ("w1", "w1b") if system.got("w1", Place) else ("w1b", "w1")
    system.dies(dead)
    assert system.phase is Phase.RECOVERING
    assert [frame.edge for frame in system.got("w2", Recover)] == ["first>second"]
    assert [frame.edge for frame in system.got("gate", Recover)] == ["first>client"]
    system.answers("w2", position=3)
    assert not system.got(other, Place), "the gateway may have more"
    system.answers("gate", position=5)
    (place,) = system.got(other, Place)
    assert place.stage == "first" and [decision.end for decision in place.resume] == [1, 2, 3, 4, 5]
    assert [link.incarnation for link in place.sinks] == ["w2", "gate"]
    assert [link.incarnation for link in place.sources] == ["gate"]
    assert [frame.link.edge for frame in system.got("w2", Relink)] == ["first>second"]
    assert [frame.link.edge for frame in system.got("gate", Relink)] == ["client>first", "first>client"]
    assert {frame.link.incarnation for frame in system.got("gate", Relink)} == {other}
    assert system.phase is Phase.RUNNING
    assert not system.got("gate", Failed)
    assert system.machine.counts["replays"] == 1


def test_a_dead_stage_waits_for_its_restart() -> None:
    system = full_system()
    system.submits()
    system.dies("w2")
    system.answers("gate")
    system.joins("w2b", "second", ready=False)
    system.passes(20)
    assert system.phase is Phase.RECOVERING
    system.says("w2b", State("ready"))
    assert system.got("w2b", Place) and system.phase is Phase.RUNNING


def test_without_any_replica_the_request_fails_with_the_stage_and_the_reason() -> None:
    system = full_system()
    system.submits()
    system.dies("w2")
    system.answers("gate")
    system.passes(12)
    (failed,) = system.got("gate", Failed)
    assert (failed.code, failed.stage, failed.status) == ("stage_lost", "second", 503)
    assert "its process ended" in failed.message
    system.says("w1", Closed(REQUEST))
    assert system.phase is None


def test_producer_and_consumer_together() -> None:
    system = full_system()
    system.submits()
    system.dies("w2")
    system.dies("w1")
    system.answers("gate", position=4)
    system.joins("w1b", "first")
    assert system.phase is Phase.RECOVERING
    system.joins("w2b", "second")
    assert system.phase is Phase.RUNNING
    (first,), (second,) = system.got("w1b", Place), system.got("w2b", Place)
    assert [link.incarnation for link in first.sinks] == ["w2b", "gate"]
    assert [link.incarnation for link in second.sources] == ["w1b"]
    assert len(first.resume) == 4, "what was heard is not decided anew"


def test_a_consumer_that_dies_before_it_answers_is_not_waited_for() -> None:
    system = full_system()
    system.submits()
    system.dies("w1")
    system.answers("gate", position=2)
    system.joins("w1b", "first")
    assert system.phase is Phase.RECOVERING
    system.dies("w2")
    system.answers("gate", position=2)
    system.joins("w2b", "second")
    assert system.phase is Phase.RUNNING
    assert len(system.got("w1b", Place)[0].resume) == 2


def test_death_of_the_replica_that_was_to_go_on() -> None:
    system = full_system()
    system.submits()
    for name, position in (("w1", 2), ("w1b", 4), ("w1c", 6)):
        if name != "w1":
            system.joins(name, "first")
        system.dies(name)
        for peer in ("w2", "gate"):
            system.answers(peer, position)
    system.joins("w1d", "first")
    assert len(system.got("w1d", Place)[0].resume) == 6
    assert system.phase is Phase.RUNNING


def test_poison_is_run_alone_and_then_fails_alone() -> None:
    system = full_system(slots=4)
    system.submits()
    system.submits("b" * 32, outputs=("text",))
    for number in range(3):
        name = "w1" if not number else f"w1-{number}"
        if number:
            system.joins(name, "first")
            placed = [frame.request_id for frame in system.got(name, Place)]
            assert len(placed) == 1, "a suspect shares no replica"
        victim = system.machine.fleet.peers[name].placed & {REQUEST}
        system.dies(name)
        for peer in ("w2", "gate"):
            for frame in system.got(peer, Recover):
                known = decisions(0 if frame.request_id == REQUEST else number + 1)
                system.says(peer, Held(frame.request_id, frame.edge, frame.incarnation, known))
        if not victim and number:
            break
    codes = {frame.code for frame in system.got("gate", Failed)}
    assert codes <= {"poison_request"}


def test_a_request_that_kills_three_times_without_progress_fails_and_the_stage_lives() -> None:
    system = full_system()
    system.submits(outputs=("text",))
    for name in ("w1", "w1b", "w1c"):
        if name != "w1":
            system.joins(name, "first")
            assert system.phase is Phase.RUNNING
        system.dies(name)
        system.answers("gate", position=0)
    (failed,) = system.got("gate", Failed)
    assert failed.code == "poison_request" and failed.stage == "first"
    system.joins("w1d", "first")
    assert not system.got("w1d", Place)


def test_drained_goodbye_hands_its_requests_on() -> None:
    system = full_system()
    system.joins("w2b", "second")
    system.submits()
    holder = "w2" if system.got("w2", Place) else "w2b"
    other = "w2b" if holder == "w2" else "w2"
    system.says(holder, Bye("drain time is over"))
    system.answers("gate")
    assert system.got(other, Place) and system.phase is Phase.RUNNING
    assert system.machine.counts["deaths"] == 0


def test_who_drains_is_told_when_nothing_follows() -> None:
    system = full_system()
    system.says("w2", State("draining"))
    assert system.got("w2", Drain)
    system.submits()
    assert not system.got("w2", Place)


def test_a_goodbye_makes_nobody_a_suspect() -> None:
    """A request that came to a worker which was leaving is placed like any other."""
    system = full_system()
    system.submits()
    for name in ("w2b", "w2c", "w2d", "w2e"):
        holder = next(peer.incarnation for peer in system.machine.fleet.of_stage("second"))
        system.joins(name, "second")
        system.says(holder, Bye("drain time is over"))
        system.answers("gate", position=0)
        assert system.phase is Phase.RUNNING and not system.machine.fleet.peers[name].alone


def restarted(system: System, holding: dict[str, str]) -> System:
    """A new scheduler to which workers come with what they hold: worker -> stage."""
    fresh = System()
    fresh.take(fresh.machine.tick(fresh.now))
    for worker, stage in holding.items():
        hello = Hello(PROTOCOL_VERSION, "worker", worker, worker, f"ipc://{worker}", stage=stage, slots=1)
        hello.digest = fresh.pipeline.stages[stage].digest(stage)
        hello.holding = [Holding(REQUEST, stage, 3)]
        fresh.says(worker, hello)
        fresh.says(worker, State("ready"))
    return fresh


def resubmit(system: System) -> None:
    system.joins("gate")
    submit = Submit(REQUEST, "two", "chat", ["text"], ["text", "audio"], seed=1, queue_s=10.0, total_s=60.0)
    submit.live = True
    system.says("gate", submit)


@pytest.mark.parametrize("gateway_first", [True, False])
def test_a_scheduler_that_comes_back_empty_learns_what_runs(gateway_first: bool) -> None:
    system = restarted(full_system(), {} if gateway_first else {"w1": "first", "w2": "second"})
    resubmit(system)
    if gateway_first:
        assert system.phase is Phase.RECOVERING
        for worker, stage in (("w1", "first"), ("w2", "second")):
            hello = Hello(PROTOCOL_VERSION, "worker", worker, worker, f"ipc://{worker}", stage=stage, slots=1)
            hello.digest = system.pipeline.stages[stage].digest(stage)
            hello.holding = [Holding(REQUEST, stage, 3)]
            system.says(worker, hello)
            system.says(worker, State("ready"))
    assert system.phase is Phase.RUNNING
    assert not any(system.got(peer, kind) for peer in ("w1", "w2", "gate") for kind in (Place, Close, Failed))
    # The old scheduler may have died between its words: everybody is told again who the other ends are.
    assert {(frame.link.edge, frame.link.incarnation) for frame in system.got("gate", Relink)} == {
        ("client>first", "w1"),
        ("first>client", "w1"),
        ("second>client", "w2"),
    }
    system.passes(9)
    system.says("gate", Done(REQUEST))
    for worker in ("w1", "w2"):
        assert system.got(worker, Close)
        system.says(worker, Closed(REQUEST))
    assert system.phase is None and len(system.got("gate", Closed)) == 1


def test_what_nobody_claims_after_a_restart_is_placed_again() -> None:
    system = restarted(full_system(), {"w1": "first"})
    resubmit(system)
    system.joins("w2b", "second")
    system.passes(4)
    assert not system.got("w2b", Place), "its worker may still come"
    system.passes(2)
    system.answers("gate", position=7)
    (place,) = system.got("w2b", Place)
    assert place.attempt == 4 and [link.incarnation for link in place.sources] == ["w1"]
    assert system.got("w1", Relink)[-1].link.incarnation == "w2b"
    assert system.phase is Phase.RUNNING


def test_what_nobody_owns_after_a_restart_is_closed() -> None:
    system = restarted(full_system(), {"w1": "first"})
    system.passes(4)
    assert not system.got("w1", Close)
    system.passes(2)
    assert system.got("w1", Close)


def test_a_cancel_that_the_old_scheduler_never_read_is_not_lost() -> None:
    system = restarted(full_system(), {"w1": "first"})
    system.joins("gate")
    system.says("gate", Cancel(REQUEST))
    assert system.got("w1", Close) and system.got("gate", Closed)


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
    assert system.phase is Phase.RECOVERING
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
    assert system.phase is Phase.RECOVERING
    assert isinstance(system.mail["w1"][-1], Fenced) and "hung" in system.mail["w1"][-1].reason


def test_wrong_digest_version_and_stage_are_refused_with_the_reason() -> None:
    system = System()
    for change, word in (({"digest": "0"}, "digest"), ({"version": 99}, "version"), ({"stage": "third"}, "third")):
        hello = Hello(PROTOCOL_VERSION, "worker", "w9", "w9", stage="first", slots=1)
        hello.digest = system.pipeline.stages["first"].digest("first")
        for key, value in change.items():
            setattr(hello, key, value)
        (send,) = system.says("w9", hello)
        assert isinstance(send.frame, Refused) and word in send.frame.reason


def test_goodbye_of_an_idle_worker_is_no_death() -> None:
    system = full_system()
    system.says("w2", Bye("stop"))
    assert system.machine.counts["deaths"] == 0
    assert isinstance(system.mail["w2"][-1], Bye)
    assert system.got("gate", Lost)


def test_a_health_check_may_look_without_a_hello() -> None:
    system = full_system()
    system.submits()
    (send,) = system.says("health check", Look())
    assert isinstance(send.frame, Fleet) and send.peer == "health check"
    assert send.frame.running == 1 and len(send.frame.replicas) == 2
    assert system.machine.changed, "gateways are still to hear of it"


def test_unknown_peers_are_asked_for_a_hello() -> None:
    system = System()
    (send,) = system.says("stranger", Beat())
    assert send.frame.code == "unknown_peer"


STEPS = {
    "submit": lambda system: system.submits(),
    "done": lambda system: system.says("gate", Done(REQUEST)),
    "cancel": lambda system: system.says("gate", Cancel(REQUEST, "gone")),
    "fail w1": lambda system: system.says("w1", Failed(REQUEST, "bad", "bad", "first", attempt=1)),
    "closed w2": lambda system: system.says("w2", Closed(REQUEST)),
    "death w1": lambda system: system.dies("w1"),
    "death w2": lambda system: system.dies("w2"),
    "death gate": lambda system: system.dies("gate"),
    "w1 again": lambda system: system.joins("w1b", "first"),
    "w2 again": lambda system: system.joins("w2b", "second"),
    "held w2": lambda system: system.answers("w2", 2),
    "held gate": lambda system: system.answers("gate", 3),
    "time": lambda system: system.passes(61),
}


def interleavings() -> Iterator[tuple[str, ...]]:
    """Every order of up to four different events after the submission, and the submission anywhere among three."""
    others = [name for name in STEPS if name != "submit"]
    for length in range(5):
        for order in itertools.permutations(others, length):
            yield ("submit", *order)
            if 0 < length < 4:
                for place in range(1, length + 1):
                    yield (*order[:place], "submit", *order[place:])


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
        for worker in ("w1", "w2", "w1b", "w2b"):
            for frame in system.got(worker, Close):
                system.says(worker, Closed(frame.request_id))
        assert not system.machine.requests, (order, system.machine.requests)
        assert not system.machine.queue and not system.machine.recovering, order
        assert all(not peer.placed for peer in system.machine.fleet.peers.values()), order
        terminal = [frame for frame in system.mail["gate"] if isinstance(frame, Failed | Rejected | Closed)]
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
        system.passes(12)
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
