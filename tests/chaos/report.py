"""What a run of blows gives: the table of stage x phase, and the counters."""

import json
from collections import Counter
from dataclasses import dataclass, field, fields

from chaos.plan import PHASES, cells


@dataclass(slots=True)
class Report:
    seed: int
    #: (victim, phase) -> blows that hit undelivered work there.
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    together: Counter[str] = field(default_factory=Counter)
    #: Blows whose moment did not come, or that hit nothing undelivered; they do not count.
    misses: Counter[str] = field(default_factory=Counter)
    #: Processes that died.
    deaths: int = 0
    requests: int = 0
    #: Refused with 503 and asked again, because no replica of a stage lived.
    refused: int = 0
    #: What was wrong with an answer, for people.
    lost: list[str] = field(default_factory=list)
    #: Longest silence in seconds, after a blow that hit a stage, of each request that it hit.
    resumed: list[float] = field(default_factory=list)
    replays: int = 0
    duplicates: int = 0
    resends: int = 0
    evicted: int = 0
    #: Positions computed more than once by one process that lived on.
    recomputed: int = 0
    seconds: float = 0.0

    @property
    def blows(self) -> int:
        return sum(self.hits.values())

    def empty(self) -> list[tuple[str, str]]:
        return [cell for cell in cells() if not self.hits[cell]]

    def quantile(self, share: float) -> float:
        ordered = sorted(self.resumed)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

    def table(self) -> str:
        victims = list(dict.fromkeys(victim for victim, _ in cells()))
        lines = ["".join([f"{'':10}", *(f"{phase:>10}" for phase in PHASES)])]
        lines += [
            "".join([f"{victim:10}", *(f"{self.hits[victim, phase]:>10}" for phase in PHASES)]) for victim in victims
        ]
        lines += [
            f"seed {self.seed}: {self.blows} blows, {self.deaths} deaths, {self.requests} requests, "
            f"{len(self.lost)} lost, {self.refused} refused, {self.seconds:.0f} s; missed {sum(self.misses.values())}",
            f"signals {dict(self.signals)}; together {dict(self.together)}",
            f"replays {self.replays}, duplicates cut {self.duplicates}, resends {self.resends}, "
            f"evicted {self.evicted}, recomputed by survivors {self.recomputed}",
            f"time to resume: p50 {self.quantile(0.5):.3f} s, p95 {self.quantile(0.95):.3f} s, "
            f"max {self.quantile(1.0):.3f} s",
        ]
        return "\n".join(lines)

    def json(self) -> str:
        plain = {slot.name: getattr(self, slot.name) for slot in fields(self)}
        plain["hits"] = {f"{victim} {phase}": self.hits[victim, phase] for victim, phase in cells()}
        plain["resumed"] = {"p50": self.quantile(0.5), "p95": self.quantile(0.95), "max": self.quantile(1.0)}
        return json.dumps(plain, indent=1)
