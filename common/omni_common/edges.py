"""The two ends of one edge of one request, as pure state: credit, order, positions, retention. No sockets, no clock.

Credit is counted in chunks and bytes and granted cumulatively, so a lost or doubled `grant` does no harm. The producer
sends nothing before the first grant, which opens the edge at the consumer's position. What was sent is retained until
the request ends, so that the edge can be opened again: by the same consumer after the producer was placed anew or
something was lost, or by another one from the beginning. Counting starts anew with every opening; positions never do.
"""

from dataclasses import dataclass, field
from typing import Literal

from omni_common.frames import ArenaTensor, Body, Chunk, Decision, Grant, Link, Tensor

#: Chunks and bytes that a consumer lets one edge of one request send ahead of it. A token is a chunk, so the window is
#: what a text stage may be ahead of a slow reader; of tensors, a few chunks fill the bytes first.
WINDOW_CHUNKS = 256
WINDOW_BYTES = 4 << 20
#: A consumer that has used up so many bytes says so, long before the window ends: arenas wait for it.
ACKNOWLEDGE_BYTES = 256 << 10


@dataclass(slots=True)
class Retained:
    """One chunk of output. `tensors` are in the arena, held there under the name `RETAINED`."""

    start: int
    end: int
    last: bool
    body: Body | None
    tensors: dict[str, Tensor]
    #: Payload bytes, as credit counts them.
    nbytes: int
    #: See `Chunk.behind`.
    behind: dict[str, list[Decision]] = field(default_factory=dict)
    #: The arena took its tensors back; it cannot be sent again.
    evicted: bool = False

    @property
    def in_arena(self) -> bool:
        return not self.evicted and any(isinstance(ref, ArenaTensor) for ref in self.tensors.values())


@dataclass(slots=True)
class OutEdge:
    """Producer's end. Invariants: chunks leave in the order of `offer`; what left since the opening stays within the
    grants, but for the one chunk that may overshoot the bytes; `log[:cursor]` has left or was not wanted."""

    request_id: str
    link: Link
    source: str
    attempt: int
    log: list[Retained] = field(default_factory=list)
    cursor: int = 0
    #: 0: not opened (yet, or by a consumer that was placed anew).
    opening: int = 0
    sent_chunks: int = 0
    sent_bytes: int = 0
    limit_chunks: int = 0
    limit_bytes: int = 0
    #: The consumer has received and opened everything before this position.
    acknowledged: int = 0
    #: Decisions (see `Decided.since`) that what was offered carries.
    told: int = 0
    _opened_at: int = 0

    @property
    def waiting(self) -> int:
        """Chunks that have not left."""
        return len(self.log) - self.cursor

    def offer(self, chunk: Retained) -> None:
        self.log.append(chunk)

    def grant(self, grant: Grant) -> bool:
        """Take over the figures of a grant; an old one that comes late changes nothing.

        Returns false when the edge opens at a position whose chunks were evicted: it cannot be served.
        """
        if grant.opening < self.opening:
            return True
        if grant.opening > self.opening:
            self.opening = grant.opening
            self.sent_chunks = self.sent_bytes = self.limit_chunks = self.limit_bytes = 0
            self.acknowledged = self._opened_at = grant.position
            self.cursor = 0
            if any(chunk.evicted and not self._passed_over(chunk) for chunk in self.log):
                return False
        self.limit_chunks = max(self.limit_chunks, grant.chunks)
        self.limit_bytes = max(self.limit_bytes, grant.nbytes)
        self.acknowledged = max(self.acknowledged, grant.position)
        return True

    def relink(self, link: Link) -> None:
        """The consumer was placed anew; its grant says where it begins."""
        self.link = link
        self.opening = 0
        self.cursor = 0
        self.limit_chunks = self.limit_bytes = self.sent_chunks = self.sent_bytes = 0

    def take(self) -> list[Chunk]:
        """Number and return what may leave now. What the consumer already has is passed over."""
        taken: list[Chunk] = []
        while self.opening and self.cursor < len(self.log):
            chunk = self.log[self.cursor]
            if self._passed_over(chunk):
                self.cursor += 1
                continue
            if chunk.evicted or self.sent_chunks >= self.limit_chunks or self.sent_bytes >= self.limit_bytes:
                break
            self.cursor += 1
            taken.append(
                Chunk(
                    request_id=self.request_id,
                    edge=self.link.edge,
                    source=self.source,
                    attempt=self.attempt,
                    opening=self.opening,
                    seq=self.sent_chunks,
                    start=chunk.start,
                    end=chunk.end,
                    last=chunk.last,
                    body=chunk.body,
                    tensors=chunk.tensors,
                    behind=chunk.behind,
                )
            )
            self.sent_chunks += 1
            self.sent_bytes += chunk.nbytes
        return taken

    def _passed_over(self, chunk: Retained) -> bool:
        """The consumer had all of it when it opened the edge."""
        return chunk.start < self._opened_at and chunk.end <= self._opened_at

    def unacknowledged(self) -> bool:
        """Something was sent in this opening that the consumer has not acknowledged."""
        return self.sent_chunks > 0 and (
            self.log[self.cursor - 1].end > self.acknowledged or self.log[self.cursor - 1].last
        )

    @property
    def outstanding(self) -> int:
        """Bytes offered that the consumer has not acknowledged."""
        total = 0
        for chunk in reversed(self.log):
            if chunk.end <= self.acknowledged:
                break
            total += chunk.nbytes
        return total

    def evictable(self) -> list[Retained]:
        """Chunks in the arena that the consumer has received, oldest first: only a replay would want them."""
        return [chunk for chunk in self.log[: self.cursor] if chunk.in_arena and chunk.end <= self.acknowledged]


