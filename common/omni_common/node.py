"""The data plane of one process: its inbox, its arena, its connections to peers, and the edges of its requests.

Gateway and worker use it alike. Everything runs on the event loop but `publish`, which copies tensors into the arena
and is called from the thread that made them.
"""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_common.arena import Arena
from omni_common.edges import InEdge, OutEdge, Retained, payload_bytes
from omni_common.errors import OmniError
from omni_common.frames import (
    ArenaTensor,
    Body,
    Chunk,
    Decision,
    Grant,
    Held,
    InlineTensor,
    Link,
    PartTensor,
    Plain,
    Recover,
    Release,
    Relink,
    Tensor,
)
from omni_common.handover import DescriptorClient, DescriptorServer
from omni_common.run_dir import RunDir
from omni_common.sockets import Context, Inbox, Outbox
from omni_common.tensors import INLINE_BYTES, from_inline, from_part, inline

log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray[Any, Any]]

#: Holder of a slot for as long as its chunk may be sent, or sent again.
RETAINED = "retained"
#: Grants that arrive before the placement they belong to (the two come over different sockets).
EARLY_GRANTS = 16_384


@dataclass(frozen=True, slots=True)
class Delivery:
    """A chunk that arrived, in order, its tensors opened. `arrays` are read-only views of the producer's arena."""

    chunk: Chunk
    stage: str
    arrays: Arrays
    nbytes: int


@dataclass(slots=True)
class _Request:
    outs: dict[str, OutEdge] = field(default_factory=dict)
    ins: dict[str, InEdge] = field(default_factory=dict)


