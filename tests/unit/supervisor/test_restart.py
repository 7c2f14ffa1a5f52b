from omni_supervisor.restart import GiveUp, Policy, Restart, Restarts

POLICY = Policy(first_s=0.1, max_s=1.0, proven_max_s=0.5, burst=3, burst_s=30.0, max_failed_starts=3)


def die_ready(restarts: Restarts, now: float) -> float:
    """A life that was ready ends; returns the wait before the next."""
    restarts.ready()
    restarts.ready()  # Told as often as it is seen.
    step = restarts.exited(now)
    assert isinstance(step, Restart)
    return step.after_s


def test_what_was_ready_is_started_again_at_once() -> None:
    restarts = Restarts(POLICY)
    assert [die_ready(restarts, now) for now in (1.0, 2.0, 3.0)] == [0.0, 0.0, 0.0]


def test_deaths_in_quick_succession_wait_up_to_the_longest() -> None:
    restarts = Restarts(POLICY)
    assert [die_ready(restarts, now) for now in range(8)] == [0, 0, 0, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_deaths_long_ago_do_not_count() -> None:
    restarts = Restarts(POLICY)
    assert [die_ready(restarts, now) for now in (0.0, 10.0, 20.0, 30.0)][-1] == 0.1
    assert die_ready(restarts, 61.0) == 0.0
    assert all(die_ready(restarts, 100.0 + 11.0 * n) == 0.0 for n in range(100))


def test_deaths_after_readiness_are_never_given_up() -> None:
    restarts = Restarts(POLICY)
    assert all(die_ready(restarts, 0.01 * n) <= POLICY.proven_max_s for n in range(2000))


def test_failed_starts_in_a_row_wait_and_are_given_up() -> None:
    restarts = Restarts(POLICY)
    assert restarts.exited(1.0) == Restart(0.1)
    assert restarts.exited(2.0) == Restart(0.2)
    assert restarts.exited(3.0) == GiveUp(3)


def test_waits_of_failed_starts_are_bounded() -> None:
    restarts = Restarts(Policy(first_s=0.1, max_s=1.0, max_failed_starts=10_000))
    waits = [restarts.exited(0.0) for _ in range(2000)]
    assert waits[:5] == [Restart(0.1), Restart(0.2), Restart(0.4), Restart(0.8), Restart(1.0)]
    assert waits[-1] == Restart(1.0)


def test_what_has_once_been_ready_is_not_given_up_when_its_starts_fail() -> None:
    restarts = Restarts(POLICY)
    die_ready(restarts, 0.0)
    waits = [restarts.exited(float(now)) for now in range(1, 6)]
    assert waits == [Restart(0.1), Restart(0.2), Restart(0.4), Restart(0.5), Restart(0.5)]


def test_a_failed_start_between_two_good_ones_costs_only_its_own_wait() -> None:
    restarts = Restarts(POLICY)
    restarts.exited(1.0)
    assert die_ready(restarts, 2.0) == 0.0
    assert restarts.exited(3.0) == Restart(0.1)
