"""What may happen to a request (events), and what is to be done about it (one action: send)."""

from dataclasses import dataclass

from omni_common.frames import Failed, Held, Plain


@dataclass(frozen=True, slots=True)
class Assignment:
    """The replica chosen for one stage."""

    stage: str
    incarnation: str
    inbox: str


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Assigned:
    """A replica was chosen for every stage that has none."""

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
    incarnation: str


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A worker that may hold this request is dead."""

    incarnation: str
    name: str
    why: str
    now: float
    #: It said goodbye: no request can have killed it.
    left: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """A consumer said what it has of a dead stage's output."""

    held: Held


@dataclass(frozen=True, slots=True)
class Claimed:
    """After a restart of the scheduler: a worker has this stage of the request."""

    replica: Assignment
    attempt: int


@dataclass(frozen=True, slots=True)
class Unclaimed:
    """The time for claims is over."""

    now: float


@dataclass(frozen=True, slots=True)
class HolderClosed:
    """A worker has nothing of this request any more."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Hopeless:
    """It cannot go on: no replica came in time, or the request's own time is over."""

    code: str
    message: str
    status: int


Event = (
    Assigned
    | Refusal
    | Finished
    | Cancelled
    | StageFailed
    | ReplicaLost
    | Answered
    | Claimed
    | Unclaimed
    | HolderClosed
    | Hopeless
)

# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send `frame` to the peer of this incarnation."""

    peer: str
    frame: Plain
