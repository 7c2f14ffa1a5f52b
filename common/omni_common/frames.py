"""The bus protocol: every frame type that crosses a process, and nothing else.

This module is the protocol's only source; `docs/protocol.md` is generated from it. On the wire a message is a ZeroMQ
multipart: part 0 is one msgpack map with a `type` tag, parts 1.. are raw tensor bytes that the map refers to by
index. Any msgpack implementation can speak it. Unknown fields are ignored; an unknown type is answered with `error`.

Planes: control frames travel between a peer (gateway or worker) and the scheduler over DEALER/ROUTER;
data frames (`chunk`, `grant`, `sent`, `release`) travel straight between peers, each into the other's PULL inbox.
"""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1

#: The gateway's name as an end of an edge: `client>thinker` feeds the thinker, `code2wav>client` is a final edge.
CLIENT = "client"

Scalar = bool | int | float | str | None
#: A stage's parameters for one request; which keys are valid is decided by the engine's type in `params.py`.
Params = dict[str, Scalar | list[str | int]]
Role = Literal["worker", "gateway"]
WorkerState = Literal["loading", "ready", "draining", "failed"]


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Struct(msgspec.Struct, omit_defaults=True, gc=False):
    """Base of everything inside a frame."""


class Frame(Struct, tag_field="type", tag=_snake):
    """Base of every frame: a msgpack map whose `type` is the class name in snake case."""


# ---------------------------------------------------------------------------------------------------------- tensors


class InlineTensor(Struct, tag_field="at", tag="inline"):
    """A tensor of at most 16 KiB, carried inside the frame."""

    dtype: str
    shape: list[int]
    #: C-contiguous bytes, little endian.
    data: bytes


class ArenaTensor(Struct, tag_field="at", tag="arena"):
    """A tensor in its producer's shared-memory arena. It stays valid until its holder sends `release`."""

    dtype: str
    shape: list[int]
    #: Incarnation of the process that owns the arena; its descriptor comes from `<run folder>/<incarnation>.fd`.
    arena: str
    #: Byte offset in the arena, a multiple of 4096.
    offset: int
    nbytes: int
    #: Counts the uses of this offset; a reference with another generation than the slot's header is stale.
    generation: int


class PartTensor(Struct, tag_field="at", tag="part"):
    """A tensor between hosts: its raw bytes follow the frame, as raw part number `index` (from 0)."""

    dtype: str
    shape: list[int]
    index: int


Tensor = InlineTensor | ArenaTensor | PartTensor

# ------------------------------------------------------------------------------------------------------------ bodies


class TextPart(Struct, tag_field="part", tag="text"):
    text: str


class AudioPart(Struct, tag_field="part", tag="audio"):
    """Stands for the request's audio number `index`; its words come over the edge from the recogniser."""

    index: int


class ImagePart(Struct, tag_field="part", tag="image"):
    """Stands for the request's image number `index`."""

    index: int


class VideoPart(Struct, tag_field="part", tag="video"):
    """Stands for the request's video number `index`; `audio` is the number of its sound among the audios, -1: none."""

    index: int
    audio: int = -1


Part = TextPart | AudioPart | ImagePart | VideoPart


class ToolCall(Struct):
    """An assistant's call of a tool."""

    id: str
    name: str
    #: A JSON object, as text.
    arguments: str


class Message(Struct):
    role: Literal["system", "user", "assistant", "tool"]
    parts: list[Part]
    #: Of an assistant: what it called, and how it came to that.
    tool_calls: list[ToolCall] = []
    reasoning: str = ""
    #: Of a tool: which call this answers.
    tool_call_id: str = ""


class Prompt(Struct, tag_field="kind", tag="prompt"):
    """A conversation for a text stage. Edge unit: prompts (always [0, 1))."""

    messages: list[Message]
    #: What the assistant may call: a JSON array of tools as OpenAI has them, as text.
    tools: str = ""
    #: Variables of the model's chat template.
    template: dict[str, bool | str] = {}
    #: What the answer begins with; it is not part of what comes out.
    prefix: str = ""


class PromptFacts(Struct):
    """What its preprocessor knows of a prompt, and the client's gateway needs."""

    #: Tokens that stand for sounds, and for images and frames of videos.
    audio_tokens: int = 0
    image_tokens: int = 0
    #: The answer begins in the midst of reasoning: the chat template has opened it.
    reasoning: bool = False


