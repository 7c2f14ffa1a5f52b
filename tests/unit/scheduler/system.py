"""The scheduler's machine without sockets: peers are names, their mail is kept."""

import math
from collections import Counter

from omni_common.frames import (
    PROTOCOL_VERSION,
    Beat,
    Decision,
    Held,
    Hello,
    Plain,
    Recover,
    State,
    Submit,
    Text,
)
from omni_common.pipeline import Limits, Pipeline, Stage, Task
from omni_scheduler.events import Send
from omni_scheduler.machine import Scheduler
from omni_scheduler.request import Phase

REQUEST = "r" * 32


def pipeline(slots: int = 1, queue: int = 64) -> Pipeline:
    return Pipeline(
        name="two",
        stages={
            "first": Stage(engine="fake", slots=slots, stall_s=10.0),
            "second": Stage(engine="fake", slots=slots, inputs=["first"]),
        },
        tasks={
            "chat": Task(input={"text": "first"}, output={"text": "first", "audio": "second"}),
        },
        limits=Limits(queue=queue, queue_s=10.0, total_s=60.0),
    )


class System:
    """A scheduler with peers that are only names; `mail` collects what each was sent."""

    def __init__(self, slots: int = 1, queue: int = 64) -> None:
        self.now = 100.0
        self.pipeline = pipeline(slots, queue)
        self.machine = Scheduler("s" * 16, {"two": self.pipeline})
        self.mail: dict[str, list[Plain]] = {}
        #: How many `recover` each has answered.
        self.answered: Counter[str] = Counter()

    def take(self, sends: list[Send]) -> list[Send]:
        for send in sends:
            self.mail.setdefault(send.peer, []).append(send.frame)
        self.machine.check()
        return sends

    def says(self, peer: str, frame: Plain) -> list[Send]:
        return self.take(self.machine.received(peer, frame, self.now))

    def dies(self, peer: str) -> list[Send]:
        return self.take(self.machine.gone(peer, "its process ended", self.now))

    def passes(self, seconds: float) -> list[Send]:
        """Time passes in ticks, with everybody's beats."""
        sends = []
        step = 0.25 if seconds < 10 else 2.0
        for _ in range(math.ceil(seconds / step)):
            self.now += step
            for peer in list(self.machine.fleet.peers):
                self.says(peer, Beat())
            sends += self.take(self.machine.tick(self.now))
        return sends

    def joins(self, peer: str, stage: str = "", ready: bool = True) -> list[Send]:
        hello = Hello(PROTOCOL_VERSION, "worker" if stage else "gateway", peer, peer, inbox=f"ipc://{peer}")
        if stage:
            hello.stage, hello.slots = stage, self.pipeline.stages[stage].slots
            hello.digest = self.pipeline.stages[stage].digest(stage)
        sends = self.says(peer, hello)
        return sends + self.says(peer, State("ready")) if ready and stage else sends

    def submits(self, request_id: str = REQUEST, outputs: tuple[str, ...] = ("text", "audio")) -> list[Send]:
        return self.says(
            "gate", Submit(request_id, "two", "chat", ["text"], list(outputs), seed=1, queue_s=10.0, total_s=60.0)
        )

    def answers(self, peer: str, position: int = 0) -> None:
        """The peer answers every `recover` that it has not answered, in order."""
        for frame in self.got(peer, Recover)[self.answered[peer] :]:
            self.answered[peer] += 1
            self.says(peer, Held(frame.request_id, frame.edge, frame.incarnation, decisions(position)))

    def got(self, peer: str, kind: type[Plain]) -> list[Plain]:
        return [frame for frame in self.mail.get(peer, []) if isinstance(frame, kind)]

    @property
    def phase(self) -> Phase | None:
        request = self.machine.requests.get(REQUEST)
        return request.phase if request else None


def decisions(count: int) -> list[Decision]:
    return [Decision(number, number + 1, False, Text(f"{number}")) for number in range(count)]


def full_system(slots: int = 1, queue: int = 64) -> System:
    system = System(slots, queue)
    system.joins("gate")
    system.joins("w1", "first")
    system.joins("w2", "second")
    return system
