"""The engine thread with engines that the tests hold in their hands."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Set

import numpy as np
import pytest

from omni_common.errors import OmniError
from omni_common.frames import Tensor, Text
from omni_common.params import NoParams
from omni_worker.engine import Arrays, Failure, Job, LoadContext, Output, Piece
from omni_worker.engine_thread import (
    Add,
    Broken,
    Drop,
    Dropped,
    EngineThread,
    Loaded,
    Published,
    Push,
    Result,
    Used,
)
from omni_worker.whole_inputs import PIECE_BYTES, WholeInputs

#: Bytes of one request's inputs that may wait for their end.
LIMIT = 1 << 20


class HandEngine:
    """Emits what the test puts into `ready`; records what it was told."""

    in_flight = False
    resumes = False
    rebuilds = False

    def __init__(self) -> None:
        self.ready: list[Output | Failure] = []
        self.told: list[tuple[str, str]] = []
        self.pieces: list[Piece] = []
        self.seen_blocked: Set[str] = set()
        self.broken: Exception | None = None
        self.load_error: Exception | None = None
        self.refuse: Exception | None = None
        self.threads: set[int] = set()
        self.closed = False

    @property
    def busy(self) -> bool:
        return bool(self.ready)

    def load(self, context: LoadContext) -> None:
        self.threads.add(threading.get_ident())
        if self.load_error:
            raise self.load_error

    def add(self, job: Job) -> None:
        self.threads.add(threading.get_ident())
        self.told.append(("add", job.request_id))
        if self.refuse:
            raise self.refuse

    def push(self, request_id: str, piece: Piece) -> None:
        self.told.append(("push", request_id))
        self.pieces.append(piece)

    def cancel(self, request_id: str) -> None:
        self.told.append(("cancel", request_id))
        self.ready = [output for output in self.ready if output.request_id != request_id]

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        self.threads.add(threading.get_ident())
        self.seen_blocked = set(blocked)
        if self.broken:
            raise self.broken
        out = [output for output in self.ready if output.request_id not in blocked]
        self.ready = [output for output in self.ready if output.request_id in blocked]
        return out

    def close(self) -> None:
        self.closed = True


class Bench:
    """The thread with a scripted arena: `room` says how many arrays it takes."""

    def __init__(self) -> None:
        self.engine = HandEngine()
        self.results: list[Result] = []
        self.room = 1000
        self.too_large = False
        self.starved = 0
        self.inputs = WholeInputs(frozenset({"whole"}), LIMIT)
        self.thread = EngineThread(self.engine, self.publish, self.results.extend, self.starve, self.inputs)

    def starve(self) -> None:
        self.starved += 1

    def publish(self, request_id: str, arrays: Arrays, sinks: int) -> dict[str, Tensor] | None:
        if arrays and self.too_large:
            raise OmniError("never fits", code="tensor_too_large")
        if arrays and self.room <= 0:
            return None
        self.room -= len(arrays)
        return {}

    def start(self) -> None:
        context = LoadContext("", {}, "", 4, 1, lambda what, fraction: None, self.thread.wake)
        self.thread.start(context)

    def add(self, request_id: str, sinks: tuple[str, ...] = ("client",)) -> None:
        self.thread.send(Add(Job(request_id, 1, NoParams(), ("client",), sinks)))

    def emit(self, *outputs: Output | Failure) -> None:
        self.engine.ready.extend(outputs)
        self.thread.wake()

    def of(self, kind: type[Result]) -> list[Result]:
        return [result for result in self.results if isinstance(result, kind)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.start()
    await until(lambda: bool(bench.of(Loaded)))
    yield bench
    await bench.thread.stop(5.0)
    assert bench.engine.closed
    assert len(bench.engine.threads) == 1 and threading.get_ident() not in bench.engine.threads


async def test_input_reaches_the_engine_and_credit_comes_back(bench: Bench) -> None:
    bench.add("r")
    bench.thread.send(Push("r", "client>x", Piece("client", 0, 1, True, Text("hi")), 7))
    await until(lambda: bool(bench.of(Used)))
    assert bench.engine.told == [("add", "r"), ("push", "r")]
    assert bench.of(Used) == [Used("r", "client>x", 7)]


async def test_input_after_the_end_gives_its_credit_back_and_disturbs_nobody(bench: Bench) -> None:
    bench.add("r")
    bench.emit(Output("r", 0, 1, last=True))
    await until(lambda: bool(bench.of(Published)))
    bench.thread.send(Push("r", "client>x", Piece("client", 0, 1, True, None), 7))
    await until(lambda: bool(bench.of(Used)))
    assert ("push", "r") not in bench.engine.told


def whole(number: int, last: bool = False, **arrays: np.ndarray) -> Push:
    return Push("r", "whole>x", Piece("whole", number, number + 1, last, Text(str(number)), arrays), 100)


async def test_an_input_that_does_not_stream_comes_when_it_is_complete_and_blocks_nobody(bench: Bench) -> None:
    """Credit comes back at once, and nothing of the producer's memory is kept."""
    lent = np.arange(4)
    bench.add("r")
    for number in range(3):
        bench.thread.send(whole(number, x=lent))
    bench.thread.send(Push("r", "client>x", Piece("client", 0, 1, True, None), 0))
    await until(lambda: len(bench.of(Used)) == 4)
    assert [piece.source for piece in bench.engine.pieces] == ["client"]
    lent[:] = 9
    bench.thread.send(whole(3, last=True))
    await until(lambda: len(bench.engine.pieces) == 5)
    held = bench.engine.pieces[1:]
    assert [(piece.start, piece.last) for piece in held] == [(0, False), (1, False), (2, False), (3, True)]
    assert all(np.array_equal(piece.arrays["x"], np.arange(4)) for piece in held[:3])