Verdict = Literal["new", "duplicate", "gap", "torn", "stale"]


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
    ended: bool = False
    #: The producer is declared dead: nothing more is taken from it.
    fenced: bool = False
    #: Counted up from one that no earlier attempt of the same two ends had.
    opening: int = field(init=False)
    #: Chunks that arrived before and came again, counted.
    duplicates: int = 0
    #: What the consumer has used up since the opening, which is what credit follows.
    used_chunks: int = 0
    used_bytes: int = 0
    #: Chunks received before the opening that are not used up yet; they are not this opening's credit.
    _before_chunks: int = 0
    _received_chunks: int = 0
    _granted_chunks: int = 0
    _granted_bytes: int = 0

    def __post_init__(self) -> None:
        self.opening = (self.attempt << 16) + 1

    def open(self) -> Grant:
        """The grant that opens the edge, or extends its credit."""
        self._granted_chunks = self.used_chunks + self.window_chunks
        self._granted_bytes = self.used_bytes + self.window_bytes
        return Grant(
            request_id=self.request_id,
            edge=self.link.edge,
            source=self.source,
            attempt=self.attempt,
            opening=self.opening,
            position=self.position,
            chunks=self._granted_chunks,
            nbytes=self._granted_bytes,
        )

    def fence(self) -> None:
        self.fenced = True

    def relink(self, link: Link) -> Grant:
        """The producer was placed anew: go on from here.

        Also when everything has arrived: the producer, which computes again for others, then passes over it.
        """
        self.link = link
        self.fenced = False
        return self.reopen()

    def reopen(self) -> Grant:
        """Have everything sent that is not here, counted anew."""
        self.opening += 1
        self.seq = 0
        self._before_chunks += self._received_chunks - self.used_chunks
        self.used_chunks = self.used_bytes = self._received_chunks = 0
        return self.open()

    def lacks(self, chunks: int, opening: int) -> bool:
        """The producer says that it has sent so many chunks; some of them are not here."""
        return opening == self.opening and not self.ended and not self.fenced and self.seq < chunks

    def accept(self, chunk: Chunk) -> Verdict:
        """Judge a chunk and, when it is new, move on.

        `stale`: of another incarnation than the placed one, or of an earlier opening; `gap`: something before it is
        missing; `torn`: a part of it was received, so it was cut elsewhere than its former self; `duplicate`: all of it
        was received already.
        """
        if self.fenced or chunk.source != self.link.incarnation or chunk.opening != self.opening:
            return "stale"
        if self.ended or chunk.seq < self.seq:
            self.duplicates += 1
            return "duplicate"
        if chunk.seq > self.seq or chunk.start > self.position:
            return "gap"
        if chunk.start < self.position:
            self.fenced = True
            return "torn"
        self.seq += 1
        self.position = chunk.end
        self._received_chunks += 1
        self.ended = chunk.last
        return "new"

    def used(self, nbytes: int) -> Grant | None:
        """The consumer is done with one chunk. Returns a grant once half a window or much memory is used up, none after
        the end."""
        if self._before_chunks:
            self._before_chunks -= 1
            return None
        self.used_chunks += 1
        self.used_bytes += nbytes
        if self.ended or self.fenced:
            return None
        chunks = self.used_chunks + self.window_chunks - self._granted_chunks
        nbytes_since = self.used_bytes + self.window_bytes - self._granted_bytes
        if chunks * 2 < self.window_chunks and nbytes_since < min(ACKNOWLEDGE_BYTES, self.window_bytes // 2):
            return None
        return self.open()


def payload_bytes(body: Body | None, sizes: int) -> int:
    """Bytes that credit counts for a chunk: its tensors' `sizes` and the text in it."""
    return sizes + len(getattr(body, "text", ""))
