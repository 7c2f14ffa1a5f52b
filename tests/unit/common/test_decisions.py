"""What a process knows of decisions that were made further up."""

from omni_common.decisions import Decided, Ends
from omni_common.edges import InEdge, OutEdge
from omni_common.frames import Chunk, Decision, Link, Recover, Text


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


def test_a_stage_hands_on_what_it_knows_and_tells_it_when_asked() -> None:
    """Edges a>b>c: `c` never heard of `a` but through `b`."""
    b, c = Ends(), Ends()
    incoming = b.ins["a>b"] = InEdge("r", Link("a>b", "a", "inc-a", ""), "inc-b", 1)
    out = b.outs["b>c"] = OutEdge("r", Link("b>c", "c", "inc-c", ""), "inc-b", 1)
    last = c.ins["b>c"] = InEdge("r", Link("b>c", "b", "inc-b", ""), "inc-c", 1)
    for number in range(3):
        word = words(number)[0]
        chunk = Chunk("r", "a>b", "inc-a", 1, incoming.opening, number, word.start, word.end, body=word.body)
        assert b.accept(chunk) == (incoming, "new") and b.accept(chunk)[1] == "duplicate"
    b.offer(out, 0, 1, False, Text("said"), {}, 0)
    out.grant(last.open())
    (chunk,) = out.take()
    assert c.accept(chunk) == (last, "new")
    for ends, edge in ((b, "a>b"), (c, "a>c")):
        held = ends.recover(Recover("r", edge, "inc-a"))
        assert held is not None and [decision.start for decision in held.decisions] == [0, 1, 2]
    assert incoming.fenced and not last.fenced
    assert b.recover(Recover("r", "a>b", "somebody else")) is None
