"""What one process knows of a request's decisions: those behind what it received, of every stage further up. Pure.

Chunks carry them on: whoever holds output holds every decision behind it, so that what was heard is not decided anew
even if all that decided it dies at once.
"""

from omni_common.frames import Decision


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