class Text(Struct, tag_field="kind", tag="text"):
    """A piece of text. Edge unit: tokens of the producing stage; for text from a client: characters."""

    text: str = ""
    #: Token ids behind `text`. A character whose bytes span tokens comes with the last of them, so a piece may have
    #: ids and no text.
    ids: list[int] = []
    #: Why the text ended, on the last piece only.
    finish: Literal["", "stop", "length"] = ""
    #: Tokens of the prompt, on the last piece only.
    prompt_tokens: int = 0
    #: On the first piece only, and only behind a preprocessor.
    prompt: PromptFacts | None = None


class Segment(Struct):
    """A stretch of recognised speech; times in seconds from the start of its audio."""

    start_s: float
    end_s: float
    text: str
    ids: list[int] = []
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0


class Transcript(Struct, tag_field="kind", tag="transcript"):
    """Words of one audio or of a further stretch of it. Edge unit: audio samples at 16 kHz over all audios in order."""

    #: Which audio of the request.
    index: int
    segments: list[Segment]
    #: ISO 639-1 code of the language spoken.
    language: str = ""
    #: Seconds of the whole audio `index`.
    duration_s: float = 0.0
    #: True on the last piece of audio `index`.
    end_of_audio: bool = False


class Audio(Struct, tag_field="kind", tag="audio"):
    """Sound in tensor `samples`, float32 [n], mono. Edge unit: samples."""

    rate: int
    #: Which audio of the request (input), 0 on output.
    index: int = 0
    #: What these samples say, as far as a piece of text begins in them (output only).
    text: str = ""


class Image(Struct, tag_field="kind", tag="image"):
    """One image in tensor `pixels`, uint8 [height, width, 3], RGB, upright. Edge unit: pieces of input."""

    #: Which image of the request (input).
    index: int = 0


class Video(Struct, tag_field="kind", tag="video"):
    """Frames of a video in tensor `frames`, uint8 [n, height, width, 3], RGB. Edge unit: pieces of input."""

    #: Which video of the request (input).
    index: int = 0
    #: Frames a second, as sampled.
    fps: float = 0.0
    #: True on the last piece of video `index`.
    end_of_video: bool = False


class Features(Struct, tag_field="kind", tag="features"):
    """A tokenised prompt with its media as a model's encoders take them. Edge unit: prompts (always [0, 1)).

    Tensor `ids` int64 [length] holds the prompt with every media placeholder repeated to its length; the others are
    named as transformers' processor of the family names them, without a batch axis of 1.
    """

    #: Digest of each media item in the order of its placeholders: equal content, equal digest.
    digests: list[str] = []
    use_audio_in_video: bool = False
    prompt: PromptFacts = msgspec.field(default_factory=PromptFacts)


class Codes(Struct, tag_field="kind", tag="codes"):
    """Codec frames of a talker. Edge unit: frames."""

    #: A list a frame, an id a code group.
    frames: list[list[int]]
    #: Why the frames ended, on the last piece only.
    finish: Literal["", "stop", "length"] = ""


class Latent(Struct, tag_field="kind", tag="latent"):
    """A piece of a stage's internal representation in the chunk's tensors, named and shaped as the model file says.

    Edge unit: frames. `text` is the source text that the frames speak; `characters` are its [start, end) in the
    concatenation of all text that the stage received: the decision where the text was cut.
    """

    text: str = ""
    characters: tuple[int, int] = (0, 0)
    #: True on the last piece of one independently rendered unit (a sentence).
    end_of_unit: bool = False


Body = Prompt | Text | Transcript | Audio | Image | Video | Features | Codes | Latent


class Decision(Struct):
    """A chunk without its tensors: what was decided, which is never decided again."""

    start: int
    end: int
    last: bool = False
    body: Body | None = None


# ------------------------------------------------------------------------------------------------------- data plane


class Chunk(Frame):
    """One piece of a stage's output for one request on one edge. A PULL inbox gets it from its producer."""

    request_id: str
    #: `producer>consumer`, by stage name.
    edge: str
    #: Producing incarnation and the attempt it was placed with; others than the placed ones are dropped.
    source: str
    attempt: int
    #: The opening of the edge that this answers (see `grant`), and the number within it, from 0 without gaps.
    opening: int
    seq: int
    #: Position [start, end) in the edge's unit.
    start: int
    end: int
    #: True on the edge's last chunk, which may be empty.
    last: bool = False
    body: Body | None = None
    tensors: dict[str, Tensor] = {}
    #: Decisions of stages further up behind this chunk that the edge has not carried yet, by stage.
    behind: dict[str, list[Decision]] = {}


