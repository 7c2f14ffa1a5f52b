from omni_supervisor.restart import GiveUp, Policy, Restart, Restarts

POLICY = Policy(first_s=0.1, max_s=1.0, stable_s=60.0, max_failed_starts=3)


def test_waits_double_up_to_the_longest() -> None:
    restarts = Restarts(POLICY)
    waits = []
    for now in range(6):
        restarts.ready(now)
        step = restarts.exited(now + 0.5)
        assert isinstance(step, Restart)
        waits.append(step.after_s)
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_stable_run_makes_the_next_restart_quick_again() -> None:
    restarts = Restarts(POLICY)
    for now in (0.0, 1.0, 2.0):
        restarts.ready(now)
        restarts.exited(now + 0.5)
    restarts.ready(10.0)
    restarts.ready(69.0)  # Seen ready again: the run is still as old as it is.
    assert restarts.exited(70.0) == Restart(0.1)


def test_a_run_just_short_of_stable_counts_on() -> None:
    restarts = Restarts(POLICY)
    restarts.ready(0.0)
    restarts.exited(1.0)
    restarts.ready(10.0)
    assert restarts.exited(69.9) == Restart(0.2)


def test_failed_starts_in_a_row_are_given_up() -> None:
    restarts = Restarts(POLICY)
    assert restarts.exited(1.0) == Restart(0.1)
    assert restarts.exited(2.0) == Restart(0.2)
    assert restarts.exited(3.0) == GiveUp(3)


def test_readiness_ends_the_row_of_failed_starts() -> None:
    restarts = Restarts(POLICY)
    restarts.exited(1.0)
    restarts.exited(2.0)
    restarts.ready(3.0)
    assert isinstance(restarts.exited(3.1), Restart)
    assert isinstance(restarts.exited(4.0), Restart)
    assert isinstance(restarts.exited(5.0), Restart)
    assert isinstance(restarts.exited(6.0), GiveUp)


def test_crashes_after_readiness_are_never_given_up() -> None:
    restarts = Restarts(POLICY)
    for now in range(2000):
        restarts.ready(now)
        assert isinstance(restarts.exited(now + 0.1), Restart)
