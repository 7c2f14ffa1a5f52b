"""One request's life as a state machine: events in, actions out. Pure, so that every interleaving can be tested.

    queued -> running -> completed | failed | cancelled -> gone
         \\      ^ |
          \\     | v
           \\  recovering
            -> rejected (gone at once)

When a replica dies, what lives below its stages is told to take nothing more from it and asked what it has of their
output, or knows of it (`recover` -> `held`); when all have answered and a replica is free for each lost stage, those
are placed anew at once, each being given the longest prefix that anybody told, and their live neighbours are linked to
them. A further death on the way adds to what is lost, and is a reason to ask again.

After its outcome is known a request stays as a tombstone until every worker that ever got it has said `closed`, so a
late frame of it is recognised and a cancel can never be overtaken by what it cancels.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from omni_common.frames import (
    CLIENT,
    Close,
    Closed,
    Decision,
    Failed,
    Link,
    Place,
    Placed,
    Recover,
    Rejected,
    Relink,
    Submit,
)
from omni_common.pipeline import Plan, edge_name
from omni_scheduler.events import (
    Answered,
    Assigned,
    Assignment,
    Cancelled,
    Claimed,
    Event,
    Finished,
    HolderClosed,
    Hopeless,
    Refusal,
    ReplicaLost,
    Send,
    StageFailed,
    Unclaimed,
)


class Phase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    RECOVERING = "recovering"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


ALIVE = frozenset({Phase.RUNNING, Phase.RECOVERING})
ENDED = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED, Phase.REJECTED})

#: Deaths of a stage's replica in a row without a new position at its consumers: after one the request is a suspect and
#: runs alone on a replica, after this many it has failed and the stage lives.
POISON_DEATHS = 3


@dataclass(slots=True)
class Lost:
    """A stage without a replica, and what its consumers have of its output."""

    #: Clock time of the death.
    since: float
    #: Why, for people.
    why: str
    #: The dead incarnation, empty after a restart of the scheduler.
    incarnation: str
    #: It said goodbye.
    left: bool = False
    #: How many answers to `recover` are due, by peer.
    asked: Counter[str] = field(default_factory=Counter)
    #: A consumer has answered, so the end of `decisions` tells how far the stage came.
    witnessed: bool = False
    #: The death has been counted.
    judged: bool = False
    #: The longest that anybody has or knows.
    decisions: list[Decision] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.decisions[-1].end if self.decisions else 0


@dataclass(slots=True)
class Request:
    """Invariants: while alive every stage of the plan is in `replicas` or in `lost`; `holders` has every incarnation
    in `replicas`; a request that ended with no holders is gone."""

    submit: Submit
    gateway: str
    gateway_inbox: str
    plan: Plan
    #: Clock time of the submission.
    since: float
    phase: Phase = Phase.QUEUED
    #: How often anything of it was placed.
    attempt: int = 0
    replicas: dict[str, Assignment] = field(default_factory=dict)
    lost: dict[str, Lost] = field(default_factory=dict)
    #: After a restart of the scheduler: stages that a worker may still claim.
    claimable: set[str] = field(default_factory=set)
    #: Incarnations that got the request and have not said `closed`.
    holders: set[str] = field(default_factory=set)
    gateway_alive: bool = True
    #: By stage: deaths in a row without progress, and the position at the last one.
    deaths: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    #: What happened, for logs and for the message of an impossible event.
    story: list[str] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def gone(self) -> bool:
        return self.phase in ENDED and not self.holders

    @property
    def needs(self) -> list[str]:
        """Stages to be placed now; empty while an answer is out."""
        if self.phase is Phase.QUEUED:
            return self.plan.stages
        if self.phase is Phase.RECOVERING and not self.claimable and not any(lost.asked for lost in self.lost.values()):
            return [stage for stage in self.plan.stages if stage in self.lost]
        return []

    def is_suspect(self, stage: str) -> bool:
        """It may be what killed the stage's last replica: to be run alone."""
        return self.deaths.get(stage, 0) > 0

    def apply(self, event: Event) -> list[Send]:
        """Advance by one event. An event that means nothing in this phase changes nothing."""
        handler = TRANSITIONS.get((self.phase, type(event)))
        if handler is None:
            return []
        before = self.phase
        actions = handler(self, event)
        self.story.append(f"{type(event).__name__}: {before.value} -> {self.phase.value}")
        return actions

    def end(self, stage: str) -> tuple[str, str]:
        """(incarnation, inbox) of a live stage or the client."""
        if stage == CLIENT:
            return self.gateway, self.gateway_inbox
        replica = self.replicas[stage]
        return replica.incarnation, replica.inbox

    def link(self, source: str, target: str, other: str) -> Link:
        """The edge as the end that is not `other` sees it."""
        return Link(edge_name(source, target), other, *self.end(other))

    def links(self, stage: str) -> tuple[list[Link], list[Link]]:
        """(sources, sinks) of a stage or the client."""
        return (
            [self.link(other, stage, other) for other in self.plan.into(stage)],
            [self.link(stage, other, other) for other in self.plan.out_of(stage)],
        )


