"""`hop`: a tensor from one process to another, over the bus and in the ways that others use.

One hop is the whole cycle: from the producer's array until the consumer has read it and the producer knows that. The
bus's side is the Node as gateways and workers use it, with its loop, its credits and releases, and with an arena that
fills: what a request was sent is retained for a replay, so the next tensor goes into memory that the caches forgot.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tools.bench.hop_consumer import BACK, THERE, link
from tools.bench.processes import helper
from tools.bench.report import Effort, Goal, Result, about, ratios
from tools.bench.segments import Segments

from omni_common import wire
from omni_common.frames import ArenaTensor, Chunk, Text
from omni_common.ids import new_incarnation, new_request_id
from omni_common.node import Delivery, Node
from omni_common.run_dir import RunDir
from omni_common.sockets import new_context

SIZES = {"4 KiB": 4 << 10, "256 KiB": 256 << 10, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
#: By size: DESIGN.md section 10.
OVER_SEGMENT = {"4 MiB": Goal(">=", 8)}
OVER_BARE = {"4 MiB": Goal("<=", 1.2)}
#: As a stage has it by default.
ARENA_BYTES = 64 << 20
#: The sides take turns after so many hops, or so many bytes, so often within a round.
TIMES = 40
BYTES = 160 << 20
TURNS = 5
WARM_UP = 5

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Bus:
    """The producing side over the bus."""

    def __init__(self, run: RunDir, me: str, consumer: str) -> None:
        self._context = new_context()
        self._node = Node(self._context, run, me, ARENA_BYTES, self._on_piece, lambda _: None, self._on_gap)
        self._sources = [link(run, BACK, "consumer", consumer)]
        self._sinks = [link(run, THERE, "consumer", consumer)]
        self._back = asyncio.Event()
        self._ended = 0.0
        self._request = 0
        self._sent = 0

    async def start(self) -> None:
        await self._node.start()
        self._node.open("0", 1, self._sources, self._sinks)

    async def hop(self, tensor: Floats, read: bool, last: bool) -> float:
        """Seconds. The first one waits for the consumer, too. `last`: the next one begins a request."""
        self._back.clear()
        began = time.perf_counter()
        while (tensors := self._node.publish(str(self._request), {"x": tensor}, 1)) is None:
            if not self._node.evict():
                # The consumer's last release is still under way.
                await asyncio.sleep(0)
        body = Text("read") if read else None
        self._node.emit(str(self._request), [THERE], self._sent, self._sent + 1, last, body, tensors)
        self._sent += 1
        await self._back.wait()
        if last:
            await self._begin_request()
        return self._ended - began

    async def _begin_request(self) -> None:
        self._node.close_request(str(self._request))
        self._request, self._sent = self._request + 1, 0
        self._node.open(str(self._request), 1, self._sources, self._sinks)
        # The consumer's last release and first grant are no part of the next hop.
        await asyncio.sleep(0.002)

    def _on_piece(self, delivery: Delivery) -> None:
        self._ended = time.perf_counter()
        self._node.used(delivery.chunk.request_id, BACK, delivery.nbytes)
        self._back.set()

    def _on_gap(self, request_id: str, why: str) -> None:
        raise AssertionError(why)

    async def close(self) -> None:
        await self._node.close()
        self._context.term()


def chunk_bytes(incarnation: str) -> int:
    """Length of the frame that carries a reference to a tensor."""
    ref = ArenaTensor("float32", [1 << 20], incarnation, 1 << 22, 4 << 20, 1000)
    return len(wire.encode(Chunk(new_request_id(), THERE, incarnation, 1, 1, 1000, 1000, 1001, tensors={"x": ref})))


def seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


async def measure(effort: Effort) -> Result:
    me, consumer = new_incarnation(), new_incarnation()
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        run = RunDir(Path(folder))
        bus = Bus(run, me, consumer)
        context = new_context()
        address = f"ipc://{folder}/segments"
        segments = Segments(context, address)
        try:
            await bus.start()
            with (
                helper("tools.bench.hop_consumer", folder, me, consumer),
                helper("tools.bench.segments", address),
            ):
                return await _compare(effort, bus, segments, chunk_bytes(me))
        finally:
            segments.close()
            context.term()
            await bus.close()


async def _compare(effort: Effort, bus: Bus, segments: Segments, control_bytes: int) -> Result:
    result = Result(about(__doc__))
    for read in (True, False):
        how = "read" if read else "not read"
        for size, nbytes in SIZES.items():
            tensor = np.random.default_rng(1).random(nbytes // 4, np.float32)
            sides = await _rounds(effort, bus, segments, tensor, read, control_bytes)
            if read:
                for way, took in sides.items():
                    result.add(f"{size}, {way}", "us", [value * 1e6 for value in took])
            over_bus = {way: ratios(took, sides["bus"]) for way, took in sides.items()}
            over_bare = ratios(sides["bus"], sides["bare"])
            result.add(f"{size}, {how}: segment / bus", "x", over_bus["segment"], OVER_SEGMENT.get(size))
            result.add(f"{size}, {how}: inline / bus", "x", over_bus["inline"])
            result.add(f"{size}, {how}: bus / bare", "x", over_bare, OVER_BARE.get(size))
    result.notes = [
        "read: the consumer takes the maximum of the float32 values, in every way alike; in place over the bus",
        "bare: one memcpy into memory that both processes have mapped and used before, one blocking ZeroMQ round trip "
        f"of a frame as long as a chunk ({control_bytes} bytes), and the read, in place, by the other process",
        "up to 16 KiB travel inside the frame over the bus, more through the arena",
        f"each round: the median of up to {TURNS * effort.times(TIMES)} hops; the sides take turns within it",
    ]
    return result


async def _rounds(
    effort: Effort, bus: Bus, segments: Segments, tensor: Floats, read: bool, control_bytes: int
) -> dict[str, list[float]]:
    """Median seconds of one hop, by way and round."""
    blocking: dict[str, Callable[[], None]] = {
        "segment": lambda: segments.segment(tensor, read),
        "inline": lambda: segments.inline(tensor, read),
        "bare": lambda: segments.warm(tensor, read, control_bytes),
    }
    sides: dict[str, list[float]] = {way: [] for way in ("bus", *blocking)}
    times = effort.times(min(TIMES, BYTES // tensor.nbytes))
    for _ in range(effort.rounds):
        hops: dict[str, list[float]] = {way: [] for way in sides}
        for _ in range(TURNS):
            for number in range(WARM_UP + times):
                hop = await bus.hop(tensor, read, last=number == WARM_UP + times - 1)
                hops["bus"] += [hop] if number >= WARM_UP else []
            for way, act in blocking.items():
                hops[way] += [seconds(act) for _ in range(WARM_UP + times)][WARM_UP:]
        for way, took in hops.items():
            sides[way].append(statistics.median(took))
    return sides
