"""The real bus behind `stream.py`: submits requests to the scheduler, sends their input, hands out their output."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator

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
)
from omni_common.ids import new_incarnation, new_request_id
from omni_common.member import Member
from omni_common.node import Delivery, Node
from omni_common.pipeline import Pipeline
from omni_common.run_dir import RunDir
from omni_common.service import Stop
from omni_common.sockets import new_context
from omni_gateway.stream import Ask, Event

log = logging.getLogger("omni.gateway")

#: Seconds that a new request waits for a scheduler that is not there: a restart's time.
SCHEDULER_S = 5.0
#: Beyond the queue's own deadline the scheduler's answer must have come.
ANSWER_MARGIN_S = 5.0


class BusStream:
    """One request; see `stream.Stream`. `Link` feeds it, the endpoint iterates over it."""

    def __init__(self, link: "Link", request_id: str, ask: Ask) -> None:
        self.request_id = request_id
        self._link = link
        self._ask = ask
        self._since = asyncio.get_running_loop().time()
        self._modality = {stage: kind for kind, stage in ask.pipeline.tasks[ask.task].output.items()}
        self._open = set(ask.outputs)
        self._arrived: deque[Delivery] = deque()
        self._error: OmniError | None = None
        self._news = asyncio.Event()
        self.placed: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()

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
        self._arrived.append(delivery)
        self._news.set()

    def fail(self, error: OmniError) -> None:
        """The request failed. What arrived before stays readable: it is part of the answer."""
        if not self.placed.done():
            self.placed.set_exception(error)
        self._error = self._error or error
        self._news.set()

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
                if self._error:
                    raise self._error
                self._news.clear()
                await self._news.wait()
            yield self._take(self._arrived.popleft())
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

    def _take(self, delivery: Delivery) -> Event:
        chunk = delivery.chunk
        modality = self._modality[delivery.stage]
        if chunk.last:
            self._open.discard(modality)
        # Copied so that the producer's arena never waits for a slow client.
        arrays = {name: np.array(view) for name, view in delivery.arrays.items()}
        self._link.used(delivery)
        return Event(modality, chunk.body, arrays, chunk.start, chunk.end, chunk.last)

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
            lambda request_id: self._room.set(),
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
            placed = await asyncio.wait_for(stream.placed, limits.queue_s + ANSWER_MARGIN_S)
            await self._send_input(stream, placed, ask)
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

    async def _send_input(self, stream: BusStream, placed: Placed, ask: Ask) -> None:
        entry = ask.pipeline.tasks[ask.task].input
        for given in ask.given:
            stage = entry[given.modality]  # type: ignore[index]
            edges = self._node.sink_edges(placed.request_id, (stage,))
            if not edges:
                return
            self._room.clear()
            while (
                tensors := await asyncio.to_thread(self._node.publish, placed.request_id, given.arrays, len(edges))
            ) is None:
                if stream.failed:
                    return
                self._node.evict()
                await self._room.wait()
                self._room.clear()
            self._node.emit(placed.request_id, edges, given.start, given.end, given.last, given.body, tensors)

    def used(self, delivery: Delivery) -> None:
        self._node.used(delivery.chunk.request_id, delivery.chunk.edge, delivery.nbytes)

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
            for stream in self._streams.values():
                self._member.send(stream.submission(live=stream.placed.done()))
            for frame in self._ending.values():
                self._member.send(frame)

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
        if stream is None or stream.placed.done():
            return
        self._node.open(placed.request_id, placed.attempt, placed.sources, placed.sinks)
        stream.placed.set_result(placed)

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
            self._room.set()

    def _on_piece(self, delivery: Delivery) -> None:
        stream = self._streams.get(delivery.chunk.request_id)
        if stream is not None:
            stream.deliver(delivery)

    def _on_gap(self, request_id: str, why: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(OmniError(why, code="chunk_lost", stage=CLIENT))

    def _on_free(self) -> None:
        """From whatever thread freed a slot."""
        self._loop.call_soon_threadsafe(self._room.set)

    async def close(self) -> None:
        for request_id in list(self._streams):
            self.forget(request_id)
        await self._member.close("ends")
        await self._node.close()
        self._context.term()
