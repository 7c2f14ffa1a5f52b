"""The worker's I/O shell: control frames and chunks in, commands to the engine thread; results out to edges and frames.

Never branches on the kind of engine.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Set
from typing import Any

from omni_common.errors import OmniError
from omni_common.frames import (
    PROTOCOL_VERSION,
    Beat,
    Close,
    Closed,
    Drain,
    Failed,
    Hello,
    Holding,
    Lost,
    Place,
    Plain,
    Recover,
    Relink,
    State,
    WorkerState,
)
from omni_common.ids import new_incarnation
from omni_common.member import Member
from omni_common.node import Delivery, Node
from omni_common.params import check_params
from omni_common.pipeline import Stage
from omni_common.run_dir import RunDir
from omni_common.service import Stop
from omni_common.sockets import new_context
from omni_worker.engine import Engine, Failure, Job, LoadContext, Piece
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
from omni_worker.whole_inputs import WholeInputs

log = logging.getLogger("omni.worker")

#: Chunks of a request that may wait for credit before the engine leaves it out of its steps.
BLOCK_AT = 8
#: Seconds that a draining worker gives its requests.
DRAIN_S = 30.0
#: Longest wait for the scheduler to say that it has seen so.
ANSWER_S = 1.0
#: Seconds between two reports of a start-up that goes on.
LOADING_REPORT_S = 0.2


class Worker:
    """One replica of one stage. `held`: inputs that it takes when they are complete."""

    def __init__(
        self,
        run: RunDir,
        name: str,
        stage_name: str,
        stage: Stage,
        engine: Engine,
        models: str,
        stop: Stop,
        held: Set[str] = frozenset(),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._stage_name = stage_name
        self._stage = stage
        self._models = models
        self._stop = stop
        self._incarnation = new_incarnation()
        self._state = State(state="loading", detail="starting")
        self._attempts: dict[str, int] = {}
        #: What was told to the scheduler and not closed yet: another one is told again.
        self._failures: dict[str, Failed] = {}
        self._blocked: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        #: The scheduler knows that this worker leaves, and places nothing more here.
        self._nothing_follows = asyncio.Event()
        self._reported = 0.0
        self._context = new_context()
        self._node = Node(
            self._context, run, self._incarnation, stage.arena_mib << 20, self._on_piece, self._on_room, self._on_gap
        )
        inputs = WholeInputs(held, stage.hold_mib << 20)
        self._thread = EngineThread(engine, self._node.publish, self._on_results, self._node.evict, inputs)
        self._node.arena.on_free.append(self._thread.wake)
        self._member = Member(
            self._context,
            run,
            self._incarnation,
            self._hello,
            self._beat,
            self._on_frame,
            self._on_welcome,
            self._on_end,
        )

    async def serve(self) -> None:
        """Load, take part until asked to stop, drain, leave."""
        await self._node.start()
        self._member.start()
        self._thread.start(
            LoadContext(
                model=self._stage.model,
                options=self._stage.options,
                models=self._models,
                slots=self._stage.slots,
                threads=self._stage.threads,
                progress=self._on_progress,
                wake=self._thread.wake,
            )
        )
        try:
            await self._stop.wait()
            if self._stop.status == 0:
                await self._drain()
        finally:
            await self._member.close(self._stop.reason)
            await self._thread.stop(timeout_s=5.0)
            await self._node.close()
            self._context.term()

    async def _drain(self) -> None:
        self._set_state("draining", "finishing what runs")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._nothing_follows.wait(), ANSWER_S)
        try:
            await asyncio.wait_for(self._empty.wait(), DRAIN_S)
        except TimeoutError:
            log.warning("%d requests did not end within %.0f s", len(self._attempts), DRAIN_S)

    # ------------------------------------------------------------------------------------------------- membership

    def _hello(self) -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            role="worker",
            incarnation=self._incarnation,
            name=self._name,
            inbox=self._node.address,
            pid=os.getpid(),
            host=socket.gethostname(),
            stage=self._stage_name,
            digest=self._stage.digest(self._stage_name),
            slots=self._stage.slots,
            holding=[Holding(request_id, self._stage_name, attempt) for request_id, attempt in self._attempts.items()],
        )

    def _beat(self) -> Beat:
        thread, arena = self._thread, self._node.arena
        return Beat(
            state=self._state.state,
            steps=thread.steps,
            busy=thread.busy,
            running=thread.running,
            arena_used=arena.used,
            arena_total=arena.total,
            sent=dict(self._node.sent),
            produced=thread.produced,
            step_s=round(thread.step_s, 6),
            evicted=self._node.evicted,
            duplicates=self._node.duplicates,
            resends=self._node.resends,
        )

    def _on_welcome(self, again: bool) -> None:
        self._member.send(self._state)
        if again:
            for failed in self._failures.values():
                self._member.send(failed)

    def _on_end(self, reason: str) -> None:
        self._stop.request(f"told to end: {reason}", status=3)

    def _set_state(self, state: WorkerState, detail: str = "", progress: float = 0.0) -> None:
        self._state = State(state, detail, progress)
        if self._member.registered:
            self._member.send(self._state)

    def _on_progress(self, what: str, fraction: float) -> None:
        """From the engine thread."""
        now = time.monotonic()
        if now - self._reported > LOADING_REPORT_S or fraction >= 1.0:
            self._reported = now
            self._loop.call_soon_threadsafe(self._set_state, "loading", what, fraction)

    # ------------------------------------------------------------------------------------------------ from the bus

    def _on_frame(self, frame: Plain) -> None:
        handler = _FRAMES.get(type(frame))
        if handler is None:
            log.warning("a %s is not for a worker", type(frame).__name__)
        else:
            handler(self, frame)

    def _place(self, place: Place) -> None:
        request_id = place.request_id
        self._attempts[request_id] = place.attempt
        self._empty.clear()
        try:
            params = check_params(self._stage.engine, place.params, f"params.{self._stage_name}")
        except OmniError as error:
            self._fail(Failure(request_id, error.message, error.code, error.status, error.param))
            return
        resume = tuple(place.resume) if self._thread.resumes else ()
        handed_on = () if self._thread.rebuilds else resume
        # An end that was decided needs no engine, only somebody who still has it.
        if not (handed_on and handed_on[-1].last):
            self._thread.send(
                Add(
                    Job(
                        request_id=request_id,
                        seed=place.seed,
                        params=params,
                        sources=tuple(link.stage for link in place.sources),
                        sinks=tuple(link.stage for link in place.sinks),
                        pipeline=place.pipeline,
                        resume=resume,
                    )
                )
            )
        self._node.open(request_id, place.attempt, place.sources, place.sinks, handed_on)

    def _recover(self, recover: Recover) -> None:
        held = self._node.recover(recover)
        if held is not None:
            self._member.send(held)

    def _relink(self, relink: Relink) -> None:
        self._node.relink(relink)

    def _close(self, close: Close) -> None:
        self._node.close_request(close.request_id)
        self._thread.send(Drop(close.request_id))

    def _no_more(self, drain: Drain) -> None:
        self._nothing_follows.set()

    def _lost(self, lost: Lost) -> None:
        self._node.lost(lost.incarnation)

    def _on_piece(self, delivery: Delivery) -> None:
        chunk = delivery.chunk
        piece = Piece(delivery.stage, chunk.start, chunk.end, chunk.last, chunk.body, delivery.arrays)
        self._thread.send(Push(chunk.request_id, chunk.edge, piece, delivery.nbytes))

    def _on_room(self, request_id: str) -> None:
        if request_id in self._blocked and self._node.backlog(request_id) < BLOCK_AT:
            self._set_blocked(request_id, False)
        elif self._thread.starving:
            self._thread.wake()

    def _on_gap(self, request_id: str, why: str) -> None:
        self._fail(Failure(request_id, why, "chunk_lost"))

    def _set_blocked(self, request_id: str, blocked: bool) -> None:
        if blocked:
            self._blocked.add(request_id)
        else:
            self._blocked.discard(request_id)
        self._thread.blocked = frozenset(self._blocked)
        if not blocked:
            self._thread.wake()

    # ------------------------------------------------------------------------------------------- from the engine

    def _on_results(self, results: list[Result]) -> None:
        for result in results:
            _RESULTS[type(result)](self, result)

    def _published(self, result: Published) -> None:
        output = result.output
        request_id = output.request_id
        edges = self._node.sink_edges(request_id, result.sinks)
        if len(edges) < len(result.sinks):
            # The request was closed meanwhile; what was held for its sinks goes back.
            self._node.unpublish(result.tensors, len(result.sinks) - len(edges))
        self._node.emit(request_id, edges, output.start, output.end, output.last, output.body, result.tensors)
        if request_id not in self._blocked and self._node.backlog(request_id) >= BLOCK_AT:
            self._set_blocked(request_id, True)

    def _fail(self, failure: Failure) -> None:
        request_id = failure.request_id
        attempt = self._attempts.get(request_id)
        if attempt is None:
            return
        failed = Failed(
            request_id,
            failure.code,
            failure.message,
            self._stage_name,
            failure.status,
            failure.param,
            attempt,
        )
        self._failures[request_id] = failed
        self._member.send(failed)

    def _used(self, used: Used) -> None:
        self._node.used(used.request_id, used.edge, used.nbytes)

    def _dropped(self, dropped: Dropped) -> None:
        self._attempts.pop(dropped.request_id, None)
        self._failures.pop(dropped.request_id, None)
        if dropped.request_id in self._blocked:
            self._set_blocked(dropped.request_id, False)
        self._member.send(Closed(dropped.request_id))
        if not self._attempts:
            self._empty.set()

    def _loaded(self, loaded: Loaded) -> None:
        if not self._stop.requested:
            self._set_state("ready")
            log.info("%s is ready", self._name)

    def _broken(self, broken: Broken) -> None:
        self._set_state("failed", broken.reason)
        self._stop.request(f"stage {self._stage_name} failed: {broken.reason}", status=1)


_FRAMES: dict[type[Plain], Callable[[Worker, Any], None]] = {
    Place: Worker._place,
    Close: Worker._close,
    Recover: Worker._recover,
    Relink: Worker._relink,
    Lost: Worker._lost,
    Drain: Worker._no_more,
}
_RESULTS: dict[type[Result], Callable[[Worker, Any], None]] = {
    Published: Worker._published,
    Failure: Worker._fail,
    Used: Worker._used,
    Dropped: Worker._dropped,
    Loaded: Worker._loaded,
    Broken: Worker._broken,
}
