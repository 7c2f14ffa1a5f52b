"""What a process knows of decisions that were made further up."""

from omni_common.decisions import Decided
from omni_common.frames import Decision, Text


def words(*starts: int, last: bool = False) -> list[Decision]:
    return [Decision(start, start + 1, last and start == starts[-1], Text(f"w{start}")) for start in starts]


def test_what_goes_on_is_added_and_what_comes_again_is_not() -> None:
    decided = Decided()
    decided.learn("a", words(0, 1))
    decided.learn("a", words(0, 1, 2))
    decided.learn("b", words(0))
    assert decided.of("a") == words(0, 1, 2) and decided.of("b") == words(0) and decided.of("c") == []


def test_a_gap_is_never_known() -> None:
    decided = Decided()
    decided.learn("a", words(0, 2, 3))
    assert decided.of("a") == words(0)
    decided.learn("a", words(1, 2))
    assert decided.of("a") == words(0, 1, 2)


def test_nothing_follows_the_last_even_if_it_is_empty() -> None:
    decided = Decided()
    decided.learn("a", [*words(0), Decision(1, 1, True)])
    decided.learn("a", [Decision(1, 1, True), *words(1)])
    assert decided.of("a") == [*words(0), Decision(1, 1, True)]


def test_each_edge_carries_what_it_has_not_carried() -> None:
    decided = Decided()
    decided.learn("a", words(0))
    fresh, told = decided.since(0)
    assert (fresh, told) == ({"a": words(0)}, 1)
    decided.learn("b", words(0))
    decided.learn("a", words(1))
    fresh, told = decided.since(told)
    assert (fresh, told) == ({"a": words(1), "b": words(0)}, 3)
    assert decided.since(told) == ({}, 3)
    assert decided.since(0) == ({"a": words(0, 1), "b": words(0)}, 3)