class Grant(Frame):
    """Consumer to producer: opens an edge, acknowledges, and extends credit.

    A higher `opening` than before opens the edge (again): the producer goes back to `position` and counts anew. Within
    an opening all figures are cumulative; until the edge's end they are restated once a second.
    """

    request_id: str
    edge: str
    #: Granting (consumer) incarnation and the attempt it was placed with.
    source: str
    attempt: int
    opening: int
    #: Everything before this position was received and opened; the producer sends from here when the edge opens.
    position: int
    #: The producer may send chunks while their number on this edge is below this.
    chunks: int
    #: ... and while the payload bytes sent on this edge are below this. One chunk may overshoot it.
    nbytes: int


class Sent(Frame):
    """Producer to consumer, once a second while something that was sent is not acknowledged: how much it was.

    A consumer that has less after the next second opens the edge again.
    """

    request_id: str
    edge: str
    #: Producing incarnation.
    source: str
    opening: int
    #: Chunks sent in this opening.
    chunks: int


class Release(Frame):
    """Consumer to arena owner: these slots are no longer read."""

    #: Releasing incarnation.
    source: str
    #: (offset, generation) pairs.
    slots: list[tuple[int, int]]


# ---------------------------------------------------------------------------------------------- control plane: peers


class Holding(Struct):
    """A request that a worker still has when it says hello to a new scheduler."""

    request_id: str
    stage: str
    attempt: int


class Hello(Frame):
    """First frame of a peer, and again after the scheduler came back. Answered by `welcome` or `refused`."""

    version: int
    role: Role
    incarnation: str
    #: For people: `talker-0`, `gateway-0`.
    name: str
    #: The PULL inbox, `ipc://...` or `tcp://...`.
    inbox: str = ""
    pid: int = 0
    host: str = ""
    #: Worker only: its stage, the digest of everything that changes the stage's output, and how many requests it runs.
    stage: str = ""
    digest: str = ""
    slots: int = 0
    holding: list[Holding] = []


class State(Frame):
    """Worker: where its start-up stands, or that it is ready, draining or failed."""

    state: WorkerState
    #: `loading`: what it does; `failed`: the reason.
    detail: str = ""
    #: 0..1 while loading.
    progress: float = 0.0


class Beat(Frame):
    """Once a second. Busy without a change of `steps` means hung, however regular the beats."""

    state: WorkerState = "ready"
    #: The engine loop's own progress counter.
    steps: int = 0
    busy: bool = False
    running: int = 0
    waiting: int = 0
    arena_used: int = 0
    arena_total: int = 0
    #: Payload bytes sent since the start, by way: inline, arena, part.
    sent: dict[str, int] = {}
    #: Items produced since the start, in the stage's unit, and seconds that the engine spent in `step`.
    produced: int = 0
    step_s: float = 0.0
    #: Since the start: retained chunks given up for lack of arena, chunks that arrived twice, edges sent again because
    #: something was missing.
    evicted: int = 0
    duplicates: int = 0
    resends: int = 0


class Submit(Frame):
    """Gateway: asks for admission. Answered by `placed` or `rejected`."""

    request_id: str
    pipeline: str
    #: A task of the pipeline's YAML: chat, speech, transcription.
    task: str
    #: Modalities of the input that are present, and of the output that are asked for.
    inputs: list[str]
    outputs: list[str]
    seed: int
    #: Remaining seconds that the request may wait for placement, and may take in all.
    queue_s: float
    total_s: float
    #: Parameters by stage.
    params: dict[str, Params] = {}
    trace: str = ""
    #: It was placed by an earlier scheduler and runs; the workers that have it say so in their `hello`.
    live: bool = False


class Cancel(Frame):
    """Gateway: the client is gone or changed its mind. Answered by `closed` when no stage holds the request."""

    request_id: str
    reason: str = ""


class Done(Frame):
    """Gateway: the end of every final edge has arrived. Answered by `closed`."""

    request_id: str


class Failed(Frame):
    """A request failed in a stage (worker to scheduler), or as a whole (scheduler to gateway)."""

    request_id: str
    code: str
    message: str
    stage: str = ""
    #: HTTP status that fits when nothing was sent to the client yet.
    status: int = 500
    param: str | None = None
    #: Worker only: the attempt that failed.
    attempt: int = 0


class Closed(Frame):
    """Worker: nothing of this request is left here. Scheduler to gateway: nothing is left anywhere."""

    request_id: str


class Bye(Frame):
    """A peer leaves in order; what it held has been finished or handed back. Answered by `bye`: now it may go."""

    reason: str = ""


class Look(Frame):
    """Anybody in the run folder, without a hello: a health check. Answered by `fleet`."""


# ------------------------------------------------------------------------------------------ control plane: scheduler