class Node:
    """`on_piece(delivery)` for every new chunk; `on_room(request_id)` when chunks of it left; `on_gap(request_id, why)`
    when a chunk is missing on one of its edges."""

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
        self.arena = Arena(incarnation, arena_bytes)
        self._context = context
        self._requests: dict[str, _Request] = {}
        self._early: OrderedDict[tuple[str, str, str], Grant] = OrderedDict()
        self._outboxes: dict[str, Outbox] = {}
        #: Peers that must not be written to again; old ones have no request left that could.
        self._lost: deque[str] = deque(maxlen=1024)
        #: Chunks of a producer whose arena is being mapped; later ones wait behind them.
        self._mapping: dict[str, list[tuple[Chunk, list[memoryview]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._released: deque[tuple[str, tuple[int, int]]] = deque()
        self._release_due = False
        #: Payload bytes sent, by way: inline, arena, part.
        self.sent: Counter[str] = Counter()
        self.stale_chunks = 0
        #: Chunks whose tensors were given up while their request might have needed them again.
        self.evicted = 0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptors = DescriptorServer(self._run.descriptor(self.incarnation), self.arena, self._consumer_gone)
        await self._descriptors.start()
        self._mapped = DescriptorClient(self._run.path, self.incarnation)
        self._inbox = Inbox(self._context, self._bind, self._on_frames)

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
        request = self._requests[request_id] = _Request()
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
            if _is_local(link.inbox) and not self._mapped.is_mapped(link.incarnation):
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

    def publish(self, arrays: Arrays, sinks: int) -> dict[str, Tensor] | None:
        """Put `arrays` where `sinks` chunks can refer to them. Any thread. None: the arena has no room now.

        Raises OmniError `tensor_too_large` for what can never fit.
        """
        tensors: dict[str, Tensor] = {}
        for name, array in arrays.items():
            if array.nbytes <= INLINE_BYTES:
                tensors[name] = inline(array)
                continue
            ref = self.arena.put(array, {RETAINED: sinks})
            if ref is None:
                self._release_own(tensors, sinks)
                return None
            tensors[name] = ref
        return tensors

    def _release_own(self, tensors: dict[str, Tensor], times: int = 1) -> None:
        slots = [(ref.offset, ref.generation) for ref in tensors.values() if isinstance(ref, ArenaTensor)]
        for _ in range(times):
            self.arena.release(RETAINED, slots)

    def unpublish(self, tensors: dict[str, Tensor], sinks: int) -> None:
        """Take back what was published for a request that is gone."""
        self._release_own(tensors, sinks)

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
            if out is None:
                self._release_own(tensors)
                continue
            nbytes = payload_bytes(body, sum(_size(ref) for ref in tensors.values()))
            out.offer(Retained(start, end, last, body, tensors, nbytes))
            self._pump(out)

    def backlog(self, request_id: str) -> int:
        """Chunks of the request that wait for credit on its slowest edge."""
        request = self._requests.get(request_id)
        return max((out.waiting for out in request.outs.values()), default=0) if request else 0

    def _pump(self, out: OutEdge) -> None:
        for chunk in out.take():
            nbytes = sum(_size(ref) for ref in chunk.tensors.values())
            if any(isinstance(ref, ArenaTensor) for ref in chunk.tensors.values()):
                self._send_tensors(out.link, chunk, nbytes)
            else:
                self.sent["inline"] += payload_bytes(chunk.body, nbytes)
                self._send(out.link, chunk)

    def _send_tensors(self, link: Link, chunk: Chunk, nbytes: int) -> None:
        if _is_local(link.inbox):
            self.sent["arena"] += nbytes
            for ref in chunk.tensors.values():
                if isinstance(ref, ArenaTensor):
                    self.arena.hold(ref.offset, ref.generation, link.incarnation)
            self._send(link, chunk)
            return
        self.sent["part"] += nbytes
        parts: list[memoryview] = []
        for name, ref in chunk.tensors.items():
            if isinstance(ref, ArenaTensor):
                chunk.tensors = {**chunk.tensors, name: PartTensor(ref.dtype, ref.shape, len(parts))}
                parts.append(self.arena.read(ref))
        outbox = self._outbox(link.incarnation, link.inbox)
        if outbox is not None:
            outbox.send_with_parts(chunk, parts)

    def _let_go(self, chunk: Retained) -> None:
        """A chunk will not be sent again."""
        if not chunk.evicted:
            self._release_own(chunk.tensors)

    def evict(self) -> int:
        """The arena is full: give up the oldest half of what is kept only for a replay. Returns the chunks given up.

        Their requests go on; should a consumer of theirs die, they cannot be replayed from here.
        """
        candidates = [
            chunk for request in self._requests.values() for out in request.outs.values() for chunk in out.evictable()
        ]
        for chunk in candidates[: (len(candidates) + 1) // 2]:
            self._let_go(chunk)
            chunk.evicted = True
        self.evicted += len(candidates[: (len(candidates) + 1) // 2])
        return len(candidates)

    # ------------------------------------------------------------------------------------------------- recovery

    def recover(self, recover: Recover) -> Held | None:
        """A producer is dead: take nothing more from it and say what was received. None: the request is unknown."""
        request = self._requests.get(recover.request_id)
        edge = request.ins.get(recover.edge) if request else None
        # A scheduler that came back empty does not know who the dead producer was.
        if edge is None or recover.incarnation not in ("", edge.link.incarnation):
            return None
        edge.fence()
        return Held(
            recover.request_id, recover.edge, recover.incarnation, edge.position, edge.ended, list(edge.decisions)
        )

    def relink(self, relink: Relink) -> None:
        """A neighbour of the request's stage here was placed anew."""
        request = self._requests.get(relink.request_id)
        if request is None:
            return
        link = relink.link
        incoming = request.ins.get(link.edge)
        if incoming is not None:
            grant = incoming.relink(link)
            if grant is not None:
                self._send(link, grant)
        out = request.outs.get(link.edge)
        if out is not None:
            out.relink(link)
            self._take_early_grant(out)
            self._pump(out)

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
            if out.waiting:
                self._pump(out)
                self._on_room(grant.request_id)

    def _keep_early(self, grant: Grant) -> None:
        self._early[grant.request_id, grant.edge, grant.source] = grant
        if len(self._early) > EARLY_GRANTS:
            self._early.popitem(last=False)

    def _on_chunk(self, chunk: Chunk, parts: list[memoryview]) -> None:
        waiting = self._mapping.get(chunk.source)
        if waiting is not None:
            waiting.append((chunk, parts))
        elif any(isinstance(ref, ArenaTensor) for ref in chunk.tensors.values()) and not self._mapped.is_mapped(
            chunk.source
        ):
            self._map(chunk.source).append((chunk, parts))
        else:
            self._deliver(chunk, parts)

    def _map(self, owner: str) -> list[tuple[Chunk, list[memoryview]]]:
        """Begin to map `owner`'s arena; returns the list in which its chunks wait for that."""
        if owner in self._mapping:
            return self._mapping[owner]
        waiting = self._mapping[owner] = []
        task = self._loop.create_task(self._finish_map(owner), name=f"map {owner}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return waiting

    async def _finish_map(self, owner: str) -> None:
        try:
            await self._mapped.arena_of(owner)
        except OmniError as error:
            # The owner is dead: what it sent counts as not received. The scheduler deals with its requests.
            log.info("arena of %s: %s", owner, error)
            del self._mapping[owner]
            return
        for chunk, parts in self._mapping.pop(owner):
            self._deliver(chunk, parts)

    def _deliver(self, chunk: Chunk, parts: list[memoryview]) -> None:
        request = self._requests.get(chunk.request_id)
        edge = request.ins.get(chunk.edge) if request else None
        nbytes = payload_bytes(chunk.body, sum(_size(ref) for ref in chunk.tensors.values()))
        verdict = edge.accept(chunk, nbytes) if edge else "stale"
        if edge is None or verdict != "new":
            self._refuse(chunk)
            if verdict == "gap":
                self._on_gap(chunk.request_id, f"a chunk is missing on {chunk.edge} before number {chunk.seq}")
            return
        try:
            arrays = {name: self._open(chunk.source, ref, parts) for name, ref in chunk.tensors.items()}
        except OmniError as error:
            self._on_gap(chunk.request_id, f"a tensor on {chunk.edge} cannot be opened: {error}")
            return
        self._on_piece(Delivery(chunk, edge.link.stage, arrays, nbytes))

    def _refuse(self, chunk: Chunk) -> None:
        self.stale_chunks += 1
        for ref in chunk.tensors.values():
            if isinstance(ref, ArenaTensor):
                self._release(ref.arena, ref.offset, ref.generation)

    def _open(self, owner: str, ref: Tensor, parts: list[memoryview]) -> np.ndarray[Any, Any]:
        if isinstance(ref, InlineTensor):
            return from_inline(ref)
        if isinstance(ref, PartTensor):
            return from_part(ref, parts)
        if ref.arena != owner:
            raise OmniError(f"{owner} refers to the arena of {ref.arena}", code="stale_tensor")
        return self._mapped.view(ref, lambda offset, generation: self._release(owner, offset, generation))

    def used(self, request_id: str, edge: str, nbytes: int) -> None:
        """The consumer has taken a delivered chunk: its credit goes back to the producer."""
        request = self._requests.get(request_id)
        incoming = request.ins.get(edge) if request else None
        if incoming is not None:
            grant = incoming.used(nbytes)
            if grant is not None:
                self._send(incoming.link, grant)

    def _release(self, owner: str, offset: int, generation: int) -> None:
        """A view died, in whatever thread."""
        self._released.append((owner, (offset, generation)))
        if not self._release_due:
            self._release_due = True
            # At the end of the process the loop may be closed already; the kernel then gives everything back.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._send_releases)

    def _send_releases(self) -> None:
        self._release_due = False
        by_owner: dict[str, list[tuple[int, int]]] = {}
        while self._released:
            owner, slot = self._released.popleft()
            by_owner.setdefault(owner, []).append(slot)
        for owner, slots in by_owner.items():
            # Shared memory means the same run folder, which gives the owner's address.
            outbox = self._outbox(owner, self._run.inbox(owner))
            if outbox is not None:
                outbox.send(Release(self.incarnation, slots))

    # ---------------------------------------------------------------------------------------------- end of peers

    def _consumer_gone(self, incarnation: str) -> None:
        """Its descriptor socket ended, so its mapping is gone: nobody reads what it held."""
        self.arena.forget(incarnation)

    def lost(self, incarnation: str) -> None:
        """The scheduler declared a peer dead. A stopped one keeps its slots as long as it could still read them."""
        self._lost.append(incarnation)
        outbox = self._outboxes.pop(incarnation, None)
        if outbox is not None:
            outbox.close()
        self._mapped.drop(incarnation)
        if not self._descriptors.is_connected(incarnation):
            self.arena.forget(incarnation)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._inbox.close()
        for outbox in self._outboxes.values():
            outbox.flush()
            outbox.close()
        for request_id in list(self._requests):
            self.close_request(request_id)
        self._mapped.close()
        await self._descriptors.close()
        self.arena.close()
        self._run.clear(self.incarnation)


def _is_local(inbox: str) -> bool:
    """Shared memory goes where the ends share a run folder."""
    return inbox.startswith("ipc://")


def _size(ref: Tensor) -> int:
    if isinstance(ref, ArenaTensor):
        return ref.nbytes
    return len(ref.data) if isinstance(ref, InlineTensor) else 0
