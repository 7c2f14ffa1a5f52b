"""What one process has of a request: the ends of its edges, and the decisions behind what it received. Pure.

Chunks carry decisions on: whoever holds output holds every decision behind it, of every stage further up, so that what
was heard is not decided anew even if all that decided it dies at once.
"""

from dataclasses import dataclass, field

from omni_common.edges import InEdge, OutEdge, Retained, Verdict, payload_bytes
from omni_common.frames import CLIENT, Body, Chunk, Decision, Held, Recover, Tensor


class Decided:
    """The decisions of each stage, in order and without gaps from position 0."""

    def __init__(self) -> None:
        self._known: dict[str, list[Decision]] = {}
        self._log: list[tuple[str, Decision]] = []

    def learn(self, stage: str, decisions: list[Decision]) -> None:
        """Add what goes on where the known ends. What is known already, or does not fit, changes nothing."""
        known = self._known.setdefault(stage, [])
        for decision in decisions:
            end = known[-1].end if known else 0
            if decision.start == end and (decision.end > end or decision.last) and not (known and known[-1].last):
                known.append(decision)
                self._log.append((stage, decision))

    def of(self, stage: str) -> list[Decision]:
        return list(self._known.get(stage, ()))

    def since(self, count: int) -> tuple[dict[str, list[Decision]], int]:
        """What was learnt after the first `count` decisions, by stage, and how many there are now."""
        fresh: dict[str, list[Decision]] = {}
        for stage, decision in self._log[count:]:
            fresh.setdefault(stage, []).append(decision)
        return fresh, len(self._log)


@dataclass(slots=True)
class Ends:
    """The ends of a request's edges in one process, by the edges' names, and what it knows of decisions further up."""

    outs: dict[str, OutEdge] = field(default_factory=dict)
    ins: dict[str, InEdge] = field(default_factory=dict)
    decided: Decided = field(default_factory=Decided)

    def offer(
        self, out: OutEdge, start: int, end: int, last: bool, body: Body | None, tensors: dict[str, Tensor], size: int
    ) -> None:
        """Queue output on one of `outs`, with the decisions behind it. `size`: bytes of its tensors."""
        behind, out.told = self.decided.since(out.told)
        out.offer(Retained(start, end, last, body, tensors, payload_bytes(body, size), behind))

    def accept(self, chunk: Chunk) -> tuple[InEdge | None, Verdict]:
        """The end that the chunk is for, and what that says; of a new one the decisions are learnt."""
        edge = self.ins.get(chunk.edge)
        if edge is None:
            return None, "stale"
        verdict = edge.accept(chunk)
        if verdict == "new" and edge.link.stage != CLIENT:
            for stage, decisions in chunk.behind.items():
                self.decided.learn(stage, decisions)
            self.decided.learn(edge.link.stage, [Decision(chunk.start, chunk.end, chunk.last, chunk.body)])
        return edge, verdict

    def recover(self, recover: Recover) -> Held | None:
        """A stage further up is dead: take nothing more from it and say what is known of its output.

        None: its successor is linked already.
        """
        edge = self.ins.get(recover.edge)
        if edge is not None:
            # A scheduler that came back empty does not know who the dead producer was.
            if recover.incarnation not in ("", edge.link.incarnation):
                return None
            edge.fence()
        decisions = self.decided.of(recover.edge.partition(">")[0])
        return Held(recover.request_id, recover.edge, recover.incarnation, decisions)
