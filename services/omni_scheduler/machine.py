"""The scheduler's decisions: frames and deaths in, frames out. Pure; `main.py` puts it on sockets and a clock."""

import logging
import math
from collections import deque
from collections.abc import Callable

from omni_common.frames import (
    PROTOCOL_VERSION,
    Beat,
    Bye,
    Cancel,
    Close,
    Closed,
    Done,
    Drain,
    Error,
    Failed,
    Fenced,
    Held,
    Hello,
    Holding,
    Look,
    Lost,
    Plain,
    Refused,
    Rejected,
    State,
    Submit,
    Welcome,
)
from omni_common.frames import (
    Fleet as FleetFrame,
)
from omni_common.pipeline import Pipeline
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
from omni_scheduler.fleet import DEAD_S, Fleet, Peer, StageSettings
from omni_scheduler.request import ALIVE, ENDED, Phase, Request
from omni_scheduler.request import (
    Lost as LostStage,
)

log = logging.getLogger("omni.scheduler")

#: How long a request waits for a stage of which not even a loading worker is known: time for a restart to register.
MISSING_S = 2.0
#: Incarnations declared dead that are remembered to be told so.
FENCED = 4096
#: After its start a scheduler waits this long for workers to claim the live requests that gateways submit again, and
#: for gateways to submit what workers hold.
CLAIM_S = 5.0