def _assign(request: Request, event: Assigned) -> list[Send]:
    sends = _place(request, event.replicas, event.total_s)
    sources, sinks = request.links(CLIENT)
    return [*sends, Send(request.gateway, Placed(request.request_id, request.attempt, sources, sinks))]


def _reassign(request: Request, event: Assigned) -> list[Send]:
    """Lost stages run again: linked to what lives, given what was decided."""
    resume = {stage: request.lost.pop(stage).decisions for stage in event.replicas}
    sends = _place(request, event.replicas, event.total_s, resume)
    for source, target in request.plan.edges:
        for moved, other in ((source, target), (target, source)):
            if moved in event.replicas and other not in event.replicas:
                frame = Relink(request.request_id, request.link(source, target, moved))
                sends.append(Send(request.end(other)[0], frame))
    return sends


def _place(
    request: Request,
    replicas: dict[str, Assignment],
    total_s: float,
    resume: dict[str, list[Decision]] | None = None,
) -> list[Send]:
    request.phase = Phase.RUNNING
    request.attempt += 1
    request.replicas |= replicas
    request.holders |= {replica.incarnation for replica in replicas.values()}
    submit = request.submit
    sends = []
    # Consumers first: their grants are then on the way when their producers learn of the request.
    for stage in reversed(request.plan.stages):
        if stage in replicas:
            sources, sinks = request.links(stage)
            place = Place(
                request_id=request.request_id,
                pipeline=submit.pipeline,
                stage=stage,
                attempt=request.attempt,
                seed=submit.seed,
                params=submit.params.get(stage, {}),
                sources=sources,
                sinks=sinks,
                total_s=total_s,
                trace=submit.trace,
                resume=(resume or {}).get(stage, []),
            )
            sends.append(Send(replicas[stage].incarnation, place))
    return sends


def _refuse(request: Request, event: Refusal) -> list[Send]:
    request.phase = Phase.REJECTED
    rejected = Rejected(request.request_id, event.code, event.message, event.status, event.retry_after_s, event.param)
    return [Send(request.gateway, rejected)]


def _finish(request: Request, event: Finished) -> list[Send]:
    request.phase = Phase.COMPLETED
    return _close(request, "completed")


def _cancel(request: Request, event: Cancelled) -> list[Send]:
    request.phase = Phase.CANCELLED
    request.gateway_alive &= event.gateway_alive
    return _close(request, event.reason or "cancelled")


def _fail(request: Request, code: str, message: str, stage: str, status: int, param: str | None = None) -> list[Send]:
    request.phase = Phase.FAILED
    failed = Failed(request.request_id, code, message, stage, status, param, request.attempt)
    return [Send(request.gateway, failed), *_close(request, f"failed: {code}")]


def _stage_failed(request: Request, event: StageFailed) -> list[Send]:
    failed = event.failed
    replica = request.replicas.get(failed.stage)
    if replica is None or replica.incarnation != event.incarnation:
        return []
    return _fail(request, failed.code, failed.message, failed.stage, failed.status, failed.param)


def _hopeless(request: Request, event: Hopeless) -> list[Send]:
    stage = next((stage for stage in request.plan.stages if stage in request.lost), "")
    return _fail(request, event.code, event.message, stage, event.status)


def _replica_lost(request: Request, event: ReplicaLost) -> list[Send]:
    if event.incarnation not in request.holders:
        return []
    request.holders.discard(event.incarnation)
    for lost in request.lost.values():
        del lost.asked[event.incarnation]
    stages = [name for name, replica in request.replicas.items() if replica.incarnation == event.incarnation]
    # Those lost earlier are asked about again: what came from the newly dead since the first answer counts too.
    again = list(request.lost) if stages and not request.claimable else []
    sends: list[Send] = []
    for stage in stages:
        del request.replicas[stage]
        request.lost[stage] = Lost(event.now, f"{event.name} {event.why}", event.incarnation, event.left)
        request.phase = Phase.RECOVERING
    for stage in stages + again:
        sends += _ask(request, stage)
    return sends


def _ask(request: Request, stage: str) -> list[Send]:
    """Ask what lives below a lost stage what it has of its output; at the same time nobody takes from the dead any
    more."""
    lost = request.lost[stage]
    sends = []
    for other in request.plan.below(stage):
        if other not in request.lost:
            peer = request.end(other)[0]
            lost.asked[peer] += 1
            frame = Recover(request.request_id, edge_name(stage, other), lost.incarnation)
            sends.append(Send(peer, frame))
    return sends