async def test_an_input_that_does_not_stream_has_a_limit(bench: Bench) -> None:
    bench.add("r")
    pieces = LIMIT // (PIECE_BYTES + 100) + 1
    for number in range(pieces - 1):
        bench.thread.send(whole(number))
    await until(lambda: len(bench.of(Used)) == pieces - 1)
    assert not bench.of(Failure)
    bench.thread.send(whole(pieces - 1))
    bench.thread.send(whole(pieces, last=True))
    await until(lambda: len(bench.of(Used)) == pieces + 1)
    (failure,) = bench.of(Failure)
    assert failure.code == "input_too_large" and "the output of whole takes more than 1 MiB" in failure.message
    assert not bench.engine.pieces and not bench.thread._inputs._kept


async def test_a_request_that_is_dropped_or_begins_anew_has_no_inputs_of_before(bench: Bench) -> None:
    for again in (Drop("r"), Add(Job("r", 1, NoParams(), ("whole",), ("client",)))):
        bench.add("r")
        bench.thread.send(whole(0))
        bench.thread.send(again)
        bench.add("r")
        bench.thread.send(whole(1, last=True))
    await until(lambda: len(bench.engine.pieces) == 2)
    assert [piece.start for piece in bench.engine.pieces] == [1, 1]


async def test_a_full_arena_delays_only_its_request_and_keeps_the_order(bench: Bench) -> None:
    bench.room = 0
    bench.add("r")
    bench.add("q")
    big = {"x": np.zeros(4)}
    bench.emit(Output("r", 0, 1, arrays=big), Output("r", 1, 2), Output("q", 0, 1))
    await until(lambda: len(bench.of(Published)) == 1)
    assert bench.of(Published)[0].output.request_id == "q"
    bench.emit(Output("r", 2, 3), Output("q", 1, 2, last=True))
    await until(lambda: len(bench.of(Published)) == 2)
    assert "r" in bench.engine.seen_blocked and bench.starved
    bench.room = 10
    bench.thread.wake()
    await until(lambda: len(bench.of(Published)) == 5)
    assert [p.output.start for p in bench.of(Published) if p.output.request_id == "r"] == [0, 1, 2]


async def test_dropping_a_request_that_waits_for_room(bench: Bench) -> None:
    bench.room = 0
    bench.add("r")
    bench.emit(Output("r", 0, 1, arrays={"x": np.zeros(4)}))
    bench.thread.send(Drop("r"))
    await until(lambda: bool(bench.of(Dropped)))
    bench.room = 10
    bench.thread.wake()
    bench.thread.send(Drop("r"))
    await until(lambda: len(bench.of(Dropped)) == 2)
    assert not bench.of(Published)


async def test_an_array_that_never_fits_fails_its_request(bench: Bench) -> None:
    bench.too_large = True
    bench.add("r")
    bench.emit(Output("r", 0, 1, arrays={"x": np.zeros(4)}))
    await until(lambda: bool(bench.of(Failure)))
    assert bench.of(Failure)[0].code == "tensor_too_large"
    assert ("cancel", "r") in bench.engine.told


async def test_a_refused_job_fails_with_the_field(bench: Bench) -> None:
    bench.engine.refuse = OmniError("no such voice", status=400, code="invalid_value", param="voice")
    bench.add("r")
    await until(lambda: bool(bench.of(Failure)))
    assert bench.of(Failure)[0].status == 400 and bench.of(Failure)[0].param == "voice"


async def test_each_sink_has_its_own_end(bench: Bench) -> None:
    bench.add("r", ("a", "b"))
    bench.emit(Output("r", 0, 1, last=True, sinks=("a",)))
    await until(lambda: len(bench.of(Published)) == 1)
    assert bench.thread.running == 1
    bench.emit(Output("r", 0, 1, last=True))
    await until(lambda: len(bench.of(Published)) == 2)
    assert bench.of(Published)[1].sinks == ("b",)
    assert bench.thread.running == 0


async def test_a_blocked_request_is_left_out_and_nobody_spins_on_it(bench: Bench) -> None:
    bench.thread.blocked = frozenset({"r"})
    bench.add("r")
    bench.emit(Output("r", 0, 1, last=True))
    await until(lambda: bench.thread.steps > 3)
    assert not bench.of(Published) and not bench.thread.busy
    bench.thread.blocked = frozenset()
    bench.thread.wake()
    await until(lambda: bool(bench.of(Published)))


async def test_an_idle_thread_sleeps(bench: Bench) -> None:
    steps = bench.thread.steps
    await asyncio.sleep(0.05)
    assert bench.thread.steps <= steps + 1


async def test_a_broken_step_is_told_with_its_reason() -> None:
    bench = Bench()
    bench.start()
    await until(lambda: bool(bench.of(Loaded)))
    bench.engine.broken = ValueError("nan everywhere")
    bench.thread.wake()
    await until(lambda: bool(bench.of(Broken)))
    assert bench.of(Broken)[0].reason == "ValueError: nan everywhere"
    await bench.thread.stop(5.0)
    assert bench.engine.closed


async def test_a_failed_load_is_told_with_its_reason() -> None:
    bench = Bench()
    bench.engine.load_error = OmniError("weights are missing; run omni prepare")
    bench.start()
    await until(lambda: bool(bench.of(Broken)))
    assert bench.of(Broken)[0].reason == "weights are missing; run omni prepare"
    await bench.thread.stop(5.0)
