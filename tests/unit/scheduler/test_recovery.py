"""What the scheduler does when something dies, itself included: the rules one by one."""

import pytest

from omni_common.frames import (
    PROTOCOL_VERSION,
    Bye,
    Cancel,
    Close,
    Closed,
    Done,
    Drain,
    Failed,
    Held,
    Hello,
    Holding,
    Place,
    Recover,
    Relink,
    State,
    Submit,
)
from omni_scheduler.machine import MISSING_S
from omni_scheduler.request import Phase
from unit.scheduler.system import REQUEST, System, decisions, full_system


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


def test_an_engine_that_breaks_again_and_again_makes_its_request_a_suspect() -> None:
    """Its worker says goodbye, but in no order: the request must not wear out one replica after the other."""
    system = full_system()
    system.submits()
    for name in ("w2b", "w2c", "w2d"):
        holder = next(peer.incarnation for peer in system.machine.fleet.of_stage("second"))
        assert not system.got("gate", Failed)
        system.says(holder, State("failed", "IndexError: index out of range"))
        system.says(holder, Bye("stage second failed"))
        system.joins(name, "second")
        system.answers("gate", position=0)
    (failed,) = system.got("gate", Failed)
    assert (failed.code, failed.stage, failed.status) == ("poison_request", "second", 500)
    assert not system.got("w2d", Place)


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


def test_restarts_that_keep_dying_hold_a_request_up_for_its_time_only() -> None:
    """A worker that dies before it is ready is no hope."""
    system = full_system()
    system.submits()
    system.dies("w2")
    system.answers("gate")
    for number in range(4):
        system.joins(f"w2-{number}", "second", ready=False)
        system.passes(1)
        system.dies(f"w2-{number}")
        system.passes(3)
    (failed,) = system.got("gate", Failed)
    assert (failed.code, failed.stage) == ("stage_lost", "second")


def test_a_new_request_waits_for_a_stage_that_died_a_moment_ago() -> None:
    """Its restart may take longer to say hello than a stage that was never there is waited for."""
    system = full_system()
    system.dies("w2")
    system.submits()
    system.passes(MISSING_S + 1)
    assert system.phase is Phase.QUEUED
    system.joins("w2b", "second")
    assert system.phase is Phase.RUNNING


def test_what_was_heard_is_asked_for_again_after_a_further_death() -> None:
    """Between the gateway's first answer and the second death it may have heard more."""
    system = full_system()
    system.submits()
    system.dies("w1")
    system.answers("gate", position=1)
    system.dies("w2")
    asked = [frame.edge for frame in system.got("gate", Recover)]
    assert asked == ["first>client", "second>client", "first>client"]
    system.answers("gate", position=3)
    system.joins("w1b", "first")
    system.joins("w2b", "second")
    assert len(system.got("w1b", Place)[0].resume) == 3
