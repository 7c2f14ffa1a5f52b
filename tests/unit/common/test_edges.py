"""Credit, order and positions of one edge, without sockets."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_common.edges import InEdge, OutEdge, Retained
from omni_common.frames import ArenaTensor, Chunk, Grant, Link, Text


def ends(window_chunks: int = 4, window_bytes: int = 100) -> tuple[OutEdge, InEdge]:
    out = OutEdge("r", Link("a>b", "b", "inc-b", "ipc://b"), "inc-a", 1)
    incoming = InEdge("r", Link("a>b", "a", "inc-a", "ipc://a"), "inc-b", 1, window_chunks, window_bytes)
    return out, incoming


def chunk_of(start: int, nbytes: int = 1, last: bool = False) -> Retained:
    return Retained(start, start + 1, last, Text("x"), {}, nbytes)


def test_nothing_leaves_before_the_grant() -> None:
    out, incoming = ends()
    out.offer(chunk_of(0))
    assert out.take() == []
    out.grant(incoming.open())
    assert [chunk.seq for chunk in out.take()] == [0]


def test_an_old_grant_that_comes_late_takes_nothing_back() -> None:
    out, incoming = ends(window_chunks=2)
    first = incoming.open()
    out.grant(Grant("r", "a>b", "inc-b", 1, (1 << 16) + 1, 5, 10, 1000))
    out.grant(first)
    assert (out.limit_chunks, out.limit_bytes, out.acknowledged) == (10, 1000, 5)


def test_one_chunk_may_overshoot_the_bytes() -> None:
    out, incoming = ends(window_chunks=10, window_bytes=100)
    out.grant(incoming.open())
    for start in range(3):
        out.offer(chunk_of(start, nbytes=1000))
    assert len(out.take()) == 1
    assert out.waiting == 2


def test_verdicts() -> None:
    _, incoming = ends()
    incoming.open()

    def numbered(seq: int, start: int, source: str = "inc-a", last: bool = False) -> Chunk:
        return Chunk("r", "a>b", source, 1, (1 << 16) + 1, seq, start, start + 1, last)

    assert incoming.accept(numbered(0, 0)) == "new"
    assert incoming.accept(numbered(0, 0)) == "duplicate"
    assert incoming.accept(numbered(2, 2)) == "gap"
    assert incoming.accept(numbered(1, 3)) == "gap"
    assert incoming.accept(numbered(1, 1, source="former self")) == "stale"
    assert incoming.accept(numbered(1, 1, last=True)) == "new"
    assert incoming.accept(numbered(2, 2)) == "duplicate"
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
            out.offer(chunk_of(offered, sizes[offered], last=offered == len(sizes) - 1))
            offered += 1
        elif choice == 1 and grants:
            out.grant(grants.popleft())
        elif choice == 2 and wire:
            chunk, nbytes = wire.popleft()
            assert incoming.accept(chunk) == "new"
            seen.append(chunk.start)
            taken.append(nbytes)
        elif choice == 3 and taken:
            grant = incoming.used(taken.popleft())
            if grant:
                grants.append(grant)
        for chunk in out.take():
            wire.append((chunk, sizes[chunk.start]))
        assert len(wire) + len(taken) <= window_chunks
        outstanding = sum(nbytes for _, nbytes in wire) + sum(taken)
        assert outstanding <= window_bytes + max(sizes)

    for choice in schedule:
        act(choice)
    for _ in range(4 * len(sizes)):
        for choice in range(4):
            act(choice)
    assert seen == list(range(len(sizes)))
    assert not out.waiting and incoming.ended


def test_a_producer_placed_anew_sends_only_what_is_missing() -> None:
    out, incoming = ends(window_chunks=10)
    out.grant(incoming.open())
    for start in range(5):
        out.offer(chunk_of(start, last=start == 4))
    for chunk in out.take()[:3]:
        assert incoming.accept(chunk) == "new"
        incoming.used(1)
    incoming.fence()
    assert incoming.accept(Chunk("r", "a>b", "inc-a", 1, (1 << 16) + 1, 3, 3, 4)) == "stale"
    reborn = OutEdge("r", out.link, "inc-a2", 2)
    grant = incoming.relink(Link("a>b", "a", "inc-a2", "ipc://a2"))
    assert grant.position == 3
    assert reborn.grant(grant)
    for start in range(5):
        reborn.offer(chunk_of(start, last=start == 4))
        for chunk in reborn.take():
            assert incoming.accept(chunk) == "new"
    assert incoming.position == 5 and incoming.ended
    late = OutEdge("r", out.link, "inc-a3", 3, [chunk_of(start, last=start == 4) for start in range(5)])
    assert late.grant(incoming.relink(Link("a>b", "a", "inc-a3", "ipc://a3")))
    assert late.take() == [] and not late.waiting, "it has everything"


def test_a_consumer_placed_anew_gets_everything_again() -> None:
    out, incoming = ends(window_chunks=10)
    out.grant(incoming.open())
    for start in range(5):
        out.offer(chunk_of(start, last=start == 4))
    assert len(out.take()) == 5
    link = Link("a>b", "b", "inc-b2", "ipc://b2")
    out.relink(link)
    assert out.take() == []
    reborn = InEdge("r", incoming.link, "inc-b2", 2)
    assert out.grant(reborn.open())
    assert [reborn.accept(chunk) for chunk in out.take()] == ["new"] * 5


def test_what_was_evicted_is_told_when_it_is_needed_and_only_then() -> None:
    out, incoming = ends(window_chunks=10)
    out.grant(incoming.open())
    for start in range(4):
        chunk = chunk_of(start)
        chunk.tensors = {"x": ArenaTensor("int8", [1], "inc-a", 4096 * start, 1, 1)}
        out.offer(chunk)
    out.take()
    assert out.evictable() == [], "nothing is acknowledged"
    out.grant(Grant("r", "a>b", "inc-b", 1, (1 << 16) + 1, 2, 20, 1000))
    assert [chunk.start for chunk in out.evictable()] == [0, 1]
    for chunk in out.evictable():
        chunk.evicted = True
    out.relink(Link("a>b", "b", "inc-b2", "ipc://b2"))
    assert out.grant(Grant("r", "a>b", "inc-b2", 2, 1, 2, 20, 1000))
    out.relink(Link("a>b", "b", "inc-b3", "ipc://b3"))
    assert not out.grant(Grant("r", "a>b", "inc-b3", 3, 1, 1, 20, 1000))


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(1, 30),
    window=st.integers(1, 6),
    choices=st.lists(st.integers(0, 6), max_size=300),
)
def test_deaths_at_any_point_lose_and_double_nothing(total: int, window: int, choices: list[int]) -> None:
    """Producer and consumer die at any point; a new producer computes from the start, a new consumer reads again."""
    lives = 0
    out, incoming = ends(window, 1000)
    grants = deque([incoming.open()])
    wire: deque[Chunk] = deque()
    client: list[int] = []
    taken = 0
    made = 0

    def act(choice: int) -> None:
        nonlocal out, incoming, wire, grants, lives, taken, made
        if choice == 0 and made < total:
            out.offer(chunk_of(made, last=made == total - 1))
            made += 1
        elif choice == 1 and grants:
            assert out.grant(grants.popleft())
        elif choice == 2 and wire:
            chunk = wire.popleft()
            if incoming.accept(chunk) == "new":
                taken += 1
                if chunk.start >= len(client):
                    assert chunk.start == len(client)
                    client.append(chunk.start)
        elif choice == 3 and taken:
            taken -= 1
            grant = incoming.used(1)
            if grant:
                grants.append(grant)
        elif choice == 5 and lives < 20:
            lives += 1
            incoming.fence()
            link = Link("a>b", "a", f"a{lives}", "ipc://a")
            out, made = OutEdge("r", out.link, link.incarnation, lives), 0
            grants = deque()
            grants.append(incoming.relink(link))
        elif choice == 6 and lives < 20:
            lives += 1
            link = Link("a>b", "b", f"b{lives}", "ipc://b")
            incoming = InEdge("r", Link("a>b", "a", out.source, "ipc://a"), link.incarnation, lives, window, 1000)
            out.relink(link)
            wire, grants, taken = deque(), deque([incoming.open()]), 0
        for chunk in out.take():
            wire.append(chunk)

    for choice in choices:
        act(choice)
    for _ in range(4 * total):
        for choice in range(4):
            act(choice)
    assert client == list(range(total))
    assert incoming.ended
