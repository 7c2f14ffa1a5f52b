"""The real bus behind `stream.py`: submits requests to the scheduler, sends their input, hands out their output."""

import asyncio
import copy
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np

from omni_common.errors import OmniError
from omni_common.frames import (
    CLIENT,
    PROTOCOL_VERSION,
    Beat,
    Cancel,
    Closed,
    Done,
    Failed,
    Fleet,
    Hello,
    Lost,
    Placed,
    Plain,
    Recover,
    Rejected,
    Relink,
    Submit,
    Tensor,
)
from omni_common.ids import new_incarnation, new_request_id
from omni_common.member import Member
from omni_common.node import Delivery, Node
from omni_common.pipeline import Pipeline
from omni_common.run_dir import RunDir
from omni_common.service import Stop
from omni_common.sockets import new_context
from omni_gateway.stream import Arrays, Ask, Event

log = logging.getLogger("omni.gateway")

#: Seconds that a new request waits for a scheduler that is not there: a restart's time.
SCHEDULER_S = 5.0
#: Beyond the queue's own deadline the scheduler's answer must have come.
ANSWER_MARGIN_S = 5.0


class _Arrived(NamedTuple):
    """An event that the endpoint has not taken, and the credit to give back for it."""

    event: Event
    edge: str
    nbytes: int


class BusStream:
    """One request; see `stream.Stream`. `Link` feeds it, the endpoint iterates over it."""

    def __init__(self, link: "Link", request_id: str, ask: Ask) -> None:
        self.request_id = request_id
        self._link = link
        self._ask = ask
        self._since = asyncio.get_running_loop().time()
        self._modality = {stage: kind for kind, stage in ask.pipeline.tasks[ask.task].output.items()}
        self._open = set(ask.outputs)
        self._arrived: deque[_Arrived] = deque()
        self._error: OmniError | None = None
        self._news = asyncio.Event()
        #: Set when it was placed, or failed before.
        self.settled = asyncio.Event()

    def submission(self, live: bool = False) -> Submit:
        """The request as the scheduler gets it; `live`: once more, because the one that placed it is gone."""
        ask, limits = self._ask, self._ask.pipeline.limits
        elapsed = asyncio.get_running_loop().time() - self._since
        return Submit(
            request_id=self.request_id,
            pipeline=ask.pipeline.name,
            task=ask.task,
            inputs=sorted({given.modality for given in ask.given}),
            outputs=ask.outputs,
            seed=ask.seed,
            queue_s=limits.queue_s,
            total_s=limits.total_s - elapsed,
            params=ask.params,
            live=live,
        )

    def deliver(self, delivery: Delivery) -> None:
        chunk = delivery.chunk
        # Copied so that the producer's arena never waits for a slow client. Credit bounds what lies here.
        arrays = {name: np.array(view) for name, view in delivery.arrays.items()}
        event = Event(self._modality[delivery.stage], chunk.body, arrays, chunk.start, chunk.end, chunk.last)
        self._arrived.append(_Arrived(event, chunk.edge, delivery.nbytes))
        self._news.set()

    def fail(self, error: OmniError) -> None:
        """The request failed. What arrived before stays readable: it is part of the answer."""
        self._error = self._error or error
        self.settled.set()
        self._news.set()

    def check(self) -> None:
        """Raise what the request failed with, if it has."""
        if self._error:
            # A copy: the raised one refers to its frames, they to this stream, and such circles are freed late.
            raise copy.copy(self._error)

    @property
    def ready(self) -> bool:
        return bool(self._arrived)

    @property
    def failed(self) -> bool:
        return self._error is not None

    async def __aiter__(self) -> AsyncIterator[Event]:
        await self._wait_for_first()
        while self._open:
            while not self._arrived:
                self.check()
                self._news.clear()
                await self._news.wait()
            arrived = self._arrived.popleft()
            if arrived.event.last:
                self._open.discard(arrived.event.modality)
            self._link.used(self.request_id, arrived.edge, arrived.nbytes)
            yield arrived.event
        self._link.finished(self.request_id)

    async def _wait_for_first(self) -> None:
        limit = self._ask.pipeline.limits.first_chunk_s
        try:
            async with asyncio.timeout_at(self._since + limit):
                while not self._arrived and not self._error:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            message = f"nothing came within {limit:g} s"
            raise OmniError(message, status=504, code="first_chunk_timeout") from None

    async def aclose(self) -> None:
        self._link.forget(self.request_id)


