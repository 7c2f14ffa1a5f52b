"""When a process that ended is started again. Pure: times are given, events in, actions out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds. The first restart after a good run is quick, so that one death costs little more than the load."""

    first_s: float = 0.1
    max_s: float = 30.0
    #: Ready for this long, a process has proved itself: what failed before no longer counts.
    stable_s: float = 60.0
    #: So many starts in a row that never became ready are the last.
    max_failed_starts: int = 5


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    failed_starts: int


class Restarts:
    """The history of one process: tell it `ready` and `exited`, and do what `exited` says."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ready_since: float | None = None
        #: Exits in a row without a stable run between them, and among the last of them those before readiness.
        self._failures = 0
        self._failed_starts = 0

    def ready(self, now: float) -> None:
        """It serves (told as often as it is seen)."""
        if self._ready_since is None:
            self._ready_since = now
            self._failed_starts = 0

    def exited(self, now: float) -> Restart | GiveUp:
        """It ended; with whatever status, nobody had asked for it."""
        if self._ready_since is None:
            self._failed_starts += 1
        elif now - self._ready_since >= self._policy.stable_s:
            self._failures = 0
        self._ready_since = None
        self._failures += 1
        if self._failed_starts >= self._policy.max_failed_starts:
            return GiveUp(self._failed_starts)
        # The exponent is bounded only to keep the float finite.
        delay = self._policy.first_s * 2 ** min(self._failures - 1, 32)
        return Restart(min(delay, self._policy.max_s))
