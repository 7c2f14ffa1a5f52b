"""The data plane of one process: its inbox, its arena, its connections to peers, and the edges of its requests.

Gateway and worker use it alike. Everything runs on the event loop but `publish`, which copies tensors into the arena
and is called from the thread that made them.
"""

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omni_common.decisions import Ends
from omni_common.edges import InEdge, OutEdge, Retained, payload_bytes
from omni_common.errors import OmniError
from omni_common.frames import (
    Body,
    Chunk,
    Decision,
    Grant,
    Held,
    Link,
    Plain,
    Recover,
    Release,
    Relink,
    Sent,
    Tensor,
)
from omni_common.run_dir import RunDir
from omni_common.sockets import Context, Inbox, Outbox
from omni_common.tensor_port import Arrays, TensorPort, arena_tensors, size_of

log = logging.getLogger(__name__)

#: Grants that arrive before the placement they belong to (the two come over different sockets).
EARLY_GRANTS = 16_384
#: Seconds between two looks for frames that got lost.
RESTATE_S = 1.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A chunk that arrived, in order, its tensors opened. `arrays` are read-only views of the producer's arena."""

    chunk: Chunk
    stage: str
    arrays: Arrays
    nbytes: int


class Node:
    """`on_piece(delivery)` for every new chunk; `on_room(request_id)` when chunks of it left; `on_gap(request_id, why)`
    when something of it cannot be received or sent again."""

    def __init__(
        self,
        context: Context,
        run: RunDir,
        incarnation: str,
        arena_bytes: int,
        on_piece: Callable[[Delivery], None],
        on_room: Callable[[str], None],
        on_gap: Callable[[str, str], None],
        bind: str = "",
    ) -> None:
        self.incarnation = incarnation
        self._run = run
        self._on_piece = on_piece
        self._on_room = on_room
        self._on_gap = on_gap
        self._bind = bind or run.inbox(incarnation)
        self._tensors = TensorPort(run, incarnation, arena_bytes, self._send_release, self._on_mapped)
        self.arena = self._tensors.arena
        self._context = context
        self._requests: dict[str, Ends] = {}
        self._early: OrderedDict[tuple[str, str, str], Grant] = OrderedDict()
        self._outboxes: dict[str, Outbox] = {}
        #: Peers that must not be written to again; old ones have no request left that could.
        self._lost: deque[str] = deque(maxlen=1024)
        #: Chunks of a producer whose arena is being mapped; later ones wait behind them.
        self._mapping: dict[str, list[tuple[Chunk, list[memoryview]]]] = {}
        #: The arena had no room for something since the last look.
        self._full = False
        #: Payload bytes sent, by way: inline, arena, part.
        self.sent: Counter[str] = Counter()
        self.stale_chunks = 0
        #: Chunks whose tensors were given up while their request might have needed them again.
        self.evicted = 0
        #: Chunks that arrived twice, and edges that were opened again because something was missing.
        self.duplicates = 0
        self.resends = 0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._tensors.start()
        self._inbox = Inbox(self._context, self._bind, self._on_frames)
        self._timer = self._loop.call_later(RESTATE_S, self._restate)

    @property
    def address(self) -> str:
        return self._inbox.address

    # ------------------------------------------------------------------------------------------------- requests

    def open(
        self,
        request_id: str,
        attempt: int,
        sources: list[Link],
        sinks: list[Link],
        resume: Sequence[Decision] = (),
    ) -> None:
        """Create the request's edges and let its producers send. Only a placement calls this.

        `resume` is output of a former self of this stage that needs no computing: consumers that lack it get it.
        """
        request = self._requests[request_id] = Ends()
        for link in sinks:
            edge = OutEdge(request_id, link, self.incarnation, attempt)
            for past in resume:
                edge.offer(Retained(past.start, past.end, past.last, past.body, {}, payload_bytes(past.body, 0)))
            request.outs[link.edge] = edge
            self._take_early_grant(edge)
            self._pump(edge)
        for link in sources:
            incoming = InEdge(request_id, link, self.incarnation, attempt)
            request.ins[link.edge] = incoming
            self._send(link, incoming.open())
            if _is_local(link.inbox) and not self._tensors.is_mapped(link.incarnation):
                self._map(link.incarnation)

    def close_request(self, request_id: str) -> None:
        """Forget a request; what waits is dropped, what still arrives is released unread. Idempotent."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for out in request.outs.values():
            for chunk in out.log:
                self._let_go(chunk)

    def requests(self) -> list[str]:
        return list(self._requests)

    # --------------------------------------------------------------------------------------------------- sending

    def publish(self, request_id: str, arrays: Arrays, sinks: int) -> dict[str, Tensor] | None:
        """Put `arrays` where `sinks` chunks of the request can refer to them. Any thread.

        None: not now, because the arena is full or the request has its share of it. Raises OmniError
        `tensor_too_large` for what can never fit.
        """
        if arrays and self._has_its_share(request_id):
            return None
        tensors = self._tensors.publish(arrays, sinks)
        self._full = self._full or tensors is None
        return tensors

    def _has_its_share(self, request_id: str) -> bool:
        """So much of the request waits for its consumers that others need the rest of the arena more. A request of
        which nothing waits may always put one chunk."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        outstanding = max((out.outstanding for out in request.outs.values()), default=0)
        return outstanding > self.arena.total // (len(self._requests) + 1)

    def unpublish(self, tensors: dict[str, Tensor], sinks: int) -> None:
        """Take back what was published for a request that is gone."""
        self._tensors.let_go(tensors, sinks)

    def sink_edges(self, request_id: str, stages: tuple[str, ...] | None = None) -> list[str]:
        """Edges of the request that take its output (of `stages` only)."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        return [edge for edge, out in request.outs.items() if stages is None or out.link.stage in stages]

    def emit(
        self,
        request_id: str,
        edges: list[str],
        start: int,
        end: int,
        last: bool,
        body: Body | None,
        tensors: dict[str, Tensor],
    ) -> None:
        """Queue one published output on `edges`; it leaves as credit allows. `tensors` are held once per edge."""
        request = self._requests.get(request_id)
        for edge in edges:
            out = request.outs.get(edge) if request else None
            if request is None or out is None:
                self._tensors.let_go(tensors)
                continue
            request.offer(out, start, end, last, body, tensors, size_of(tensors))
            self._pump(out)

    def backlog(self, request_id: str) -> int:
        """Chunks of the request that wait for credit on its slowest edge."""
        request = self._requests.get(request_id)
        return max((out.waiting for out in request.outs.values()), default=0) if request else 0

    def _pump(self, out: OutEdge) -> None:
        for chunk in out.take():
            if arena_tensors(chunk.tensors):
                self._send_tensors(out.link, chunk)
            else:
                self.sent["inline"] += payload_bytes(chunk.body, size_of(chunk.tensors))
                self._send(out.link, chunk)

    def _send_tensors(self, link: Link, chunk: Chunk) -> None:
        outbox = self._outbox(link.incarnation, link.inbox)
        if outbox is None:
            # Lent to the dead it would never come back: the word of their end has been.
            return
        nbytes = size_of(chunk.tensors)
        if _is_local(link.inbox):
            self.sent["arena"] += nbytes
            self._tensors.lend(chunk.tensors, link.incarnation)
            outbox.send(chunk)
            return
        self.sent["part"] += nbytes
        chunk.tensors, parts = self._tensors.as_parts(chunk.tensors)
        outbox.send_with_parts(chunk, parts)

    def _let_go(self, chunk: Retained) -> None:
        """A chunk will not be sent again."""
        if not chunk.evicted:
            self._tensors.let_go(chunk.tensors)

    def evict(self) -> int:
        """If the arena is full, give up half of what is kept only for a replay. Returns the number of chunks.

        Their requests go on; should a consumer of theirs die, they cannot be replayed from here.
        """
        if not self._full:
            return 0
        self._full = False
        candidates = [
            chunk for request in self._requests.values() for out in request.outs.values() for chunk in out.evictable()
        ]
        victims = candidates[: (len(candidates) + 1) // 2]
        for chunk in victims:
            self._let_go(chunk)
            chunk.evicted = True
        self.evicted += len(victims)
        return len(victims)

    # ------------------------------------------------------------------------------------------------- recovery

    def recover(self, recover: Recover) -> Held | None:
        """See `Ends.recover`. None also for an unknown request."""
        request = self._requests.get(recover.request_id)
        return request.recover(recover) if request else None

    def relink(self, relink: Relink) -> None:
        """A neighbour of the request's stage here was placed anew."""
        request = self._requests.get(relink.request_id)
        if request is None:
            return
        link = relink.link
        incoming = request.ins.get(link.edge)
        # A scheduler that came back restates every link.
        if incoming is not None and (incoming.fenced or incoming.link.incarnation != link.incarnation):
            self._send(link, incoming.relink(link))
        out = request.outs.get(link.edge)
        if out is not None and out.link.incarnation != link.incarnation:
            out.relink(link)
            self._take_early_grant(out)
            self._pump(out)
            self._on_room(relink.request_id)

    def _take_early_grant(self, out: OutEdge) -> None:
        early = self._early.pop((out.request_id, out.link.edge, out.link.incarnation), None)
        if early is not None:
            self._grant(out, early)

    def _grant(self, out: OutEdge, grant: Grant) -> None:
        if not out.grant(grant):
            self._on_gap(out.request_id, f"what {out.link.edge} needs again was given up for lack of shared memory")

    def _send(self, link: Link, frame: Plain) -> None:
        outbox = self._outbox(link.incarnation, link.inbox)
        if outbox is not None:
            outbox.send(frame)

    def _outbox(self, incarnation: str, address: str) -> Outbox | None:
        """The connection to a peer; None when the scheduler said that it is dead."""
        outbox = self._outboxes.get(incarnation)
        if outbox is None and incarnation not in self._lost:
            outbox = self._outboxes[incarnation] = Outbox(self._context, address)
        return outbox

    # ------------------------------------------------------------------------------------------------- receiving

    def _on_frames(self, frames: list[Plain], parts: list[memoryview]) -> None:
        for frame in frames:
            if isinstance(frame, Chunk):
                self._on_chunk(frame, parts)
            elif isinstance(frame, Grant):
                self._on_grant(frame)
            elif isinstance(frame, Sent):
                self._on_sent(frame)
            elif isinstance(frame, Release):
                self.arena.release(frame.source, frame.slots)
            else:
                log.warning("dropped a %s in the data inbox", type(frame).__name__)

    def _on_grant(self, grant: Grant) -> None:
        request = self._requests.get(grant.request_id)
        if request is None:
            self._keep_early(grant)
            return
        out = request.outs.get(grant.edge)
        if out is None:
            log.warning("dropped a grant of %s for %s", grant.source, grant.edge)
        elif grant.source != out.link.incarnation:
            # Of a consumer placed anew, before the word of it; or a late one of the dead.
            self._keep_early(grant)
        else:
            self._grant(out, grant)
            self._pump(out)
            self._on_room(grant.request_id)

    def _keep_early(self, grant: Grant) -> None:
        self._early[grant.request_id, grant.edge, grant.source] = grant
        if len(self._early) > EARLY_GRANTS:
            self._early.popitem(last=False)

    def _on_sent(self, sent: Sent) -> None:
        request = self._requests.get(sent.request_id)
        edge = request.ins.get(sent.edge) if request else None
        if edge is None or edge.link.incarnation != sent.source or sent.source in self._mapping:
            return
        if edge.lacks(sent.chunks, sent.opening):
            # Data and this word come over the same connection, in order: what is not here now was lost.
            self._reopen(edge, f"{sent.chunks} chunks were sent, {edge.seq} are here")
        elif edge.ended and not edge.fenced:
            # After the end nothing is granted that would say so.
            self._send(edge.link, edge.open())

    def _reopen(self, edge: InEdge, why: str) -> None:
        log.warning("%s of %s is sent again: %s", edge.link.edge, edge.request_id, why)
        self.resends += 1
        self._send(edge.link, edge.reopen())

    def _restate(self) -> None:
        """Once a second: what was sent and is not acknowledged, and what is granted. So a lost frame shows."""
        self._timer = self._loop.call_later(RESTATE_S, self._restate)
        for request in self._requests.values():
            for out in request.outs.values():
                if out.opening and out.unacknowledged():
                    word = Sent(out.request_id, out.link.edge, self.incarnation, out.opening, out.sent_chunks)
                    self._send(out.link, word)
            for incoming in request.ins.values():
                if not incoming.ended and not incoming.fenced:
                    self._send(incoming.link, incoming.open())

    def _on_chunk(self, chunk: Chunk, parts: list[memoryview]) -> None:
        waiting = self._mapping.get(chunk.source)
        if waiting is not None:
            waiting.append((chunk, parts))
        elif arena_tensors(chunk.tensors) and not self._tensors.is_mapped(chunk.source):
            self._map(chunk.source)
            self._mapping[chunk.source].append((chunk, parts))
        else:
            self._deliver(chunk, parts)

    def _map(self, owner: str) -> None:
        """Begin to map `owner`'s arena; its chunks wait for that."""
        if owner not in self._mapping:
            self._mapping[owner] = []
            self._tensors.map(owner)

    def _on_mapped(self, owner: str, success: bool) -> None:
        waiting = self._mapping.pop(owner)
        # Without success the owner is dead: what it sent counts as not received. The scheduler sees to its requests.
        for chunk, parts in waiting if success else []:
            self._deliver(chunk, parts)

    def _deliver(self, chunk: Chunk, parts: list[memoryview]) -> None:
        request = self._requests.get(chunk.request_id)
        edge, verdict = request.accept(chunk) if request else (None, "stale")
        if edge is None or verdict != "new":
            self._tensors.refuse(chunk.tensors)
            self.stale_chunks += 1
            if verdict == "duplicate":
                self.duplicates += 1
            elif verdict == "torn":
                self._on_gap(chunk.request_id, f"{chunk.edge} was cut elsewhere than before at {chunk.start}")
            elif verdict == "gap" and edge is not None:
                self._reopen(edge, f"number {chunk.seq} came instead of {edge.seq}")
            return
        try:
            arrays = {name: self._tensors.open(chunk.source, ref, parts) for name, ref in chunk.tensors.items()}
        except OmniError as error:
            self._on_gap(chunk.request_id, f"a tensor on {chunk.edge} cannot be opened: {error}")
            return
        nbytes = payload_bytes(chunk.body, size_of(chunk.tensors) + sum(part.nbytes for part in parts))
        self._on_piece(Delivery(chunk, edge.link.stage, arrays, nbytes))

    def used(self, request_id: str, edge: str, nbytes: int) -> None:
        """The consumer has taken a delivered chunk: its credit goes back to the producer."""
        request = self._requests.get(request_id)
        incoming = request.ins.get(edge) if request else None
        if incoming is not None:
            grant = incoming.used(nbytes)
            if grant is not None:
                self._send(incoming.link, grant)

    def _send_release(self, owner: str, release: Release) -> None:
        # Shared memory means the same run folder, which gives the owner's address.
        outbox = self._outbox(owner, self._run.inbox(owner))
        if outbox is not None:
            outbox.send(release)

    # ---------------------------------------------------------------------------------------------- end of peers

    def lost(self, incarnation: str) -> None:
        """The scheduler declared a peer dead."""
        self._lost.append(incarnation)
        outbox = self._outboxes.pop(incarnation, None)
        if outbox is not None:
            outbox.close()
        self._tensors.lost(incarnation)

    async def close(self) -> None:
        self._timer.cancel()
        self._inbox.close()
        for outbox in self._outboxes.values():
            outbox.flush()
            outbox.close()
        for request_id in list(self._requests):
            self.close_request(request_id)
        await self._tensors.close()
        self._run.clear(self.incarnation)


def _is_local(inbox: str) -> bool:
    """Shared memory goes where the ends share a run folder."""
    return inbox.startswith("ipc://")
