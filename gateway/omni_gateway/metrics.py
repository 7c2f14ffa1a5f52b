"""What `/metrics` tells: requests as the gateway saw them, and the fleet as the scheduler last reported it."""

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from omni_common.frames import Fleet


class Outcome(Enum):
    SUCCESS = "success"
    ERROR = "error"
    #: The client left before the end.
    ABORT = "abort"


_SECONDS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0)


Labels = TypeVar("Labels", bound=tuple[str, ...])


class Metrics:
    """Counters of one application, in a registry of their own. Times are seconds since the request arrived."""

    def __init__(self, fleet: Callable[[], Fleet | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_FleetCollector(fleet))
        own = self.registry
        self.requests = Counter(
            "omni_requests", "HTTP requests ended, each counted once.", ["route", "status", "outcome"], registry=own
        )
        self.in_flight = Gauge("omni_requests_in_flight", "HTTP requests not ended.", ["route"], registry=own)
        self.first_text = self._times("omni_time_to_first_text_seconds", "Arrival to the first text.")
        self.first_audio = self._times("omni_time_to_first_audio_seconds", "Arrival to the first audio samples.")
        self.total = self._times("omni_request_seconds", "Arrival to the end of an answer.")
        self.real_time_factor = self._times("omni_real_time_factor", "Total time over seconds of audio made.", _RATIOS)

    def ended(self, route: str, status: int, outcome: Outcome) -> None:
        self.requests.labels(route, str(status), outcome.value).inc()

    def _times(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, text, ["pipeline", "task"], buckets=buckets, registry=self.registry)


def exposition(metrics: Metrics) -> web.Response:
    return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _FleetCollector(Collector):
    """Reads the scheduler's last `fleet` when Prometheus asks, so that nothing has to be kept in step with it."""

    def __init__(self, fleet: Callable[[], Fleet | None]) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet()
        yield _gauge("omni_scheduler_up", "1 when the scheduler has reported.", [], {(): float(fleet is not None)})
        if fleet is None:
            return
        totals = ("admitted", "completed", "failed", "cancelled", "rejected", "deaths", "replays")
        for name in totals:
            family = CounterMetricFamily(
                f"omni_scheduler_{name}", f"Requests, workers or stages {name}, as the scheduler counts."
            )
            family.add_metric([], getattr(fleet, name))
            yield family
        resumed = CounterMetricFamily("omni_scheduler_replay_seconds", "Seconds from deaths to replays, summed.")
        resumed.add_metric([], fleet.replay_s)
        yield resumed
        yield _gauge("omni_queue_requests", "Requests waiting for placement.", [], {(): fleet.queued})
        yield _gauge("omni_running_requests", "Requests placed and not ended.", [], {(): fleet.running})
        running = Counts({s.stage: 0 for s in fleet.stages})
        for replica in fleet.replicas:
            running[replica.stage] += replica.running
        by_stage = ["stage"]
        yield _gauge("omni_stage_ready", "Ready replicas.", by_stage, {(s.stage,): s.ready for s in fleet.stages})
        yield _gauge("omni_stage_running", "Requests placed.", by_stage, {(k,): n for k, n in running.items()})
        yield _gauge("omni_stage_waiting", "Requests waiting.", by_stage, {(s.stage,): s.waiting for s in fleet.stages})
        by_replica = ["stage", "replica"]
        used = {(r.stage, r.name): r.arena_used for r in fleet.replicas}
        total = {(r.stage, r.name): r.arena_total for r in fleet.replicas}
        yield _gauge("omni_arena_used_bytes", "Bytes of the tensor arena in use.", by_replica, used)
        yield _gauge("omni_arena_total_bytes", "Size of the tensor arena.", by_replica, total)
        sent = CounterMetricFamily("omni_transfer_bytes", "Payload bytes sent.", labels=[*by_replica, "way"])
        busy = CounterMetricFamily("omni_step_seconds", "Seconds spent in engine steps.", labels=by_replica)
        cut = {
            "evicted": CounterMetricFamily("omni_evicted_chunks", "Retained chunks given up.", labels=by_replica),
            "duplicates": CounterMetricFamily("omni_duplicate_chunks", "Chunks that came twice.", labels=by_replica),
            "resends": CounterMetricFamily("omni_resent_edges", "Edges sent again after a loss.", labels=by_replica),
        }
        for replica in fleet.replicas:
            for field, family in cut.items():
                family.add_metric([replica.stage, replica.name], getattr(replica, field))
            for way, nbytes in replica.sent.items():
                sent.add_metric([replica.stage, replica.name, way], nbytes)
            busy.add_metric([replica.stage, replica.name], replica.step_s)
        yield sent
        yield busy
        yield from cut.values()


def _gauge(name: str, text: str, labels: list[str], values: Mapping[Labels, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
