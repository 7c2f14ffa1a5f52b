"""The two ends of one edge of one request, as pure state: credit, order, positions. No sockets, no clock.

Credit is counted in chunks and bytes and granted cumulatively, so a lost or doubled `grant` does no harm. The producer
sends nothing before the first grant. Order is checked by `seq`, duplicates are cut by position.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from omni_common.frames import Body, Chunk, Grant, Link, Tensor

#: Chunks and bytes that a consumer lets one edge of one request send ahead of it. A token is a chunk, so the window is
#: what a text stage may be ahead of a slow reader; of tensors, a few chunks fill the bytes first.
WINDOW_CHUNKS = 256
WINDOW_BYTES = 8 << 20


@dataclass(slots=True)
class Pending:
    """Output that waits for credit. `tensors` are already in the arena, held there under the name `QUEUE`."""

    start: int
    end: int
    last: bool
    body: Body | None
    tensors: dict[str, Tensor]
    #: Payload bytes, as credit counts them.
    nbytes: int


@dataclass(slots=True)
class OutEdge:
    """Producer's end. Invariant: chunks leave in the order of `offer`, and `sent_*` stay within the grants, but for the
    one chunk that may overshoot the bytes."""

    request_id: str
    link: Link
    source: str
    attempt: int
    waiting: deque[Pending] = field(default_factory=deque)
    sent_chunks: int = 0
    sent_bytes: int = 0
    limit_chunks: int = 0
    limit_bytes: int = 0
    #: The consumer has received and opened everything before this position.
    acknowledged: int = 0
    end: int = 0
    ended: bool = False

    def offer(self, pending: Pending) -> None:
        self.waiting.append(pending)

    def grant(self, grant: Grant) -> None:
        """Take over the figures of a grant; an old one that comes late changes nothing."""
        self.limit_chunks = max(self.limit_chunks, grant.chunks)
        self.limit_bytes = max(self.limit_bytes, grant.nbytes)
        self.acknowledged = max(self.acknowledged, grant.position)

    def take(self) -> list[tuple[Chunk, Pending]]:
        """Remove and number what may leave now."""
        taken = []
        while self.waiting and self.sent_chunks < self.limit_chunks and self.sent_bytes < self.limit_bytes:
            pending = self.waiting.popleft()
            chunk = Chunk(
                request_id=self.request_id,
                edge=self.link.edge,
                source=self.source,
                attempt=self.attempt,
                seq=self.sent_chunks,
                start=pending.start,
                end=pending.end,
                last=pending.last,
                body=pending.body,
                tensors=pending.tensors,
            )
            self.sent_chunks += 1
            self.sent_bytes += pending.nbytes
            self.end = pending.end
            self.ended = pending.last
            taken.append((chunk, pending))
        return taken


Verdict = Literal["new", "duplicate", "gap", "stale"]


@dataclass(slots=True)
class InEdge:
    """Consumer's end."""

    request_id: str
    link: Link
    source: str
    attempt: int
    window_chunks: int = WINDOW_CHUNKS
    window_bytes: int = WINDOW_BYTES
    #: Next position and seq expected.
    position: int = 0
    seq: int = 0
    received_bytes: int = 0
    #: What the consumer has used up, which is what credit follows.
    used_chunks: int = 0
    used_bytes: int = 0
    _granted_chunks: int = 0
    _granted_bytes: int = 0
    ended: bool = False

    def open(self) -> Grant:
        """The grant that opens the edge."""
        self._granted_chunks = self.used_chunks + self.window_chunks
        self._granted_bytes = self.used_bytes + self.window_bytes
        return Grant(
            request_id=self.request_id,
            edge=self.link.edge,
            source=self.source,
            attempt=self.attempt,
            position=self.position,
            chunks=self._granted_chunks,
            nbytes=self._granted_bytes,
        )

    def accept(self, chunk: Chunk, nbytes: int) -> Verdict:
        """Judge a chunk and, when it is new, move on.

        `stale`: another incarnation than the placed one; `gap`: something before it is missing; `duplicate`: everything
        in it was received already.
        """
        if chunk.source != self.link.incarnation:
            return "stale"
        if self.ended or chunk.seq < self.seq:
            return "duplicate"
        if chunk.seq > self.seq or chunk.start != self.position:
            return "gap"
        self.seq += 1
        self.position = chunk.end
        self.received_bytes += nbytes
        self.ended = chunk.last
        return "new"

    def used(self, nbytes: int) -> Grant | None:
        """The consumer is done with one chunk. Returns a grant once half a window is used up, none after the end."""
        self.used_chunks += 1
        self.used_bytes += nbytes
        if self.ended:
            return None
        chunks_left = self._granted_chunks - self.used_chunks
        bytes_left = self._granted_bytes - self.used_bytes
        if chunks_left * 2 > self.window_chunks and bytes_left * 2 > self.window_bytes:
            return None
        return self.open()


def payload_bytes(body: Body | None, sizes: int) -> int:
    """Bytes that credit counts for a chunk: its tensors' `sizes` and the text in it."""
    return sizes + len(getattr(body, "text", ""))
