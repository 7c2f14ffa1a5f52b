"""A whole instance without sockets or clocks: the real scheduler machine (`world.py`) and the real edges between actors
that behave as `Member`, `Node`, the worker's shell and the gateway's link do.

`first` decides words at random (each carries a number that is never used twice) and resumes; `second` and `third`
derive theirs from their input and are computed again. So what a client hears can be checked against what it reads.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omni_common.decisions import Ends
from omni_common.edges import InEdge, OutEdge, Retained
from omni_common.frames import (
    PROTOCOL_VERSION,
    Cancel,
    Chunk,
    Close,
    Closed,
    Done,
    Error,
    Failed,
    Fenced,
    Grant,
    Held,
    Hello,
    Holding,
    Link,
    Lost,
    Place,
    Placed,
    Plain,
    Recover,
    Refused,
    Rejected,
    Relink,
    Sent,
    State,
    Submit,
    Text,
    Welcome,
)
from omni_common.pipeline import Limits, Pipeline, Stage, Task

if TYPE_CHECKING:
    from chaos.world import World

WORDS = 3
WINDOW = 2
PIPELINES = {
    "spoken": Pipeline(
        name="spoken",
        stages={
            "first": Stage(engine="fake", slots=2),
            "second": Stage(engine="fake", slots=2, inputs=["first"]),
            "third": Stage(engine="fake", slots=2, inputs=["second"]),
        },
        tasks={"chat": Task(input={"text": "first"}, output={"text": "first", "audio": "third"})},
        limits=Limits(queue_s=1000.0, total_s=10_000.0, recover_s=1000.0),
    ),
    "branch": Pipeline(
        name="branch",
        stages={
            "copy": Stage(engine="fake", slots=2),
            "again": Stage(engine="fake", slots=2, inputs=["copy"]),
        },
        tasks={"chat": Task(input={"text": "copy"}, output={"text": "copy", "audio": "again"})},
        limits=Limits(queue_s=1000.0, total_s=10_000.0, recover_s=1000.0),
    ),
}
STAGES = {name: stage for pipeline in PIPELINES.values() for name, stage in pipeline.stages.items()}
PIPELINE_OF = ("spoken", "branch", "spoken")
#: What a request may end with besides its answer, when workers are killed.
HONEST = {"poison_request", "stage_failed_on_purpose", "stage_missing"}


@dataclass(slots=True)
class Edges(Ends):
    """What a process knows of a request."""

    #: Pieces that the engine has not taken, by order of arrival.
    pieces: deque[tuple[str, Chunk]] = field(default_factory=deque)
    #: `first` only: where it stands.
    position: int = 0
    asked: bool = False
    over: bool = False


class Actor:
    """A member with a node: what worker and gateway have in common."""

    role = ""
    stage = ""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.registered = False
        self.scheduler = ""
        self.waiting: list[Plain] = []
        self.requests: dict[str, Edges] = {}
        self.early: dict[tuple[str, str, str], Grant] = {}
        self.lost: set[str] = set()

    # membership

    def hello(self) -> Hello:
        raise AssertionError

    def connect(self) -> None:
        self.world.up[self.name].append(self.hello())

    def send(self, frame: Plain) -> None:
        (self.world.up[self.name] if self.registered else self.waiting).append(frame)

    def received(self, frame: Plain) -> None:
        if isinstance(frame, Welcome):
            again = bool(self.scheduler) and frame.scheduler != self.scheduler
            self.scheduler, self.registered = frame.scheduler, True
            waiting, self.waiting = self.waiting, []
            self.world.up[self.name] += waiting
            self.on_welcome(again)
        elif isinstance(frame, Fenced | Refused):
            self.world.kill(self.name)
        elif isinstance(frame, Error):
            raise AssertionError(frame.message)
        elif isinstance(frame, Lost):
            self.lost.add(frame.incarnation)
        elif isinstance(frame, Recover):
            held = self.recover(frame)
            if held is not None:
                self.send(held)
        elif isinstance(frame, Relink):
            self.relink(frame)
        else:
            self.on_frame(frame)

    def on_welcome(self, again: bool) -> None:
        raise AssertionError

    def on_frame(self, frame: Plain) -> None:
        raise AssertionError

    # node

    def open(self, request_id: str, attempt: int, place: Place | Placed) -> Edges:
        edges = self.requests[request_id] = Edges()
        for link in place.sinks:
            out = edges.outs[link.edge] = OutEdge(request_id, link, self.name, attempt)
            for past in place.resume if isinstance(place, Place) else []:
                out.offer(Retained(past.start, past.end, past.last, past.body, {}, 1))
            self.take_early(out)
        for link in place.sources:
            incoming = InEdge(request_id, link, self.name, attempt, window_chunks=WINDOW)
            edges.ins[link.edge] = incoming
            self.post(link, incoming.open())
        return edges

    def take_early(self, out: OutEdge) -> None:
        early = self.early.pop((out.request_id, out.link.edge, out.link.incarnation), None)
        if early is not None:
            out.grant(early)
        self.pump(out)

    def post(self, link: Link, frame: Plain) -> None:
        if link.incarnation not in self.lost:
            self.world.data[self.name, link.incarnation].append(frame)

    def pump(self, out: OutEdge) -> None:
        for chunk in out.take():
            self.post(out.link, chunk)

    def emit(self, edges: Edges, start: int, end: int, last: bool, text: str) -> None:
        for out in edges.outs.values():
            edges.offer(out, start, end, last, Text(text), {}, 0)
            self.pump(out)

    def recover(self, frame: Recover) -> Held | None:
        edges = self.requests.get(frame.request_id)
        return edges.recover(frame) if edges else None

    def relink(self, frame: Relink) -> None:
        edges = self.requests.get(frame.request_id)
        if edges is None:
            return
        incoming = edges.ins.get(frame.link.edge)
        if incoming is not None and (incoming.fenced or incoming.link.incarnation != frame.link.incarnation):
            grant = incoming.relink(frame.link)
            if grant is not None:
                self.post(frame.link, grant)
        out = edges.outs.get(frame.link.edge)
        if out is not None and out.link.incarnation != frame.link.incarnation:
            out.relink(frame.link)
            self.take_early(out)

    def on_data(self, frame: Plain) -> None:
        assert isinstance(frame, Chunk | Grant | Sent)
        edges = self.requests.get(frame.request_id)
        if isinstance(frame, Grant):
            out = edges.outs.get(frame.edge) if edges else None
            if out is None or out.link.incarnation != frame.source:
                self.early[frame.request_id, frame.edge, frame.source] = frame
            else:
                out.grant(frame)
                self.pump(out)
        elif edges is not None:
            if isinstance(frame, Sent):
                edge = edges.ins[frame.edge]
                if edge.link.incarnation == frame.source and edge.lacks(frame.chunks, frame.opening):
                    self.post(edge.link, edge.reopen())
                return
            accepting, verdict = edges.accept(frame)
            assert accepting is not None
            if verdict == "gap":
                self.post(accepting.link, accepting.reopen())
            elif verdict == "new":
                self.on_piece(edges, accepting, frame)

    def on_piece(self, edges: Edges, edge: InEdge, chunk: Chunk) -> None:
        raise AssertionError

    def used(self, edge: InEdge) -> None:
        grant = edge.used(1)
        if grant is not None:
            self.post(edge.link, grant)

    def restate(self) -> None:
        for edges in self.requests.values():
            for out in edges.outs.values():
                if out.opening and out.unacknowledged():
                    self.post(out.link, Sent(out.request_id, out.link.edge, self.name, out.opening, out.sent_chunks))
            for incoming in edges.ins.values():
                if not incoming.ended and not incoming.fenced:
                    self.post(incoming.link, incoming.open())


class Worker(Actor):
    role = "worker"

    def __init__(self, world: "World", name: str, stage: str) -> None:
        super().__init__(world, name)
        self.stage = stage
        self.attempts: dict[str, int] = {}
        #: Told again to another scheduler.
        self.failures: dict[str, Failed] = {}
        #: Positions that left the engine, by request.
        self.produced: dict[str, list[int]] = defaultdict(list)

    def hello(self) -> Hello:
        return Hello(
            PROTOCOL_VERSION,
            "worker",
            self.name,
            self.name,
            inbox=self.name,
            stage=self.stage,
            digest=STAGES[self.stage].digest(self.stage),
            slots=STAGES[self.stage].slots,
            holding=[Holding(request_id, self.stage, attempt) for request_id, attempt in self.attempts.items()],
        )

    def on_welcome(self, again: bool) -> None:
        self.send(State("ready"))
        for failed in self.failures.values() if again else ():
            self.send(failed)

    def on_frame(self, frame: Plain) -> None:
        if isinstance(frame, Place):
            self.attempts[frame.request_id] = frame.attempt
            resume = frame.resume if self.stage == "first" else []
            edges = self.open(frame.request_id, frame.attempt, Place("", "", "", 0, 0, {}, frame.sources, frame.sinks))
            if resume:
                for out in edges.outs.values():
                    for past in resume:
                        out.offer(Retained(past.start, past.end, past.last, past.body, {}, 1))
                    self.pump(out)
                edges.position, edges.over = resume[-1].end, resume[-1].last
        elif isinstance(frame, Close):
            self.requests.pop(frame.request_id, None)
            self.attempts.pop(frame.request_id, None)
            self.failures.pop(frame.request_id, None)
            self.send(Closed(frame.request_id))
        else:
            raise AssertionError(f"a worker got {frame}")

    def on_piece(self, edges: Edges, edge: InEdge, chunk: Chunk) -> None:
        edges.pieces.append((edge.link.edge, chunk))

    def able(self, request_id: str) -> bool:
        edges = self.requests[request_id]
        return bool(edges.pieces) or (self.stage == "first" and edges.asked and not edges.over)

    def step(self, request_id: str) -> None:
        edges = self.requests[request_id]
        if edges.pieces:
            name, chunk = edges.pieces.popleft()
            self.used(edges.ins[name])
            if self.stage == "first":
                edges.asked |= chunk.last
            elif not edges.over:
                assert isinstance(chunk.body, Text)
                self.produced[request_id] += range(chunk.start, chunk.end)
                self.emit(edges, chunk.start, chunk.end, chunk.last, f"{self.stage}({chunk.body.text})")
                edges.over = chunk.last
        else:
            edges.position += 1
            edges.over = edges.position == WORDS
            self.produced[request_id].append(edges.position - 1)
            self.emit(edges, edges.position - 1, edges.position, edges.over, f"w{next(self.world.entropy)}")

    def fail(self, request_id: str) -> None:
        self.requests[request_id].over = True
        self.requests[request_id].pieces.clear()
        failed = Failed(request_id, "stage_failed_on_purpose", "no", self.stage, attempt=self.attempts[request_id])
        self.failures[request_id] = failed
        self.send(failed)


@dataclass(slots=True)
class Stream:
    pipeline: str
    placed: bool = False
    open: set[str] = field(default_factory=set)
    got: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


class Gateway(Actor):
    role = "gateway"

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name)
        self.streams: dict[str, Stream] = {}
        self.ending: dict[str, Done | Cancel] = {}
        self.submitted = 0

    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, "gateway", self.name, self.name, inbox=self.name)

    def submit(self, request_id: str, pipeline: str) -> None:
        final = PIPELINES[pipeline].tasks["chat"].output.values()
        self.streams[request_id] = Stream(pipeline, open=set(final))
        self.send(self.submission(request_id, False))

    def submission(self, request_id: str, live: bool) -> Submit:
        pipeline = self.streams[request_id].pipeline
        limits = PIPELINES[pipeline].limits
        outputs = ["text", "audio"]
        return Submit(request_id, pipeline, "chat", ["text"], outputs, 1, limits.queue_s, limits.total_s, live=live)

    def on_welcome(self, again: bool) -> None:
        if again:
            for request_id, stream in list(self.streams.items()):
                if stream.placed:
                    self.send(self.submission(request_id, live=True))
                else:
                    # Workers may have got it from the scheduler that died: it begins under another id.
                    self.ending[request_id] = Cancel(request_id)
                    self.streams[request_id + "'"] = self.streams.pop(request_id)
                    self.send(self.submission(request_id + "'", live=False))
            for frame in self.ending.values():
                self.send(frame)

    def on_frame(self, frame: Plain) -> None:
        if isinstance(frame, Placed):
            stream = self.streams.get(frame.request_id)
            if stream is not None and not stream.placed:
                stream.placed = True
                edges = self.open(frame.request_id, frame.attempt, frame)
                if stream.pipeline == "spoken":
                    self.emit(edges, 0, 1, True, "ask")
                else:
                    for number in range(WORDS):
                        self.emit(edges, number, number + 1, number == WORDS - 1, f"ask{number}")
        elif isinstance(frame, Closed):
            self.ending.pop(frame.request_id, None)
        elif isinstance(frame, Rejected | Failed) and frame.request_id in self.streams:
            self.end(frame.request_id, frame.code, Cancel(frame.request_id))

    def on_piece(self, edges: Edges, edge: InEdge, chunk: Chunk) -> None:
        stream = self.streams[chunk.request_id]
        assert isinstance(chunk.body, Text)
        self.used(edge)
        stream.got[edge.link.stage].append(chunk.body.text)
        self.world.heard[chunk.request_id.rstrip("'"), edge.link.stage].append(chunk.body.text)
        if chunk.last:
            stream.open.discard(edge.link.stage)
            if not stream.open:
                self.end(chunk.request_id, "done", Done(chunk.request_id))

    def end(self, request_id: str, how: str, frame: Done | Cancel) -> None:
        del self.streams[request_id]
        self.requests.pop(request_id, None)
        self.world.outcomes[request_id.rstrip("'")].append(how)
        self.ending[request_id] = frame
        self.send(frame)