def _answered(request: Request, event: Answered) -> list[Send]:
    held = event.held
    stage, _, consumer = held.edge.partition(">")
    lost = request.lost.get(stage)
    if lost is None or lost.incarnation != held.incarnation or (consumer in request.lost):
        return []
    peer = request.end(consumer)[0]
    if peer not in lost.asked:
        return []
    lost.asked[peer] -= 1
    if not lost.asked[peer]:
        del lost.asked[peer]
    if len(held.decisions) > len(lost.decisions):
        lost.decisions = held.decisions
    lost.witnessed |= (stage, consumer) in request.plan.edges
    if lost.asked or lost.left or lost.judged or not lost.witnessed or not lost.incarnation:
        return []
    return _judge_death(request, stage, lost)


def _judge_death(request: Request, stage: str, lost: Lost) -> list[Send]:
    """Count a death without progress against the request."""
    lost.judged = True
    progressed = lost.position > request.reached.get(stage, 0)
    request.deaths[stage] = 0 if progressed else request.deaths.get(stage, 0) + 1
    request.reached[stage] = max(lost.position, request.reached.get(stage, 0))
    if request.deaths[stage] < POISON_DEATHS:
        return []
    message = f"stage {stage} died {POISON_DEATHS} times while it worked on this request: {lost.why}"
    return _fail(request, "poison_request", message, stage, 500)


def _claimed(request: Request, event: Claimed) -> list[Send]:
    """A worker goes on with a stage as if nothing had happened."""
    stage = event.replica.stage
    if stage not in request.claimable:
        return [Send(event.replica.incarnation, Close(request.request_id, "placed elsewhere"))]
    request.claimable.discard(stage)
    request.attempt = max(request.attempt, event.attempt)
    request.replicas[stage] = event.replica
    request.holders.add(event.replica.incarnation)
    del request.lost[stage]
    if request.claimable:
        return []
    return _end_claims(request)


def _restate_links(request: Request) -> list[Send]:
    """Words of an earlier scheduler may have died with it: tell every live end of an edge who the other is."""
    sends = []
    for source, target in request.plan.edges:
        if source not in request.lost and target not in request.lost:
            for end, other in ((source, target), (target, source)):
                frame = Relink(request.request_id, request.link(source, target, other))
                sends.append(Send(request.end(end)[0], frame))
    return sends


def _unclaimed(request: Request, event: Unclaimed) -> list[Send]:
    """What nobody claimed died while there was no scheduler."""
    if not request.claimable:
        return []
    for stage in request.claimable:
        request.lost[stage].since = event.now
    request.claimable = set()
    return _end_claims(request)


def _end_claims(request: Request) -> list[Send]:
    """What runs is known: it goes on, and is asked about what is lost."""
    if not request.lost:
        request.phase = Phase.RUNNING
    sends = _restate_links(request)
    for stage in request.plan.stages:
        if stage in request.lost:
            sends += _ask(request, stage)
    return sends


def _holder_lost(request: Request, event: ReplicaLost) -> list[Send]:
    return _holder_closed(request, HolderClosed(event.incarnation))


def _holder_closed(request: Request, event: HolderClosed) -> list[Send]:
    if event.incarnation not in request.holders:
        return []
    request.holders.discard(event.incarnation)
    return _tell_gone(request)


def _gateway_lost(request: Request, event: Cancelled) -> list[Send]:
    request.gateway_alive &= event.gateway_alive
    return []


def _close(request: Request, reason: str) -> list[Send]:
    closes = [Send(holder, Close(request.request_id, reason)) for holder in sorted(request.holders)]
    return closes + _tell_gone(request)


def _tell_gone(request: Request) -> list[Send]:
    if request.gone and request.gateway_alive:
        return [Send(request.gateway, Closed(request.request_id))]
    return []


#: (phase, event) -> what happens. A pair that is not here means nothing: the event came late or twice.
TRANSITIONS: dict[tuple[Phase, type[Event]], Callable[..., list[Send]]] = {
    (Phase.QUEUED, Assigned): _assign,
    (Phase.QUEUED, Refusal): _refuse,
    (Phase.QUEUED, Cancelled): _cancel,
    (Phase.RECOVERING, Assigned): _reassign,
    (Phase.RECOVERING, Answered): _answered,
    (Phase.RECOVERING, Claimed): _claimed,
    (Phase.RECOVERING, Unclaimed): _unclaimed,
    **{(phase, Finished): _finish for phase in ALIVE},
    **{(phase, Cancelled): _cancel for phase in ALIVE},
    **{(phase, StageFailed): _stage_failed for phase in ALIVE},
    **{(phase, ReplicaLost): _replica_lost for phase in ALIVE},
    **{(phase, Hopeless): _hopeless for phase in ALIVE},
    **{(phase, HolderClosed): _holder_closed for phase in ENDED},
    **{(phase, ReplicaLost): _holder_lost for phase in ENDED},
    **{(phase, Cancelled): _gateway_lost for phase in ENDED},
}
