"""Two nodes in one process over real sockets: edges, tensors by all three ways, releases, the end of a peer."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from omni_common.edges import WINDOW_CHUNKS
from omni_common.frames import ArenaTensor, Chunk, Grant, Link, Recover, Release, Relink, Tensor, Text
from omni_common.ids import new_incarnation
from omni_common.node import Delivery, Node
from omni_common.run_dir import RunDir
from omni_common.sockets import Outbox, new_context
from omni_common.tensor_port import RETAINED

ARENA = 4 << 20
#: The opening that attempt 1 begins with.
FIRST = (1 << 16) + 1


class Pair:
    """A producer and a consumer joined by the edge `a>b` of request `r`."""

    def __init__(self, run: RunDir, bind: str = "") -> None:
        self.context = new_context()
        self.got: list[Delivery] = []
        self.gaps: list[str] = []
        self.room: list[str] = []
        self.a = Node(self.context, run, new_incarnation(), ARENA, lambda d: None, self.room.append, self.gap)
        self.b = Node(self.context, run, new_incarnation(), ARENA, self.got.append, lambda r: None, self.gap, bind)

    def gap(self, request_id: str, why: str) -> None:
        self.gaps.append(why)

    async def start(self) -> None:
        await self.a.start()
        await self.b.start()

    def open(self, request_id: str = "r", consumer: bool = True) -> None:
        self.a.open(request_id, 1, [], [Link("a>b", "b", self.b.incarnation, self.b.address)])
        if consumer:
            self.open_consumer(request_id)

    def open_consumer(self, request_id: str = "r") -> None:
        self.b.open(request_id, 1, [Link("a>b", "a", self.a.incarnation, self.a.address)], [])

    def emit(self, start: int, last: bool = False, request_id: str = "r", **arrays: np.ndarray) -> None:
        tensors = self.a.publish(request_id, arrays, 1)
        assert tensors is not None
        self.a.emit(request_id, ["a>b"], start, start + 1, last, Text(f"{start}"), tensors)

    def take(self) -> Delivery:
        """Like a consumer: use the first delivery up."""
        delivery = self.got.pop(0)
        self.b.used(delivery.chunk.request_id, delivery.chunk.edge, delivery.nbytes)
        return delivery

    async def close(self) -> None:
        self.got.clear()
        await self.a.close()
        await self.b.close()
        # Also the sockets of a test that failed: they would hold the end up for ever.
        self.context.destroy(linger=0)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(RunDir(tmp_path))
    await pair.start()
    yield pair
    await pair.close()
    assert list(tmp_path.iterdir()) == []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_small_and_large_tensors_arrive_and_slots_come_back(pair: Pair) -> None:
    pair.open()
    small, large = np.arange(10, dtype=np.int64), np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    pair.emit(0, small=small, large=large)
    pair.emit(1, last=True)
    await until(lambda: len(pair.got) == 2)
    delivery = pair.take()
    assert isinstance(delivery.chunk.tensors["large"], ArenaTensor)
    np.testing.assert_array_equal(delivery.arrays["small"], small)
    np.testing.assert_array_equal(delivery.arrays["large"], large)
    assert not delivery.arrays["large"].flags.writeable
    view = delivery.arrays["large"][3:5]
    del delivery
    gc.collect()
    await asyncio.sleep(0.02)
    assert pair.a.arena.held_by(pair.b.incarnation) > 0, "a slice still reads the slot"
    del view
    await until(lambda: pair.a.arena.held_by(pair.b.incarnation) == 0)
    assert pair.a.arena.held_by(RETAINED) > 0, "the request may need it again"
    pair.a.close_request("r")
    assert pair.a.arena.used == 0


async def test_between_hosts_tensors_travel_as_parts(tmp_path: Path) -> None:
    pair = Pair(RunDir(tmp_path), bind="tcp://127.0.0.1:*")
    await pair.start()
    pair.open()
    large = np.arange(100_000, dtype=np.float32)
    pair.emit(0, last=True, large=large, small=np.ones(3, np.int8))
    await until(lambda: len(pair.got) == 1)
    np.testing.assert_array_equal(pair.got[0].arrays["large"], large)
    np.testing.assert_array_equal(pair.got[0].arrays["small"], np.ones(3, np.int8))
    assert set(pair.a.sent) == {"part"}
    pair.a.close_request("r")
    assert pair.a.arena.used == 0
    await pair.close()


async def test_a_grant_before_the_placement_is_kept(pair: Pair) -> None:
    pair.open_consumer()
    await asyncio.sleep(0.02)
    pair.open(consumer=False)
    pair.emit(0, last=True)
    await until(lambda: len(pair.got) == 1)


async def test_credit_bounds_what_is_on_the_way_and_a_taken_chunk_gives_it_back(pair: Pair) -> None:
    pair.open()
    total = WINDOW_CHUNKS * 3
    for start in range(total):
        pair.emit(start, last=start == total - 1)
    await until(lambda: len(pair.got) == WINDOW_CHUNKS)
    await asyncio.sleep(0.02)
    assert len(pair.got) == WINDOW_CHUNKS
    assert pair.a.backlog("r") == total - WINDOW_CHUNKS
    seen = []
    while len(seen) < total:
        await until(lambda: bool(pair.got))
        seen.append(pair.take().chunk.start)
    assert seen == list(range(total))
    assert pair.room


async def test_a_request_that_waits_does_not_hold_another(pair: Pair) -> None:
    pair.open("r")
    for start in range(WINDOW_CHUNKS + 5):
        pair.emit(start)
    pair.open("q")
    pair.emit(0, last=True, request_id="q")
    await until(lambda: any(delivery.chunk.request_id == "q" for delivery in pair.got))


async def test_chunks_of_an_unknown_request_are_dropped_and_released(pair: Pair) -> None:
    pair.open()
    pair.b.close_request("r")
    await asyncio.sleep(0.02)
    pair.emit(0, last=True, large=np.zeros(100_000, np.float32))
    await until(lambda: pair.b.stale_chunks == 1)
    await until(lambda: pair.a.arena.held_by(pair.b.incarnation) == 0)
    assert pair.got == []


async def test_closing_with_chunks_that_wait_for_credit_frees_them(pair: Pair) -> None:
    pair.open(consumer=False)
    pair.emit(0, large=np.zeros(100_000, np.float32))
    assert pair.a.arena.held_by(RETAINED) > 0
    pair.a.close_request("r")
    assert pair.a.arena.used == 0
    pair.a.close_request("r")


async def test_a_full_arena_gives_up_what_only_a_replay_would_want(pair: Pair) -> None:
    pair.open()
    big = np.zeros(ARENA // 2 // 4 - 1000, np.float32)
    pair.emit(0, big=big)
    pair.emit(1, big=big)
    assert pair.a.publish("r", {"small": np.ones(3), "big": big}, 1) is None, "the request has its share"
    assert pair.a.evict() == 0, "nothing of it is acknowledged"
    for start in range(2, 7):
        await until(lambda: bool(pair.got))
        pair.take()
        gc.collect()
        published: list[dict[str, Tensor]] = []

        def publish(published: list[dict[str, Tensor]] = published) -> bool:
            tensors = pair.a.publish("r", {"big": big}, 1)
            if tensors is None:
                pair.a.evict()
            else:
                published.append(tensors)
            return bool(published)

        await until(publish)
        pair.a.emit("r", ["a>b"], start, start + 1, False, None, published[0])
    assert pair.a.evicted > 0


async def test_a_missing_chunk_is_sent_again(pair: Pair) -> None:
    """B053: a gap is found by the next chunk, a lost tail by what the producer says it has sent."""
    pair.open()
    pair.emit(0)
    await until(lambda: len(pair.got) == 1)
    outbox = pair.a._outboxes[pair.b.incarnation]
    lost: list[object] = []
    send = outbox.send
    for drop, start in ((True, 1), (False, 2), (False, 3), (True, 4)):
        outbox.send = lost.append if drop else send  # type: ignore[method-assign]
        pair.emit(start, last=start == 4)
        outbox.send = send  # type: ignore[method-assign]
        await asyncio.sleep(0.01)
    assert len(lost) == 2
    await until(lambda: len(pair.got) == 5)
    assert [delivery.chunk.start for delivery in pair.got] == [0, 1, 2, 3, 4]
    assert pair.b.resends >= 1 and pair.got[-1].chunk.last
    assert not pair.gaps


async def test_a_doubled_chunk_is_cut(pair: Pair) -> None:
    pair.open()
    pair.emit(0)
    outbox = Outbox(pair.context, pair.b.address)
    outbox.send(Chunk("r", "a>b", pair.a.incarnation, 1, FIRST, 0, 0, 1))
    pair.emit(1, last=True)
    await until(lambda: len(pair.got) == 2 and pair.b.duplicates == 1)
    assert [delivery.chunk.start for delivery in pair.got] == [0, 1]
    outbox.close()


async def test_a_request_that_nobody_reads_leaves_room_for_others(pair: Pair) -> None:
    """A consumer that takes nothing holds its share of the arena, not all of it."""
    pair.open("slow")
    pair.open("quick")
    chunk = np.zeros(200_000, np.uint8)
    start = 0
    while (tensors := pair.a.publish("slow", {"x": chunk}, 1)) is not None:
        pair.a.emit("slow", ["a>b"], start, start + 1, False, None, tensors)
        start += 1
    assert start > 1
    for start in range(60):
        published: list[dict[str, Tensor]] = []

        def publish(published: list[dict[str, Tensor]] = published) -> bool:
            pair.a.evict()
            tensors = pair.a.publish("quick", {"x": chunk}, 1)
            published += [] if tensors is None else [tensors]
            return bool(published)

        await until(publish)
        pair.a.emit("quick", ["a>b"], start, start + 1, False, None, published[0])
        await until(lambda: any(delivery.chunk.request_id == "quick" for delivery in pair.got))
        mine = next(delivery for delivery in pair.got if delivery.chunk.request_id == "quick")
        pair.got.remove(mine)
        pair.b.used("quick", "a>b", mine.nbytes)
        del mine


async def test_a_forged_tensor_reference_is_refused(pair: Pair) -> None:
    pair.open()
    pair.emit(0, large=np.zeros(100_000, np.float32))
    await until(lambda: len(pair.got) == 1)
    outbox = Outbox(pair.context, pair.b.address)
    forged = ArenaTensor("float32", [1 << 40], pair.a.incarnation, 0, 4 << 40, 1)
    outbox.send(Chunk("r", "a>b", pair.a.incarnation, 1, FIRST, 1, 1, 2, tensors={"x": forged}))
    await until(lambda: bool(pair.gaps))
    foreign = ArenaTensor("float32", [1], pair.b.incarnation, 0, 4, 1)
    outbox.send(Chunk("r", "a>b", pair.a.incarnation, 1, FIRST, 2, 2, 3, tensors={"x": foreign}))
    await until(lambda: len(pair.gaps) == 2)
    outbox.close()


async def test_frames_that_do_not_belong_in_a_data_inbox_are_dropped(pair: Pair) -> None:
    outbox = Outbox(pair.context, pair.a.address)
    pair.open()
    outbox.send(Grant("r", "a>b", "somebody else", 1, FIRST, 0, 1000, 1000))
    outbox.send(Grant("r", "no>edge", pair.b.incarnation, 1, FIRST, 0, 1000, 1000))
    outbox.send(Release("stranger", [(0, 1), (12345, 7), (-1, -1)]))
    pair.emit(0, last=True)
    await until(lambda: len(pair.got) == 1)
    outbox.close()


async def test_a_lost_peer_is_not_written_to_and_its_slots_come_back(pair: Pair) -> None:
    pair.open()
    pair.emit(0, large=np.zeros(100_000, np.float32))
    await until(lambda: len(pair.got) == 1)
    assert pair.a.arena.used > 0
    await pair.b.close()
    await asyncio.sleep(0.02)
    assert pair.a.arena.held_by(pair.b.incarnation) > 0, "a view could still be read"
    pair.got.clear()
    await until(lambda: pair.a.arena.held_by(pair.b.incarnation) == 0)
    pair.a.lost(pair.b.incarnation)
    pair.emit(1, large=np.zeros(100_000, np.float32))
    pair.a.close_request("r")
    pair.a.lost(pair.b.incarnation)
    assert pair.a.arena.used == 0


async def test_views_that_outlive_the_node_do_no_harm(tmp_path: Path) -> None:
    pair = Pair(RunDir(tmp_path))
    await pair.start()
    pair.open()
    pair.emit(0, large=np.full(100_000, 7, np.float32))
    await until(lambda: len(pair.got) == 1)
    view = pair.got.pop().arrays["large"]
    await pair.close()
    assert (view == 7).all()
    del view
    gc.collect()


async def test_a_consumer_placed_anew_reads_everything_again(pair: Pair) -> None:
    pair.open()
    for start in range(3):
        pair.emit(start, last=start == 2, large=np.full(100_000, start, np.float32))
    await until(lambda: len(pair.got) == 3)
    got: list[Delivery] = []
    reborn = Node(pair.context, pair.a._run, new_incarnation(), ARENA, got.append, lambda r: None, lambda r, why: None)
    await reborn.start()
    reborn.open("r", 2, [Link("a>b", "a", pair.a.incarnation, pair.a.address)], [])
    pair.a.relink(Relink("r", Link("a>b", "b", reborn.incarnation, reborn.address)))
    await until(lambda: len(got) == 3)
    assert [int(delivery.arrays["large"][0]) for delivery in got] == [0, 1, 2]
    got.clear()
    await reborn.close()


async def test_a_producer_placed_anew_is_asked_for_the_rest(pair: Pair) -> None:
    pair.open()
    for start in range(3):
        pair.emit(start)
    await until(lambda: len(pair.got) == 3)
    held = pair.b.recover(Recover("r", "a>b", pair.a.incarnation))
    assert held is not None
    assert [decision.body for decision in held.decisions] == [Text("0"), Text("1"), Text("2")]
    pair.emit(3)
    await until(lambda: pair.b.stale_chunks == 1)
    assert pair.b.recover(Recover("r", "a>b", "0" * 16)) is None, "not its producer"
    reborn = Node(
        pair.context, pair.a._run, new_incarnation(), ARENA, lambda d: None, lambda r: None, lambda r, why: None
    )
    await reborn.start()
    pair.b.relink(Relink("r", Link("a>b", "a", reborn.incarnation, reborn.address)))
    reborn.open("r", 2, [], [Link("a>b", "b", pair.b.incarnation, pair.b.address)], held.decisions)
    reborn.emit("r", ["a>b"], 3, 4, True, Text("3"), {})
    await until(lambda: len(pair.got) == 4)
    assert [delivery.chunk.start for delivery in pair.got] == [0, 1, 2, 3]
    await reborn.close()


async def test_nothing_is_lent_to_the_dead(pair: Pair) -> None:
    """Between the word of a death and the new link a slot lent to the dead would never come back."""
    pair.open()
    pair.emit(0)
    await until(lambda: len(pair.got) == 1)
    await pair.b.close()
    pair.a.lost(pair.b.incarnation)
    pair.emit(1, last=True, large=np.zeros(100_000, np.float32))
    assert pair.a.arena.held_by(pair.b.incarnation) == 0
    pair.a.close_request("r")
    assert pair.a.arena.used == 0


async def test_a_relink_tells_that_there_is_room(pair: Pair) -> None:
    """The new consumer's grant may come before the link; then the link is what lets a blocked request go on."""
    pair.open()
    total = WINDOW_CHUNKS + 20
    for start in range(total):
        pair.emit(start, last=start == total - 1)
    await until(lambda: len(pair.got) == WINDOW_CHUNKS)
    assert pair.a.backlog("r") == 20
    pair.got.clear()
    reborn = Node(
        pair.context, pair.a._run, new_incarnation(), ARENA, pair.got.append, lambda r: None, lambda r, why: None
    )
    await reborn.start()
    reborn.open("r", 2, [Link("a>b", "a", pair.a.incarnation, pair.a.address)], [])
    await until(lambda: bool(pair.a._early))
    pair.room.clear()
    pair.a.relink(Relink("r", Link("a>b", "b", reborn.incarnation, reborn.address)))
    assert pair.room == ["r"]
    await until(lambda: len(pair.got) == WINDOW_CHUNKS)
    pair.got.clear()
    await reborn.close()
