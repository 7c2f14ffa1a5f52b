"""One request's life as a state machine: events in, actions out. Pure, so that every interleaving can be tested.

    queued -> running -> completed | failed | cancelled -> gone
         \\-> rejected (gone at once)

After its outcome is known a request stays as a tombstone until every worker that ever got it has said `closed`, so a
late frame of it is recognised and a cancel can never be overtaken by what it cancels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from omni_common.frames import CLIENT, Close, Closed, Failed, Link, Params, Place, Placed, Plain, Rejected, Submit
from omni_common.pipeline import Plan, edge_name


class Phase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


ENDED = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED, Phase.REJECTED})


@dataclass(frozen=True, slots=True)
class Assignment:
    """The replica chosen for one stage."""

    stage: str
    incarnation: str
    inbox: str


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Assigned:
    """A replica was chosen for every stage."""

    replicas: dict[str, Assignment]
    #: Remaining seconds of the request.
    total_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """It cannot run: the queue's deadline passed, or a stage has no replica."""

    code: str
    message: str
    status: int
    retry_after_s: float = 0.0
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The gateway has the end of every final edge."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    reason: str
    #: False when the gateway itself is dead.
    gateway_alive: bool = True


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A stage reported an error for this request."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A worker that may hold this request is dead."""

    incarnation: str
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class HolderClosed:
    """A worker has nothing of this request any more."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The request's total deadline passed."""


Event = Assigned | Refusal | Finished | Cancelled | StageFailed | ReplicaLost | HolderClosed | Expired

# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send `frame` to the peer of this incarnation."""

    peer: str
    frame: Plain


@dataclass(slots=True)
class Request:
    """Invariants: `holders` is not empty while running; a request that ended with no holders is gone."""

    submit: Submit
    gateway: str
    gateway_inbox: str
    plan: Plan
    #: Clock time of the submission.
    since: float
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    replicas: dict[str, Assignment] = field(default_factory=dict)
    #: Incarnations that got the request and have not said `closed`.
    holders: set[str] = field(default_factory=set)
    gateway_alive: bool = True
    #: What happened, for logs and for the message of an impossible event.
    story: list[str] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def gone(self) -> bool:
        return self.phase in ENDED and not self.holders

    def apply(self, event: Event) -> list[Send]:
        """Advance by one event. An event that means nothing in this phase changes nothing."""
        handler = TRANSITIONS.get((self.phase, type(event)))
        if handler is None:
            return []
        before = self.phase
        actions = handler(self, event)
        self.story.append(f"{type(event).__name__}: {before.value} -> {self.phase.value}")
        return actions


def _assign(request: Request, event: Assigned) -> list[Send]:
    request.phase = Phase.RUNNING
    request.attempt += 1
    request.replicas = event.replicas
    request.holders = {replica.incarnation for replica in event.replicas.values()}
    ends = {stage: (replica.incarnation, replica.inbox) for stage, replica in event.replicas.items()}
    ends[CLIENT] = (request.gateway, request.gateway_inbox)

    def links(stage: str) -> tuple[list[Link], list[Link]]:
        sources = [Link(edge_name(other, stage), other, *ends[other]) for other in request.plan.into(stage)]
        sinks = [Link(edge_name(stage, other), other, *ends[other]) for other in request.plan.out_of(stage)]
        return sources, sinks

    submit = request.submit
    actions = []
    # Consumers first: their grants are then on the way when their producers learn of the request.
    for stage in reversed(request.plan.stages):
        sources, sinks = links(stage)
        place = Place(
            request_id=request.request_id,
            pipeline=submit.pipeline,
            stage=stage,
            attempt=request.attempt,
            seed=submit.seed,
            params=_params(submit, stage),
            sources=sources,
            sinks=sinks,
            total_s=event.total_s,
            trace=submit.trace,
        )
        actions.append(Send(event.replicas[stage].incarnation, place))
    sources, sinks = links(CLIENT)
    actions.append(Send(request.gateway, Placed(request.request_id, request.attempt, sources, sinks)))
    return actions


def _params(submit: Submit, stage: str) -> Params:
    return submit.params.get(stage, {})


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
    if failed.attempt != request.attempt:
        return []
    return _fail(request, failed.code, failed.message, failed.stage, failed.status, failed.param)


def _expire(request: Request, event: Expired) -> list[Send]:
    message = f"the request took longer than {request.submit.total_s:g} s"
    return _fail(request, "deadline_exceeded", message, "", 504)


def _replica_lost(request: Request, event: ReplicaLost) -> list[Send]:
    if event.incarnation not in request.holders:
        return []
    request.holders.discard(event.incarnation)
    stages = [name for name, replica in request.replicas.items() if replica.incarnation == event.incarnation]
    message = f"stage {' and '.join(stages)} was lost while it worked on the request: {event.name} {event.why}"
    return _fail(request, "stage_lost", message, stages[0], 503)


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
    (Phase.RUNNING, Finished): _finish,
    (Phase.RUNNING, Cancelled): _cancel,
    (Phase.RUNNING, StageFailed): _stage_failed,
    (Phase.RUNNING, ReplicaLost): _replica_lost,
    (Phase.RUNNING, Expired): _expire,
    **{(phase, HolderClosed): _holder_closed for phase in ENDED},
    **{(phase, ReplicaLost): _holder_lost for phase in ENDED},
    **{(phase, Cancelled): _gateway_lost for phase in ENDED},
}
