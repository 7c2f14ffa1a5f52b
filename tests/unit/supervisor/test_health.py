import pytest

from omni_common.frames import Fleet, Replica, StageStatus
from omni_supervisor.health import FENCED_S, UNKNOWN_S, Announcer, Look, Watchdog

STAGES = {"talker", "code2wav"}
OWN = {10, 11}


def fleet(**missing: str) -> Fleet:
    replicas = [
        Replica(name=f"{stage}-0", incarnation=stage, stage=stage, state="ready", pid=pid)
        for stage, pid in (("talker", 10), ("code2wav", 11))
        if stage not in missing
    ]
    stages = [
        StageStatus(stage=s, ready=int(s not in missing), waiting=0, missing=missing.get(s, "")) for s in sorted(STAGES)
    ]
    return Fleet(scheduler="s", stages=stages, replicas=replicas)


def test_nothing_is_said_of_a_start_until_it_is_ready() -> None:
    announcer = Announcer(STAGES)
    assert announcer.line(Look(trouble="the gateway does not answer"), OWN) == ""
    assert announcer.line(Look(ready=True, fleet=fleet()), OWN) == "ready"
    assert announcer.line(Look(ready=True, fleet=fleet()), OWN) == ""


def test_a_start_says_what_it_waits_for_once() -> None:
    announcer = Announcer(STAGES)
    announcer.line(Look(trouble="the gateway does not answer"), OWN)
    assert announcer.line(Look(fleet=fleet(talker="loading: weights")), OWN) == "waiting for talker (loading: weights)"
    assert announcer.line(Look(fleet=fleet(talker="loading: warm-up")), OWN) == ""


def test_degraded_names_the_stage_once_and_ready_comes_again() -> None:
    announcer = Announcer(STAGES)
    announcer.line(Look(ready=True, fleet=fleet()), OWN)
    degraded = Look(fleet=fleet(talker="its process ended"))
    assert announcer.line(degraded, OWN) == "degraded: missing talker (its process ended)"
    assert announcer.line(degraded, OWN) == ""
    assert announcer.line(Look(ready=True, fleet=fleet()), OWN) == "ready"


def test_a_stage_that_the_fleet_does_not_even_list_is_missing() -> None:
    bare = Fleet(scheduler="s", replicas=fleet().replicas)
    announcer = Announcer({"code2wav"})
    announcer.line(Look(ready=True, fleet=fleet()), OWN)
    assert announcer.line(Look(ready=True, fleet=bare), OWN) == "degraded: missing code2wav"


def test_another_server_at_the_port_does_not_make_this_one_ready() -> None:
    announcer = Announcer(STAGES)
    announcer.line(Look(trouble="the gateway does not answer"), {20, 21})
    assert announcer.line(Look(ready=True, fleet=fleet()), {20, 21}) == ""
    assert announcer.line(Look(ready=True, fleet=fleet()), set()) == ""
    assert announcer.line(Look(ready=True, fleet=fleet()), {20, 11}) == "ready"


def test_without_workers_of_our_own_those_that_join_count() -> None:
    assert Announcer(STAGES).line(Look(ready=True, fleet=fleet()), None) == "ready"


def test_a_gateway_that_says_no_is_believed() -> None:
    announcer = Announcer(STAGES)
    announcer.line(Look(ready=True, fleet=fleet()), OWN)
    assert announcer.line(Look(ready=False, fleet=fleet()), OWN) == "degraded: the gateway is not ready"


def test_watchdog_leaves_a_healthy_worker_alone() -> None:
    dog = Watchdog(started=0.0, load_s=30.0)
    assert dog.verdict(29.0, scheduler="a", known=True, ready=False) == ""
    assert dog.verdict(30.0, scheduler="a", known=True, ready=True) == ""
    assert dog.verdict(1e6, scheduler="a", known=True, ready=False) == ""


def test_watchdog_ends_a_start_that_takes_too_long() -> None:
    dog = Watchdog(started=0.0, load_s=30.0)
    assert dog.verdict(31.0, scheduler="a", known=False, ready=False) == "not ready after 30 s"


@pytest.mark.parametrize(("scheduler", "patience"), [("a", FENCED_S), ("b", UNKNOWN_S)])
def test_watchdog_ends_what_is_not_listed_any_more(scheduler: str, patience: float) -> None:
    """By the scheduler that knew it soon, by a new one later."""
    dog = Watchdog(started=0.0, load_s=30.0)
    dog.verdict(1.0, scheduler="a", known=True, ready=True)
    # First look after a long silence of the gateway: the time is counted from here.
    assert dog.verdict(500.0, scheduler=scheduler, known=False, ready=False) == ""
    assert dog.verdict(500.0 + patience, scheduler=scheduler, known=False, ready=False) == ""
    assert "does not list it" in dog.verdict(500.1 + patience, scheduler=scheduler, known=False, ready=False)


def test_watchdog_forgives_who_comes_back() -> None:
    dog = Watchdog(started=0.0, load_s=30.0)
    dog.verdict(1.0, scheduler="a", known=True, ready=True)
    dog.verdict(2.0, scheduler="a", known=False, ready=False)
    dog.verdict(3.0, scheduler="a", known=True, ready=True)
    assert dog.verdict(4.0 + UNKNOWN_S, scheduler="a", known=False, ready=False) == ""