class Welcome(Frame):
    #: The scheduler's incarnation; another one than before means that it came back empty.
    scheduler: str
    beat_s: float = 1.0


class Refused(Frame):
    """The peer cannot take part; it ends with this reason."""

    reason: str


class Link(Struct):
    """The other end of one edge of a request."""

    edge: str
    #: Stage name, or `client`.
    stage: str
    incarnation: str
    inbox: str


class Place(Frame):
    """Scheduler to worker: run this request. Only this creates state in a worker."""

    request_id: str
    pipeline: str
    stage: str
    attempt: int
    seed: int
    params: Params = {}
    #: Where input comes from (grants go there) and where output goes.
    sources: list[Link] = []
    sinks: list[Link] = []
    #: Remaining seconds of the request.
    total_s: float = 0.0
    trace: str = ""
    #: The stage ran elsewhere before: the longest output that any of its consumers has. It is not decided again.
    resume: list[Decision] = []


class Placed(Frame):
    """Scheduler to gateway: admitted and placed. `sinks` take the input, `sources` are the final edges."""

    request_id: str
    attempt: int
    sources: list[Link] = []
    sinks: list[Link] = []


class Rejected(Frame):
    request_id: str
    code: str
    message: str
    status: int
    retry_after_s: float = 0.0
    param: str | None = None


class Close(Frame):
    """Scheduler to worker: drop the request, running or not. Idempotent; always answered by `closed`."""

    request_id: str
    reason: str = ""


class Recover(Frame):
    """Scheduler to what lives further down than a dead stage: take nothing more from it and say what you have or know
    of its output. Answered by `held`."""

    request_id: str
    #: `stage>you`, also where the stage's output goes to others only.
    edge: str
    #: The dead producer; empty: whoever it was, a scheduler that came back empty does not know.
    incarnation: str


class Held(Frame):
    """What somebody has, or knows from what came after it, of the output of a dead stage."""

    request_id: str
    edge: str
    #: As in `recover`.
    incarnation: str
    #: From position 0 without gaps.
    decisions: list[Decision] = []


class Relink(Frame):
    """Scheduler to the live neighbours of a stage that was placed anew: this is the edge's other end from now on.

    A consumer opens the edge again from its position; a producer waits for the new consumer's grant and replays.
    """

    request_id: str
    link: Link


class Lost(Frame):
    """Scheduler to all: this incarnation is gone. Its slots come back, connections to it close."""

    incarnation: str


class Drain(Frame):
    """Scheduler to a worker that said it is draining: every `place` for it has been sent before this."""


class Fenced(Frame):
    """Scheduler to a peer that it had declared dead: end."""

    reason: str


class Replica(Struct):
    name: str
    incarnation: str
    stage: str
    state: WorkerState
    detail: str = ""
    progress: float = 0.0
    pid: int = 0
    host: str = ""
    slots: int = 0
    #: Requests placed here now.
    running: int = 0
    steps: int = 0
    produced: int = 0
    step_s: float = 0.0
    arena_used: int = 0
    arena_total: int = 0
    sent: dict[str, int] = {}
    evicted: int = 0
    duplicates: int = 0
    resends: int = 0
    #: Seconds since the last beat.
    silent_s: float = 0.0


class StageStatus(Struct):
    stage: str
    ready: int
    waiting: int
    #: Why no replica is ready, empty when one is.
    missing: str = ""


class Fleet(Frame):
    """Scheduler to gateways, and to whoever looks: who is there, on every change and once a second."""

    scheduler: str
    stages: list[StageStatus] = []
    replicas: list[Replica] = []
    gateways: int = 0
    #: Their process ids.
    gateway_pids: list[int] = []
    queued: int = 0
    running: int = 0
    admitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    deaths: int = 0
    #: Stages of requests that were placed anew, and the seconds from the death to that, summed.
    replays: int = 0
    replay_s: float = 0.0


# ------------------------------------------------------------------------------------------------------------- both


class Error(Frame):
    """A frame could not be understood: unknown type, wrong field, wrong version."""

    code: str
    message: str


Plain = (
    Chunk | Grant | Sent | Release
    | Hello | State | Beat | Submit | Cancel | Done | Failed | Closed | Held | Bye | Look
    | Welcome | Refused | Place | Placed | Rejected | Close | Recover | Relink | Lost | Drain | Fenced | Fleet
    | Error
)  # fmt: skip


class Batch(Frame):
    """Several frames for one peer that became ready in the same turn of the loop, in order."""

    frames: list[Plain]


AnyFrame = Plain | Batch
