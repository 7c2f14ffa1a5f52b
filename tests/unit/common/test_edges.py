"""Credit, order and positions of one edge, without sockets."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_common.edges import InEdge, OutEdge, Pending
from omni_common.frames import Chunk, Grant, Link, Text


def ends(window_chunks: int = 4, window_bytes: int = 100) -> tuple[OutEdge, InEdge]:
    out = OutEdge("r", Link("a>b", "b", "inc-b", "ipc://b"), "inc-a", 1)
    incoming = InEdge("r", Link("a>b", "a", "inc-a", "ipc://a"), "inc-b", 1, window_chunks, window_bytes)
    return out, incoming


def pending(start: int, nbytes: int = 1, last: bool = False) -> Pending:
    return Pending(start, start + 1, last, Text("x"), {}, nbytes)


def test_nothing_leaves_before_the_grant() -> None:
    out, incoming = ends()
    out.offer(pending(0))
    assert out.take() == []
    out.grant(incoming.open())
    assert [chunk.seq for chunk, _ in out.take()] == [0]


def test_an_old_grant_that_comes_late_takes_nothing_back() -> None:
    out, incoming = ends(window_chunks=2)
    first = incoming.open()
    out.grant(Grant("r", "a>b", "inc-b", 1, 5, 10, 1000))
    out.grant(first)
    assert (out.limit_chunks, out.limit_bytes, out.acknowledged) == (10, 1000, 5)


def test_one_chunk_may_overshoot_the_bytes() -> None:
    out, incoming = ends(window_chunks=10, window_bytes=100)
    out.grant(incoming.open())
    for start in range(3):
        out.offer(pending(start, nbytes=1000))
    assert len(out.take()) == 1
    assert len(out.waiting) == 2


def test_verdicts() -> None:
    _, incoming = ends()
    incoming.open()

    def chunk(seq: int, start: int, source: str = "inc-a", last: bool = False) -> Chunk:
        return Chunk("r", "a>b", source, 1, seq, start, start + 1, last)

    assert incoming.accept(chunk(0, 0), 1) == "new"
    assert incoming.accept(chunk(0, 0), 1) == "duplicate"
    assert incoming.accept(chunk(2, 2), 1) == "gap"
    assert incoming.accept(chunk(1, 3), 1) == "gap"
    assert incoming.accept(chunk(1, 1, source="former self"), 1) == "stale"
    assert incoming.accept(chunk(1, 1, last=True), 1) == "new"
    assert incoming.accept(chunk(2, 2), 1) == "duplicate"
    assert incoming.used(1) is None, "no credit after the end"


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    window_chunks=st.integers(1, 8),
    window_bytes=st.integers(1, 120),
    choices=st.lists(st.integers(0, 3), max_size=400),
)
def test_everything_arrives_once_in_order_within_the_window(
    sizes: list[int], window_chunks: int, window_bytes: int, choices: list[int]
) -> None:
    """A producer, a wire in each direction and a consumer that works when it likes; grants may be lost but the last."""
    out, incoming = ends(window_chunks, window_bytes)
    wire: deque[tuple[Chunk, int]] = deque()
    grants: deque[Grant] = deque([incoming.open()])
    taken: deque[int] = deque()
    seen: list[int] = []
    offered = 0
    schedule = iter(choices)

    def act(choice: int) -> None:
        nonlocal offered
        if choice == 0 and offered < len(sizes):
            out.offer(pending(offered, sizes[offered], last=offered == len(sizes) - 1))
            offered += 1
        elif choice == 1 and grants:
            out.grant(grants.popleft())
        elif choice == 2 and wire:
            chunk, nbytes = wire.popleft()
            assert incoming.accept(chunk, nbytes) == "new"
            seen.append(chunk.start)
            taken.append(nbytes)
        elif choice == 3 and taken:
            grant = incoming.used(taken.popleft())
            if grant:
                grants.append(grant)
        for chunk, waiting in out.take():
            wire.append((chunk, waiting.nbytes))
        assert len(wire) + len(taken) <= window_chunks
        outstanding = sum(nbytes for _, nbytes in wire) + sum(taken)
        assert outstanding <= window_bytes + max(sizes)

    for choice in schedule:
        act(choice)
    for _ in range(4 * len(sizes)):
        for choice in range(4):
            act(choice)
    assert seen == list(range(len(sizes)))
    assert out.ended and incoming.ended