class Link:
    """A gateway's end of the bus; implements `stream.Bus`."""

    def __init__(self, run: RunDir, name: str, pipelines: dict[str, Pipeline], arena_mib: int, stop: Stop) -> None:
        self.pipelines = pipelines
        self.fleet: Fleet | None = None
        self._name = name
        self._stop = stop
        self._incarnation = new_incarnation()
        self._streams: dict[str, BusStream] = {}
        #: What ended here, until the scheduler says that nothing of it is left: a scheduler may die in between.
        self._ending: dict[str, Done | Cancel] = {}
        self._registered = asyncio.Event()
        self._room = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._context = new_context()
        self._node = Node(
            self._context,
            run,
            self._incarnation,
            arena_mib << 20,
            self._on_piece,
            lambda request_id: self._on_room(),
            self._on_gap,
        )
        self._node.arena.on_free.append(self._on_free)
        self._member = Member(
            self._context,
            run,
            self._incarnation,
            self._hello,
            self._beat,
            self._on_frame,
            self._on_welcome,
            lambda reason: stop.request(f"told to end: {reason}", status=3),
        )

    async def start(self) -> None:
        await self._node.start()
        self._member.start()

    # --------------------------------------------------------------------------------------------------- requests

    async def submit(self, ask: Ask) -> BusStream:
        """See `stream.Bus.submit`."""
        limits = ask.pipeline.limits
        await self._wait_for_scheduler()
        stream = BusStream(self, new_request_id(), ask)
        self._streams[stream.request_id] = stream
        try:
            self._member.send(stream.submission())
            await asyncio.wait_for(stream.settled.wait(), limits.queue_s + ANSWER_MARGIN_S)
            stream.check()
            await self._send_input(stream, ask)
        except TimeoutError:
            self.forget(stream.request_id)
            raise OmniError("the scheduler did not answer", status=503, code="scheduler_silent") from None
        except BaseException:
            self.forget(stream.request_id)
            raise
        return stream

    async def _wait_for_scheduler(self) -> None:
        if self._member.registered:
            return
        self._registered.clear()
        try:
            await asyncio.wait_for(self._registered.wait(), SCHEDULER_S)
        except TimeoutError:
            raise OmniError(
                "the scheduler is not there", status=503, code="scheduler_missing", retry_after_s=1.0
            ) from None

    async def _send_input(self, stream: BusStream, ask: Ask) -> None:
        request_id = stream.request_id
        entry = ask.pipeline.tasks[ask.task].input
        for given in ask.given:
            stage = entry[given.modality]  # type: ignore[index]
            edges = self._node.sink_edges(request_id, (stage,))
            if not edges:
                return
            room = self._room
            while (tensors := await self._publish(request_id, given.arrays, len(edges))) is None:
                if stream.failed:
                    return
                self._node.evict()
                # Of before the look: room that came since has set it, whoever else has looked meanwhile.
                await room.wait()
                room = self._room
            self._node.emit(request_id, edges, given.start, given.end, given.last, given.body, tensors)

    async def _publish(self, request_id: str, arrays: Arrays, sinks: int) -> dict[str, Tensor] | None:
        """As `Node.publish`; a copy of any size does not hold up the loop."""
        if not arrays:
            return {}
        copying = asyncio.ensure_future(asyncio.to_thread(self._node.publish, request_id, arrays, sinks))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # The thread goes on; what it puts into the arena is nobody's.
            copying.add_done_callback(lambda done: self._take_back(done, sinks))
            raise

    def _take_back(self, copied: "asyncio.Future[dict[str, Tensor] | None]", sinks: int) -> None:
        if not copied.cancelled() and copied.exception() is None:
            self._node.unpublish(copied.result() or {}, sinks)

    def used(self, request_id: str, edge: str, nbytes: int) -> None:
        self._node.used(request_id, edge, nbytes)

    def finished(self, request_id: str) -> None:
        """Every final edge has ended: nothing more will come."""
        if self._streams.pop(request_id, None):
            self._end(Done(request_id))

    def forget(self, request_id: str) -> None:
        """Cancel unless it has ended."""
        if self._streams.pop(request_id, None):
            self._end(Cancel(request_id, "the client is gone"))

    def _end(self, frame: Done | Cancel) -> None:
        self._node.close_request(frame.request_id)
        self._ending[frame.request_id] = frame
        self._member.send(frame)

    # ------------------------------------------------------------------------------------------------ from the bus

    def _hello(self) -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            role="gateway",
            incarnation=self._incarnation,
            name=self._name,
            inbox=self._node.address,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def _beat(self) -> Beat:
        arena = self._node.arena
        return Beat(
            running=len(self._streams),
            arena_used=arena.used,
            arena_total=arena.total,
            sent=dict(self._node.sent),
            evicted=self._node.evicted,
            duplicates=self._node.duplicates,
            resends=self._node.resends,
        )

    def _on_welcome(self, again: bool) -> None:
        self._registered.set()
        if again:
            # This scheduler knows nothing: it gets what lives and what has ended.
            for stream in list(self._streams.values()):
                if not stream.settled.is_set():
                    self._rename(stream)
                self._member.send(stream.submission(live=stream.settled.is_set()))
            for frame in self._ending.values():
                self._member.send(frame)

    def _rename(self, stream: BusStream) -> None:
        """Workers may have the request from a placement whose word died with the scheduler: that one is cancelled."""
        old = stream.request_id
        del self._streams[old]
        self._ending[old] = Cancel(old, "its placement was lost")
        stream.request_id = new_request_id()
        self._streams[stream.request_id] = stream

    def _on_frame(self, frame: Plain) -> None:
        if isinstance(frame, Fleet):
            self.fleet = frame
        elif isinstance(frame, Lost):
            self._node.lost(frame.incarnation)
        elif isinstance(frame, Placed):
            self._on_placed(frame)
        elif isinstance(frame, Recover):
            held = self._node.recover(frame)
            if held is not None:
                self._member.send(held)
        elif isinstance(frame, Relink):
            self._node.relink(frame)
        elif isinstance(frame, Closed):
            self._ending.pop(frame.request_id, None)
        elif isinstance(frame, Rejected | Failed):
            self._on_refusal(frame)
        else:
            log.warning("a %s is not for a gateway", type(frame).__name__)

    def _on_placed(self, placed: Placed) -> None:
        stream = self._streams.get(placed.request_id)
        if stream is None or stream.settled.is_set():
            return
        self._node.open(placed.request_id, placed.attempt, placed.sources, placed.sinks)
        stream.settled.set()

    def _on_refusal(self, frame: Rejected | Failed) -> None:
        stream = self._streams.get(frame.request_id)
        if stream is not None:
            stream.fail(
                OmniError(
                    frame.message,
                    status=frame.status,
                    code=frame.code,
                    param=frame.param,
                    stage=frame.stage if isinstance(frame, Failed) else "",
                    retry_after_s=frame.retry_after_s if isinstance(frame, Rejected) else 0.0,
                )
            )
            # It may wait for room for its input.
            self._on_room()

    def _on_piece(self, delivery: Delivery) -> None:
        stream = self._streams.get(delivery.chunk.request_id)
        if stream is not None:
            stream.deliver(delivery)

    def _on_gap(self, request_id: str, why: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(OmniError(why, code="chunk_lost", stage=CLIENT))

    def _on_room(self) -> None:
        """Wake all who wait; who looks from now on waits for the next time."""
        self._room.set()
        self._room = asyncio.Event()

    def _on_free(self) -> None:
        """From whatever thread freed a slot."""
        self._loop.call_soon_threadsafe(self._on_room)

    async def close(self) -> None:
        for request_id in list(self._streams):
            self.forget(request_id)
        await self._member.close("ends")
        await self._node.close()
        self._context.term()
