"""The registry of peers and the choice of replicas. Pure: times are given."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from omni_common.frames import Beat, Hello, Replica, StageStatus, State

#: Seconds without a frame after which a peer is asked about, and declared dead.
SUSPECT_S = 3.0
DEAD_S = 5.0
_NAME = re.compile(r"[\w.:-]{1,100}", re.ASCII)


@dataclass(slots=True)
class Peer:
    """One process that said hello."""

    hello: Hello
    seen: float
    since: float
    state: State = field(default_factory=lambda: State(state="loading"))
    beat: Beat = field(default_factory=Beat)
    #: When the beat's step counter last changed, or the engine last became busy.
    progress: float = 0.0
    #: Requests placed here that are not closed.
    placed: set[str] = field(default_factory=set)
    #: A request that may have killed a replica and runs here, or will, with no other; empty: none.
    alone: str = ""

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    @property
    def ready(self) -> bool:
        return self.state.state == "ready"

    @property
    def free(self) -> int:
        return self.hello.slots - len(self.placed)


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What the scheduler needs of a pipeline file's stage."""

    digest: str
    stall_s: float
    load_s: float


class Fleet:
    """Every live peer by incarnation."""

    def __init__(self, stages: dict[str, StageSettings], recover_s: float) -> None:
        self.stages = stages
        self.peers: dict[str, Peer] = {}
        #: When a replica of the stage died last.
        self.died: dict[str, float] = {}
        self._recover_s = recover_s

    def refusal(self, hello: Hello, version: int) -> str:
        """Why this peer cannot take part; empty when it can."""
        if not _NAME.fullmatch(hello.name):
            return "a peer's name has 1 to 100 letters, digits and any of . : _ -"
        if hello.version != version:
            return f"protocol version {hello.version} of {hello.name} does not fit version {version} of the scheduler"
        if hello.role != "worker":
            return ""
        settings = self.stages.get(hello.stage)
        if settings is None:
            return f"no pipeline served here has a stage {hello.stage!r}; it has {', '.join(sorted(self.stages))}"
        if hello.digest != settings.digest:
            return (
                f"stage {hello.stage}: the worker's engine, model or options differ from the scheduler's "
                f"(digest {hello.digest}, expected {settings.digest}); start both with the same pipeline file and --set"
            )
        return ""

    def of_stage(self, stage: str) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.hello.stage == stage]

    def choose(self, stage: str, suspect: str = "") -> Peer | None:
        """The ready replica with the smallest share of its slots taken, for a `suspect` request one with none taken.

        None when all are full, kept for a suspect, or none is ready.
        """
        able = [peer for peer in self.of_stage(stage) if peer.ready and peer.free > 0 and peer.alone in ("", suspect)]
        if suspect:
            able = [peer for peer in able if not peer.placed]
        return min(able, key=lambda peer: (len(peer.placed) / peer.hello.slots, peer.name), default=None)

    def reserve(self, stage: str, suspect: str) -> None:
        """Let the least loaded replica run empty for a suspect; else requests that come later would never let it."""
        able = [peer for peer in self.of_stage(stage) if peer.ready]
        if any(peer.alone == suspect for peer in able):
            return
        free = [peer for peer in able if not peer.alone]
        if free:
            min(free, key=lambda peer: (len(peer.placed), peer.name)).alone = suspect

    def free_reserved(self, suspect: str) -> None:
        for peer in self.peers.values():
            if peer.alone == suspect:
                peer.alone = ""

    def missing(self, stages: Iterable[str]) -> list[str]:
        """Those of `stages` that have no ready replica."""
        return [stage for stage in stages if not any(peer.ready for peer in self.of_stage(stage))]

    def starting(self, stage: str) -> bool:
        """A replica of the stage loads, or is there."""
        return any(peer.state.state in ("loading", "ready") for peer in self.of_stage(stage))

    def expects(self, stage: str, now: float) -> bool:
        """A replica of the stage is on its way, or died so lately that its restart may not have said hello."""
        return self.starting(stage) or now - self.died.get(stage, -math.inf) <= self._recover_s

    def silent(self, now: float) -> list[tuple[str, str]]:
        """(incarnation, why) of every peer that must be declared dead now."""
        dead = []
        for peer in self.peers.values():
            settings = self.stages.get(peer.hello.stage)
            loading = settings is not None and peer.state.state == "loading"
            quiet = now - peer.seen
            if settings and loading and now - peer.since > settings.load_s:
                dead.append((peer.incarnation, f"not ready after {settings.load_s:.0f} s ({peer.state.detail})"))
            elif quiet > (settings.load_s if settings and loading else DEAD_S):
                dead.append((peer.incarnation, f"silent for {quiet:.1f} s"))
            elif settings and peer.ready and peer.beat.busy and now - peer.progress > settings.stall_s:
                dead.append((peer.incarnation, f"hung: busy without progress for {now - peer.progress:.1f} s"))
        return dead

    def beat(self, peer: Peer, beat: Beat, now: float) -> None:
        if beat.steps != peer.beat.steps or not peer.beat.busy:
            peer.progress = now
        peer.beat = beat

    def status(self, stage: str, waiting: int) -> StageStatus:
        peers = self.of_stage(stage)
        ready = sum(peer.ready for peer in peers)
        if ready:
            missing = ""
        elif peers:
            states = {f"{p.name} is {p.state.state}" + (f": {p.state.detail}" if p.state.detail else "") for p in peers}
            missing = "; ".join(sorted(states))
        else:
            missing = "no worker is registered"
        return StageStatus(stage, ready, waiting, missing)

    def replicas(self, now: float) -> list[Replica]:
        return [
            Replica(
                name=peer.name,
                incarnation=peer.incarnation,
                stage=peer.hello.stage,
                state=peer.state.state,
                detail=peer.state.detail,
                progress=peer.state.progress,
                pid=peer.hello.pid,
                host=peer.hello.host,
                slots=peer.hello.slots,
                running=len(peer.placed),
                steps=peer.beat.steps,
                produced=peer.beat.produced,
                step_s=peer.beat.step_s,
                arena_used=peer.beat.arena_used,
                arena_total=peer.beat.arena_total,
                sent=peer.beat.sent,
                evicted=peer.beat.evicted,
                duplicates=peer.beat.duplicates,
                resends=peer.beat.resends,
                silent_s=round(now - peer.seen, 3),
            )
            for peer in sorted(self.peers.values(), key=lambda peer: peer.name)
            if peer.hello.role == "worker"
        ]
