"""The scheduler's machine without sockets: every interleaving of a small system, and the rules one by one."""

import itertools
import logging
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
    Fleet,
    Hello,
    Look,
    Lost,
    Place,
    Placed,
    Refused,
    Rejected,
)
from omni_scheduler.machine import MISSING_S
from omni_scheduler.request import ENDED, Phase
from unit.scheduler.system import REQUEST, System, full_system


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