class Scheduler:
    """State of one scheduler. Each method takes the time (monotonic seconds) and returns what to send, in order."""

    def __init__(self, incarnation: str, pipelines: dict[str, Pipeline]) -> None:
        self.incarnation = incarnation
        self.pipelines = pipelines
        self.fleet = Fleet(
            {
                name: StageSettings(stage.digest(name), stage.stall_s, stage.load_s)
                for pipeline in pipelines.values()
                for name, stage in pipeline.stages.items()
            },
            max((pipeline.limits.recover_s for pipeline in pipelines.values()), default=0.0),
        )
        self.requests: dict[str, Request] = {}
        self.queue: deque[str] = deque()
        #: Requests with a lost stage.
        self.recovering: dict[str, None] = {}
        #: What workers held when they came to this (new) scheduler, until a gateway submits it or the time is over.
        self._held: dict[str, list[tuple[Peer, Holding]]] = {}
        #: Failures of such requests.
        self._failures: dict[str, list[tuple[str, Failed]]] = {}
        self._claims_end: float | None = None
        self.replay_s = 0.0
        self.counts = dict.fromkeys(
            ("admitted", "completed", "failed", "cancelled", "rejected", "deaths", "replays"), 0
        )
        #: True when gateways should hear of the fleet before the next tick.
        self.changed = False
        self._fenced: dict[str, str] = {}
        #: The last tick, or the first hello before any.
        self._awake = math.inf

    # ------------------------------------------------------------------------------------------------------ inputs

    def received(self, sender: str, frame: Plain, now: float) -> list[Send]:
        """A control frame of the peer with incarnation `sender`."""
        if isinstance(frame, Hello):
            return self._hello(sender, frame, now)
        if isinstance(frame, Look):
            return [Send(sender, self.status(now))]
        peer = self.fleet.peers.get(sender)
        if peer is None:
            if sender in self._fenced:
                return [Send(sender, Fenced(self._fenced[sender]))]
            return [Send(sender, Error("unknown_peer", "say hello first"))]
        peer.seen = now
        handler = HANDLERS.get(type(frame))
        if handler is None:
            return [Send(sender, Error("unexpected_frame", f"{type(frame).__name__} is not for the scheduler"))]
        return handler(self, peer, frame, now)

    def gone(self, incarnation: str, why: str, now: float, *, left: bool = False) -> list[Send]:
        """A peer is dead for certain, declared so, or has `left` in order: fence it and settle its requests."""
        # Also one that has not said hello: its hello may still be on the way.
        self._fenced[incarnation] = why
        while len(self._fenced) > FENCED:
            del self._fenced[next(iter(self._fenced))]
        peer = self.fleet.peers.pop(incarnation, None)
        if peer is None:
            return []
        for claims in self._held.values():
            claims[:] = [(holder, holding) for holder, holding in claims if holder is not peer]
        self.changed = True
        self.counts["deaths"] += not left
        sends = [Send(incarnation, Fenced(why))] if "silent" in why or "hung" in why else []
        if peer.hello.role == "gateway":
            mine = [request for request in self.requests.values() if request.gateway == incarnation]
            event: Event = Cancelled("its gateway is gone", gateway_alive=False)
        else:
            mine = [self.requests[request_id] for request_id in sorted(peer.placed)]
            event = ReplicaLost(incarnation, peer.name, why, now, left)
            if not left:
                self.fleet.died[peer.hello.stage] = now
        log.log(
            logging.WARNING if mine else logging.INFO,
            "%s (%s) is gone: %s; requests: %s",
            peer.name,
            incarnation,
            why,
            [request.request_id for request in mine],
        )
        for request in mine:
            sends += self._apply(request, event)
        sends += [Send(other, Lost(incarnation)) for other in self.fleet.peers]
        return sends + self._place(now)

    def tick(self, now: float) -> list[Send]:
        """Deadlines and silences; call a few times a second."""
        stalled = now - self._awake
        self._awake = now
        if stalled > DEAD_S / 2:
            # This process itself was stopped: what the peers sent meanwhile is still in its sockets.
            for peer in self.fleet.peers.values():
                peer.seen += stalled
                peer.progress += stalled
        sends: list[Send] = []
        for incarnation, why in self.fleet.silent(now):
            sends += self.gone(incarnation, why, now)
        if self._claims_end is None:
            self._claims_end = now + CLAIM_S
        elif self._claims_end and now >= self._claims_end:
            self._claims_end = 0.0
            sends += self._end_claims(now)
        for request in list(self.requests.values()):
            sends += self._check_deadlines(request, now)
        return sends + self._place(now)

    def _end_claims(self, now: float) -> list[Send]:
        sends: list[Send] = []
        for request_id, held in self._held.items():
            for peer, _ in held:
                sends.append(Send(peer.incarnation, Close(request_id, "its gateway is gone")))
        self._held.clear()
        self._failures.clear()
        for request_id in list(self.recovering):
            sends += self._apply(self.requests[request_id], Unclaimed(now))
        return sends

    def status(self, now: float) -> FleetFrame:
        """What gateways are told of the fleet."""
        running = [request for request in self.requests.values() if request.phase in ALIVE]
        queued = [self.requests[request_id] for request_id in self.queue]
        return FleetFrame(
            scheduler=self.incarnation,
            stages=[
                self.fleet.status(stage, sum(stage in request.plan.stages for request in queued))
                for stage in self.fleet.stages
            ],
            replicas=self.fleet.replicas(now),
            gateways=len(self.gateways()),
            gateway_pids=[self.fleet.peers[gateway].hello.pid for gateway in self.gateways()],
            queued=len(queued),
            running=len(running),
            replay_s=round(self.replay_s, 3),
            **self.counts,
        )

    def gateways(self) -> list[str]:
        return [peer.incarnation for peer in self.fleet.peers.values() if peer.hello.role == "gateway"]

    # -------------------------------------------------------------------------------------------------- peer frames

    def _hello(self, sender: str, hello: Hello, now: float) -> list[Send]:
        if sender != hello.incarnation:
            return [Send(sender, Refused("the routing identity must be the incarnation"))]
        if sender in self._fenced:
            return [Send(sender, Fenced(self._fenced[sender]))]
        refusal = self.fleet.refusal(hello, PROTOCOL_VERSION)
        if refusal:
            log.warning("refused %s: %s", hello.name, refusal)
            return [Send(sender, Refused(refusal))]
        self._awake = min(self._awake, now)
        sends = [Send(sender, Welcome(self.incarnation))]
        if sender not in self.fleet.peers:
            self.fleet.peers[sender] = Peer(hello, seen=now, since=now, progress=now)
            self.changed = True
            log.info("%s (%s) is here", hello.name, sender)
            # It may know them from an earlier scheduler, and keep what they left for as long as nobody says so.
            sends += [Send(sender, Lost(dead)) for dead in self._fenced]
        for holding in hello.holding:
            sends += self._claim(self.fleet.peers[sender], holding)
        return sends

    def _claim(self, peer: Peer, holding: Holding) -> list[Send]:
        """A worker has a request that an earlier scheduler placed there."""
        request = self.requests.get(holding.request_id)
        if request is None or request.phase in ENDED:
            if self._claims_end == 0.0 or request is not None:
                return [Send(peer.incarnation, Close(holding.request_id, "unknown to the scheduler"))]
            self._held.setdefault(holding.request_id, []).append((peer, holding))
            return []
        if peer.incarnation in request.holders:
            return []
        if holding.stage not in request.claimable:
            return [Send(peer.incarnation, Close(holding.request_id, "placed elsewhere"))]
        peer.placed.add(holding.request_id)
        replica = Assignment(holding.stage, peer.incarnation, peer.hello.inbox)
        return self._apply(request, Claimed(replica, holding.attempt))

    def _state(self, peer: Peer, state: State, now: float) -> list[Send]:
        if state.state != peer.state.state:
            log.info("%s is %s%s", peer.name, state.state, f": {state.detail}" if state.detail else "")
            self.changed = True
            peer.progress = now
        peer.state = state
        if state.state == "draining":
            # What was placed before is on its way: the worker must not leave until it knows that nothing follows.
            return [Send(peer.incarnation, Drain())]
        return self._place(now) if peer.ready else []

    def _beat(self, peer: Peer, beat: Beat, now: float) -> list[Send]:
        self.fleet.beat(peer, beat, now)
        return []

    def _bye(self, peer: Peer, bye: Bye, now: float) -> list[Send]:
        answer = Send(peer.incarnation, Bye("goodbye"))
        if peer.placed or peer.hello.role == "gateway":
            # An engine that broke in a step leaves too, and what it worked on may be why: that is a death.
            left = peer.state.state != "failed"
            return [answer, *self.gone(peer.incarnation, f"left: {bye.reason}", now, left=left)]
        del self.fleet.peers[peer.incarnation]
        self.changed = True
        log.info("%s has left: %s", peer.name, bye.reason)
        return [answer, *(Send(other, Lost(peer.incarnation)) for other in self.fleet.peers)]

    def _submit(self, peer: Peer, submit: Submit, now: float) -> list[Send]:
        if submit.request_id in self.requests:
            return []
        pipeline = self.pipelines.get(submit.pipeline)
        if pipeline is None or submit.task not in pipeline.tasks:
            return self._reject(peer, submit, "unknown_pipeline", f"no pipeline {submit.pipeline} does {submit.task}")
        try:
            plan = pipeline.plan(submit.task, submit.inputs, submit.outputs)
        except ValueError as error:
            return self._reject(peer, submit, "unsupported_modality", str(error))
        request = Request(submit, peer.incarnation, peer.hello.inbox, plan, since=now)
        self.requests[submit.request_id] = request
        if submit.live:
            return self._adopt(request, now)
        self.queue.append(submit.request_id)
        sends = self._place(now)
        if request.phase is Phase.QUEUED:
            waiting = sum(self.requests[other].submit.pipeline == pipeline.name for other in self.queue)
            if waiting > pipeline.limits.queue:
                message = f"{waiting - 1} requests wait already; {pipeline.limits.queue} may"
                sends += self._apply(request, Refusal("queue_full", message, 429, retry_after_s=1.0))
        return sends

    def _adopt(self, request: Request, now: float) -> list[Send]:
        """A live request of an earlier scheduler: its stages run somewhere, or are lost."""
        request.phase = Phase.RECOVERING
        request.lost = {stage: LostStage(now, "the scheduler was restarted", "") for stage in request.plan.stages}
        request.claimable = set(request.plan.stages)
        self.recovering[request.request_id] = None
        sends: list[Send] = []
        for peer, holding in self._held.pop(request.request_id, []):
            sends += self._claim(peer, holding)
        if self._claims_end == 0.0:
            sends += self._apply(request, Unclaimed(now))
        for failing, failed in self._failures.pop(request.request_id, []):
            sends += self._apply(request, StageFailed(failed, failing))
        return sends

    def _reject(self, peer: Peer, submit: Submit, code: str, message: str) -> list[Send]:
        self.counts["rejected"] += 1
        return [Send(peer.incarnation, Rejected(submit.request_id, code, message, 400))]

    def _cancel(self, peer: Peer, cancel: Cancel, now: float) -> list[Send]:
        request = self.requests.get(cancel.request_id)
        if request is None:
            return self._disown(peer, cancel.request_id)
        return self._apply(request, Cancelled(cancel.reason)) + self._place(now)

    def _disown(self, peer: Peer, request_id: str) -> list[Send]:
        """A request that ended while there was no scheduler: workers that still have it are told."""
        held = self._held.pop(request_id, [])
        self._failures.pop(request_id, None)
        closes = [Send(holder.incarnation, Close(request_id, "it has ended")) for holder, _ in held]
        return [*closes, Send(peer.incarnation, Closed(request_id))]

    def _done(self, peer: Peer, done: Done, now: float) -> list[Send]:
        request = self.requests.get(done.request_id)
        if request is None:
            return self._disown(peer, done.request_id)
        return self._apply(request, Finished())

    def _held_by(self, peer: Peer, held: Held, now: float) -> list[Send]:
        request = self.requests.get(held.request_id)
        if request is None:
            return []
        return self._apply(request, Answered(held)) + self._place(now)

    def _failed(self, peer: Peer, failed: Failed, now: float) -> list[Send]:
        request = self.requests.get(failed.request_id)
        if request is None and failed.request_id in self._held:
            # Told again to a new scheduler, before its gateway is here.
            self._failures.setdefault(failed.request_id, []).append((peer.incarnation, failed))
        if request is None or peer.incarnation not in request.holders:
            return []
        if failed.status >= 500:
            log.warning("%s failed in %s: %s (%s)", failed.request_id, peer.name, failed.message, failed.code)
        return self._apply(request, StageFailed(failed, peer.incarnation))

    def _closed(self, peer: Peer, closed: Closed, now: float) -> list[Send]:
        request = self.requests.get(closed.request_id)
        if request is not None and request.phase not in ENDED:
            log.error("%s closed %s, which it was not told to", peer.name, closed.request_id)
            return []
        peer.placed.discard(closed.request_id)
        if request is None:
            return []
        return self._apply(request, HolderClosed(peer.incarnation)) + self._place(now)

    def _error(self, peer: Peer, error: Error, now: float) -> list[Send]:
        log.warning("%s says: %s (%s)", peer.name, error.message, error.code)
        return []

    # ----------------------------------------------------------------------------------------------------- decisions

    def _apply(self, request: Request, event: Event) -> list[Send]:
        before = request.phase
        sends = request.apply(event)
        if request.phase is not before:
            if before is Phase.QUEUED:
                self.queue.remove(request.request_id)
                self.counts["admitted"] += request.phase is Phase.RUNNING
            if request.phase in ENDED:
                self.counts[request.phase.value] += 1
                self.fleet.free_reserved(request.request_id)
            if request.phase is Phase.RECOVERING:
                self.recovering[request.request_id] = None
            else:
                self.recovering.pop(request.request_id, None)
        if request.gone:
            del self.requests[request.request_id]
        return [send for send in sends if send.peer in self.fleet.peers]

    def _place(self, now: float) -> list[Send]:
        """Start what can be started: first what lost a stage, then queued requests, in order of arrival."""
        sends: list[Send] = []
        for request_id in [*self.recovering, *self.queue]:
            request = self.requests[request_id]
            chosen = self._choose(request)
            if not chosen:
                continue
            self.fleet.free_reserved(request_id)
            for stage, peer in chosen.items():
                peer.placed.add(request_id)
                if request.is_suspect(stage):
                    peer.alone = request_id
            replicas = {stage: Assignment(stage, peer.incarnation, peer.hello.inbox) for stage, peer in chosen.items()}
            for stage in request.lost:
                waited = now - request.lost[stage].since
                self.counts["replays"] += 1
                self.replay_s += waited
                log.info(
                    "%s: %s goes on at %s after %.3f s, from position %d",
                    request_id,
                    stage,
                    chosen[stage].name,
                    waited,
                    request.lost[stage].position,
                )
            left = request.submit.total_s - (now - request.since)
            sends += self._apply(request, Assigned(replicas, total_s=left))
        return sends

    def _choose(self, request: Request) -> dict[str, Peer]:
        """A replica for every stage that the request needs now; empty when there is none for one of them."""
        chosen = {}
        for stage in request.needs:
            suspect = request.request_id if request.is_suspect(stage) else ""
            peer = self.fleet.choose(stage, suspect)
            if peer is None:
                if suspect:
                    self.fleet.reserve(stage, suspect)
                return {}
            chosen[stage] = peer
        return chosen

    def _check_deadlines(self, request: Request, now: float) -> list[Send]:
        waited = now - request.since
        if request.phase in ALIVE and waited > request.submit.total_s:
            message = f"the request took longer than {request.submit.total_s:g} s"
            return self._apply(request, Hopeless("deadline_exceeded", message, 504))
        if request.phase is Phase.RECOVERING:
            return self._check_recovery(request, now)
        if request.phase is not Phase.QUEUED:
            return []
        missing = self.fleet.missing(request.plan.stages)
        hopeless = [stage for stage in missing if not self.fleet.expects(stage, now)]
        if hopeless and waited > min(MISSING_S, request.submit.queue_s):
            reasons = "; ".join(f"{stage}: {self.fleet.status(stage, 0).missing}" for stage in hopeless)
            return self._apply(request, Refusal("stage_missing", f"cannot run now: {reasons}", 503, retry_after_s=2.0))
        if waited > request.submit.queue_s:
            why = f"no ready replica of {', '.join(missing)}" if missing else "all replicas are busy"
            message = f"waited {waited:.1f} s for a place: {why}"
            return self._apply(request, Refusal("queue_timeout", message, 504, retry_after_s=2.0))
        return []

    def _check_recovery(self, request: Request, now: float) -> list[Send]:
        """Give up when a lost stage has no replica and none is on its way for too long."""
        limit = self.pipelines[request.submit.pipeline].limits.recover_s
        for stage, lost in request.lost.items():
            if now - lost.since > limit and not self.fleet.starting(stage):
                message = f"stage {stage} was lost while it worked on the request, and no replica came: {lost.why}"
                return self._apply(request, Hopeless("stage_lost", message, 503))
        return []

    def check(self) -> None:
        """Assert the invariants; tests call it after every event."""
        assert set(self.queue) == {r.request_id for r in self.requests.values() if r.phase is Phase.QUEUED}
        for request in self.requests.values():
            assert not request.gone, request.story
            assert request.phase in ENDED or request.gateway in self.fleet.peers, request.story
            assert (request.phase is Phase.RECOVERING) == (request.request_id in self.recovering), request.story
            if request.phase in ALIVE:
                stages = set(request.plan.stages)
                assert set(request.replicas) | set(request.lost) == stages, request.story
                assert not set(request.replicas) & set(request.lost), request.story
                assert bool(request.lost) == (request.phase is Phase.RECOVERING), request.story
                assert {replica.incarnation for replica in request.replicas.values()} <= request.holders, request.story
                for lost in request.lost.values():
                    assert set(lost.asked) <= set(self.fleet.peers), request.story
        for peer in self.fleet.peers.values():
            assert len(peer.placed) <= max(peer.hello.slots, 0), peer.name
            for request_id in peer.placed:
                assert peer.incarnation in self.requests[request_id].holders, self.requests[request_id].story


HANDLERS: dict[type[Plain], Callable[..., list[Send]]] = {
    State: Scheduler._state,
    Beat: Scheduler._beat,
    Bye: Scheduler._bye,
    Submit: Scheduler._submit,
    Cancel: Scheduler._cancel,
    Done: Scheduler._done,
    Failed: Scheduler._failed,
    Closed: Scheduler._closed,
    Held: Scheduler._held_by,
    Error: Scheduler._error,
}
