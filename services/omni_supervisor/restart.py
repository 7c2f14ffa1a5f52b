"""When a process that ended is started again. Pure: times are given, events in, actions out."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Waits in seconds.

    The death of a process that was ready costs a load and nothing else, unless it happens more than `burst` times
    within `burst_s`. A process that never became ready is most likely misconfigured: it is started again ever more
    slowly, and at last not at all.
    """

    first_s: float = 0.1
    max_s: float = 30.0
    #: The longest wait for a unit that has once been ready; it is never given up.
    proven_max_s: float = 5.0
    burst: int = 5
    burst_s: float = 30.0
    #: So many starts in a row are the last of a unit that has never been ready.
    max_failed_starts: int = 5


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    failed_starts: int


class Restarts:
    """The history of one unit: tell it `ready` and `exited`, and do what `exited` says."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        #: The process that runs now, and any process of this unit, has been ready.
        self._ready = False
        self._proven = False
        #: Starts in a row that failed.
        self._failed_starts = 0
        #: Times of recent deaths after readiness.
        self._deaths: deque[float] = deque()

    def ready(self) -> None:
        """It serves (told as often as it is seen)."""
        self._ready = self._proven = True
        self._failed_starts = 0

    def exited(self, now: float) -> Restart | GiveUp:
        """It ended; with whatever status, nobody had asked for it."""
        if self._ready:
            self._ready = False
            self._deaths.append(now)
            while now - self._deaths[0] > self._policy.burst_s:
                self._deaths.popleft()
            return self._restart(len(self._deaths) - self._policy.burst)
        self._failed_starts += 1
        if not self._proven and self._failed_starts >= self._policy.max_failed_starts:
            return GiveUp(self._failed_starts)
        return self._restart(self._failed_starts)

    def _restart(self, failures: int) -> Restart:
        if failures <= 0:
            return Restart(0.0)
        # The exponent is bounded only to keep the float finite.
        delay = self._policy.first_s * 2 ** min(failures - 1, 32)
        return Restart(min(delay, self._policy.proven_max_s if self._proven else self._policy.max_s))
