"""The schedule of `actors.py`: every message on its way is one event that may happen next, so a list of numbers is a
schedule, and the same list is the same run.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable

from chaos.actors import HONEST, PIPELINE_OF, PIPELINES, STAGES, WORDS, Actor, Gateway, Worker
from omni_common.frames import Beat, Cancel, Plain
from omni_scheduler.events import Send
from omni_scheduler.machine import Scheduler
from omni_scheduler.request import ALIVE


class World:
    """Everything, and what may happen next."""

    def __init__(self) -> None:
        self.now = 100.0
        self.entropy = itertools.count()
        self.names = itertools.count()
        self.up: dict[str, list[Plain]] = defaultdict(list)
        self.down: dict[str, list[Plain]] = defaultdict(list)
        self.data: dict[tuple[str, str], list[Plain]] = defaultdict(list)
        self.actors: dict[str, Actor] = {}
        self.dead: list[str] = []
        self.outcomes: dict[str, list[str]] = defaultdict(list)
        self.heard: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.budget = {"kill": 3, "restart": 1, "lose": 1, "double": 1, "fail": 1, "gateway": 1, "cancel": 1}
        self.trace: list[str] = []
        self.machine: Scheduler | None = None
        self.start_scheduler()
        for name in ("g0", "g1"):
            self.actors[name] = Gateway(self, name)
            self.actors[name].connect()
        for stage in STAGES:
            self.start_worker(stage)

    # ------------------------------------------------------------------------------------------------- what happens

    def start_scheduler(self) -> None:
        self.machine = Scheduler(f"s{next(self.names)}", PIPELINES)
        for actor in self.actors.values():
            actor.connect()

    def stop_scheduler(self) -> None:
        self.machine = None
        self.up.clear()
        self.down.clear()
        self.dead.clear()
        for actor in self.actors.values():
            actor.registered = False

    def start_worker(self, stage: str) -> str:
        name = f"{stage}{next(self.names)}"
        self.actors[name] = Worker(self, name, stage)
        if self.machine is not None:
            self.actors[name].connect()
        return name

    def kill(self, name: str) -> None:
        """Its mail stays on the way: some of it may still arrive, before or after the word of its death."""
        if self.actors.pop(name, None) is not None:
            self.dead.append(name)
            self.down.pop(name, None)
            for channel in [channel for channel in self.data if channel[1] == name]:
                del self.data[channel]

    def take(self, sends: list[Send]) -> None:
        assert self.machine is not None
        for send in sends:
            if send.peer in self.actors:
                self.down[send.peer].append(send.frame)
        self.machine.check()
        for request in self.machine.requests.values():
            for replica in request.replicas.values() if request.phase in ALIVE else ():
                assert replica.incarnation in self.machine.fleet.peers, f"placed on a dead peer: {request.story}"

    def deliver_up(self, name: str) -> None:
        assert self.machine is not None
        self.take(self.machine.received(name, self.up[name].pop(0), self.now))

    def deliver_down(self, name: str) -> None:
        self.actors[name].received(self.down[name].pop(0))

    def deliver_data(self, channel: tuple[str, str]) -> None:
        self.actors[channel[1]].on_data(self.data[channel].pop(0))

    def notice(self, name: str) -> None:
        assert self.machine is not None
        self.dead.remove(name)
        self.take(self.machine.gone(name, "its process ended", self.now))

    def passes(self, seconds: float) -> None:
        if self.machine is None:
            self.now += seconds
            return
        if seconds >= 1.0:
            # Nobody's control frame is so late: a claim that comes when the time for claims is over has its own test.
            self.control()
        self.now += seconds
        for name, actor in list(self.actors.items()):
            if name in self.machine.fleet.peers:
                self.take(self.machine.received(name, Beat(), self.now))
            actor.restate()
        self.take(self.machine.tick(self.now))

    # ------------------------------------------------------------------------------------------- what may happen next

    def submit(self) -> None:
        number = len(self.outcomes)
        request_id = f"r{number}"
        self.outcomes[request_id] = []
        gateway = self.actors.get("g1" if number == 2 else "g0") or self.actors["g0"]
        assert isinstance(gateway, Gateway)
        gateway.submit(request_id, PIPELINE_OF[number])

    def lose_tail(self, name: str, keep: int) -> None:
        """A killed process takes what was still in its pipes with it."""
        for channel, frames in self.data.items():
            if channel[0] == name:
                del frames[keep:]

    def lose(self, channel: tuple[str, str]) -> None:
        del self.data[channel][0]

    def control(self) -> None:
        """Deliver what is under way to and from the scheduler."""
        while acts := [act for words, act in self.moves() if words.startswith(("up", "down"))]:
            acts[0]()

    def calm(self) -> None:
        """Everything that is under way arrives, and every engine does what it can."""
        for _ in range(10_000):
            moves = self.moves()
            if not moves:
                return
            moves[0][1]()
        raise AssertionError("it goes round in circles: " + ", ".join(words for words, _ in self.moves()))

    def named(self, stage: str) -> str:
        return next(name for name, actor in self.actors.items() if actor.stage == stage)

    def moves(self) -> list[tuple[str, Callable[[], object]]]:
        """Progress of what is under way."""
        moves: list[tuple[str, Callable[[], object]]] = []
        if self.machine is not None:
            moves += [(f"up {name}", lambda name=name: self.deliver_up(name)) for name, q in self.up.items() if q]
            moves += [(f"notice {name}", lambda name=name: self.notice(name)) for name in self.dead]
        moves += [(f"down {name}", lambda name=name: self.deliver_down(name)) for name, q in self.down.items() if q]
        moves += [
            (f"data {channel}", lambda channel=channel: self.deliver_data(channel))
            for channel, frames in self.data.items()
            if frames and channel[1] in self.actors
        ]
        for actor in self.actors.values():
            if isinstance(actor, Worker):
                moves += [
                    (f"step {actor.name} {request_id}", lambda actor=actor, r=request_id: actor.step(r))
                    for request_id in actor.requests
                    if actor.able(request_id)
                ]
        return moves

    def mishaps(self) -> dict[str, list[tuple[str, Callable[[], object]]]]:
        """What disturbs, as far as the budget goes, and what comes from outside, by kind."""
        found: list[tuple[str, str, Callable[[], object]]] = []
        if len(self.outcomes) < len(PIPELINE_OF) and "g0" in self.actors:
            found.append(("", "submit", self.submit))
        workers = [actor for actor in self.actors.values() if isinstance(actor, Worker)]
        for actor in workers:
            for keep in (0, 1, 100):

                def kill(name: str = actor.name, keep: int = keep) -> None:
                    self.lose_tail(name, keep)
                    self.kill(name)

                found.append(("kill", f"kill {actor.name} keep {keep}", kill))
            for request_id in actor.requests:
                found.append(("fail", f"fail {actor.name}", lambda actor=actor, r=request_id: actor.fail(r)))
        for stage in STAGES:
            if sum(worker.stage == stage for worker in workers) < 2 and len(workers) < 7:
                found.append(("", f"start {stage}", lambda stage=stage: self.start_worker(stage)))
        if self.machine is None:
            found.append(("", "scheduler starts", self.start_scheduler))
        else:
            found.append(("restart", "scheduler dies", self.stop_scheduler))
        if "g1" in self.actors:
            found.append(("gateway", "g1 dies", lambda: self.kill("g1")))
        for gateway in self.actors.values():
            if isinstance(gateway, Gateway):
                for request_id in gateway.streams:

                    def cancel(gateway: Gateway = gateway, request_id: str = request_id) -> None:
                        gateway.end(request_id, "cancelled", Cancel(request_id))

                    found.append(("cancel", f"cancel {request_id}", cancel))
        for channel, frames in self.data.items():
            if frames and channel[1] in self.actors:
                found.append(("lose", f"lose {channel}", lambda channel=channel: self.lose(channel)))
                found.append(("double", f"double {channel}", lambda frames=frames: frames.insert(0, frames[0])))
        for seconds in (0.3, 1.0, 6.0):
            found.append(("", f"{seconds} s pass", lambda seconds=seconds: self.passes(seconds)))
        groups: dict[str, list[tuple[str, Callable[[], object]]]] = defaultdict(list)
        for kind, words, act in found:
            if not kind or self.budget[kind] > 0:
                groups[kind or words.split()[0]].append((words, self._spending(kind, act)))
        return groups

    def _spending(self, kind: str, act: Callable[[], object]) -> Callable[[], object]:
        def spend() -> None:
            if kind:
                self.budget[kind] -= 1
            act()

        return spend

    def happen(self, number: int) -> None:
        """The event that `number` chooses: most of them move something on."""
        moves = self.moves()
        number, side = divmod(number, 6)
        if side and moves:
            words, act = moves[number % len(moves)]
        else:
            groups = [group for group in self.mishaps().values() if group]
            number, group = divmod(number, len(groups))
            words, act = groups[group][number % len(groups[group])]
        self.trace.append(words)
        act()

    # ----------------------------------------------------------------------------------------------------- the end

    def settle(self, seconds: int = 60) -> None:
        """Nothing more goes wrong: a worker for each stage, time, and everything delivered."""
        self.trace.append("settle")
        if self.machine is None:
            self.start_scheduler()
        for _ in range(seconds):
            for stage in STAGES:
                if not any(actor.stage == stage for actor in self.actors.values()):
                    self.start_worker(stage)
            self.calm()
            self.passes(1.0)

    def judge(self) -> None:
        assert self.machine is not None
        for request_id, outcomes in self.outcomes.items():
            alive = self.owner_lives(request_id)
            assert len(outcomes) == 1 or not alive, f"{request_id} ended {outcomes}"
            if outcomes == ["done"]:
                pipeline = PIPELINE_OF[int(request_id[1:])]
                text_stage, audio_stage = PIPELINES[pipeline].tasks["chat"].output.values()
                text, audio = self.heard[request_id, text_stage], self.heard[request_id, audio_stage]
                assert len(text) == WORDS, f"{request_id}: {text}"
                derived = [f"third(second({word}))" if pipeline == "spoken" else f"again({word})" for word in text]
                assert audio == derived, f"{request_id}: {audio} contradicts {text}"
            elif outcomes and outcomes != ["cancelled"]:
                assert outcomes[0] in HONEST, f"{request_id}: {outcomes}"
        assert not self.machine.requests, [request.story for request in self.machine.requests.values()]
        for peer in self.machine.fleet.peers.values():
            assert not peer.placed, f"{peer.name} keeps {peer.placed}"
        for actor in self.actors.values():
            assert not actor.requests, f"{actor.name} keeps {list(actor.requests)}"
            assert not isinstance(actor, Gateway) or not actor.ending, f"{actor.name} waits for the end of its requests"

    def owner_lives(self, request_id: str) -> bool:
        return request_id != "r2" or "g1" in self.actors
