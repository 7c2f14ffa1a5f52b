"""A pipeline: stages, edges and tasks, as `deploy/pipelines/NAME.yaml` describes them. Types and graph only.

Reading the file, `base:`, overlays and `--set` are in `pipeline_file.py`; nothing here does I/O.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_common.frames import CLIENT, Params

Name = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*$", max_length=32)]
Modality = Literal["text", "audio", "image", "video"]


class Node(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of everything in a pipeline file: an unknown key is an error."""


class Stage(Node):
    #: `llamacpp`, `recogniser`, `onnx`, or `fake` (test rig).
    engine: str
    #: Which model of the engine: a prepared folder (`omni prepare`), or a module of `omni_worker.models`.
    model: str = ""
    #: Stages that feed this one (the client is named in `tasks`).
    inputs: list[Name] = []
    #: False: begin when an input is complete, not with its first chunk; or so for some inputs, as `{thinker: false}`.
    #: Unset: as the pipeline has it. What comes out is the same either way.
    stream: bool | dict[Name, bool] | None = None
    #: Most memory for what one request's inputs have brought and still wait for.
    hold_mib: Annotated[int, Meta(ge=1, le=65536)] = 256
    #: Worker processes that the supervisor starts.
    replicas: Annotated[int, Meta(ge=0, le=64)] = 1
    #: Requests at a time in one replica.
    slots: Annotated[int, Meta(ge=1, le=4096)] = 8
    threads: Annotated[int, Meta(ge=1, le=256)] = 1
    #: Defaults of the request's parameters, checked against the engine's (`params.py`).
    params: Params = {}
    #: Settings of the engine that are fixed when it loads.
    options: dict[str, Any] = {}
    #: Shared memory for this stage's output tensors.
    arena_mib: Annotated[int, Meta(ge=1, le=65536)] = 64
    #: Busy without progress for this long means hung.
    stall_s: Annotated[float, Meta(gt=0)] = 30.0
    #: Longest start-up, from the process start to ready.
    load_s: Annotated[float, Meta(gt=0)] = 300.0

    def digest(self, name: str) -> str:
        """Digest of what changes the stage's output; a worker with another one is refused."""
        basis = [name, self.engine, self.model, sorted(self.options.items())]
        return hashlib.sha256(msgspec.json.encode(basis)).hexdigest()[:16]


class Task(Node):
    """What a client can ask of the pipeline, and which stages it enters and leaves by."""

    #: Modality -> the stage that takes it.
    input: dict[Modality, Name]
    #: Modality -> the stage whose output is the client's.
    output: dict[Modality, Name]


class Limits(Node):
    #: Requests waiting for placement; more are answered with 429.
    queue: Annotated[int, Meta(ge=0)] = 64
    #: Seconds that a request may wait for placement.
    queue_s: Annotated[float, Meta(gt=0)] = 30.0
    #: Seconds from submission to the first chunk for the client, and to the end.
    first_chunk_s: Annotated[float, Meta(gt=0)] = 60.0
    total_s: Annotated[float, Meta(gt=0)] = 300.0
    #: Seconds that a running request waits for a replica of a stage that died while none is even loading.
    recover_s: Annotated[float, Meta(gt=0)] = 10.0
    #: Characters of text, seconds and bytes of one audio.
    text_chars: Annotated[int, Meta(ge=1)] = 32_768
    speech_chars: Annotated[int, Meta(ge=1)] = 4096
    audio_s: Annotated[float, Meta(gt=0)] = 600.0
    audio_mib: Annotated[int, Meta(ge=1)] = 25
    #: Images and videos of one conversation, and audios at an address; MiB of all its images and frames, decoded.
    media: Annotated[int, Meta(ge=0)] = 64
    media_mib: Annotated[int, Meta(ge=1)] = 256
    #: Bytes and pixels of one image as it comes, and the pixels that are left of it: a larger one is scaled down.
    image_mib: Annotated[int, Meta(ge=1)] = 20
    image_source_pixels: Annotated[int, Meta(ge=1, le=2**26)] = 2**25
    image_pixels: Annotated[int, Meta(ge=1)] = 2**22
    #: Seconds, bytes and pixels a frame of one video as it comes.
    video_s: Annotated[float, Meta(gt=0)] = 120.0
    video_mib: Annotated[int, Meta(ge=1)] = 48
    video_source_pixels: Annotated[int, Meta(ge=1)] = 4096 * 2304
    #: What is left of it: frames a second, frames in all (a longer one has fewer a second), and pixels a frame.
    video_fps: Annotated[float, Meta(gt=0)] = 2.0
    video_frames: Annotated[int, Meta(ge=1)] = 64
    video_pixels: Annotated[int, Meta(ge=1)] = 768 * 784


class Voice(Node):
    id: str
    name: str = ""
    #: Other names that mean this voice (OpenAI's).
    aliases: list[str] = []


class Formats(Node):
    """How the model of the text stage writes what is not for reading, see `formats.py`. Empty: it does not."""

    #: Calls of tools. Without it requests with tools are refused.
    tools: Literal["", "hermes"] = ""
    #: The way to an answer.
    reasoning: Literal["", "think"] = ""


class Pipeline(Node):
    name: Name
    stages: dict[Name, Stage]
    tasks: dict[Name, Task]
    #: Model ids by which clients ask for it, besides `name`.
    aliases: list[str] = []
    description: str = ""
    limits: Limits = msgspec.field(default_factory=Limits)
    formats: Formats = msgspec.field(default_factory=Formats)
    #: Whether stages take each other's output as it comes, see `Stage.stream`. The client's answer streams either way.
    stream: bool = True
    #: Sample rate of audio output, in Hz.
    audio_rate: Annotated[int, Meta(ge=8000, le=192_000)] = 24_000
    voices: list[Voice] = []
    #: Languages that the pipeline hears and speaks (ISO 639-1).
    languages: list[str] = msgspec.field(default_factory=lambda: ["en"])
    #: Tokens that fit into the text stage's context.
    context_tokens: Annotated[int, Meta(ge=1)] = 8192

    def edges(self) -> list[tuple[str, str]]:
        """Every (producer, consumer) pair between stages."""
        return [(source, name) for name, stage in self.stages.items() for source in stage.inputs]

    def held(self, stage: str) -> frozenset[str]:
        """Inputs that `stage` takes only when they are complete."""
        inputs, said = self.stages[stage].inputs, self.stages[stage].stream
        if isinstance(said, dict):
            return frozenset(source for source in inputs if not said.get(source, self.stream))
        return frozenset() if (self.stream if said is None else said) else frozenset(inputs)

    def plan(self, task: str, inputs: Sequence[str], outputs: Sequence[str]) -> "Plan":
        """The part of the graph that a request needs: stages on a path from a present input to a wanted output.

        Raises ValueError naming the modality that the task cannot take or give.
        """
        spec = self.tasks[task]
        for kind, wanted, have in (("input", inputs, spec.input), ("output", outputs, spec.output)):
            for modality in wanted:
                if modality not in have:
                    raise ValueError(f"{task} of {self.name} has no {modality} {kind}")
        entry = {spec.input[m] for m in inputs}  # type: ignore[index]
        final = {spec.output[m] for m in outputs}  # type: ignore[index]
        down: dict[str, list[str]] = {name: [] for name in self.stages}
        for source, target in self.edges():
            down[source].append(target)
        reached = _closure(entry, down)
        needed = reached & _closure(final, {name: stage.inputs for name, stage in self.stages.items()})
        if final - needed:
            raise ValueError(f"{', '.join(sorted(final - needed))} cannot be reached from {' and '.join(inputs)}")
        edges = [(CLIENT, name) for name in self.stages if name in entry & needed]
        edges += [(a, b) for a, b in self.edges() if a in needed and b in needed]
        edges += [(name, CLIENT) for name in self.stages if name in final]
        return Plan(stages=[name for name in self.stages if name in needed], edges=edges)


class Plan(msgspec.Struct, frozen=True):
    """Stages and edges of one request; `client` stands for the gateway."""

    stages: list[str]
    edges: list[tuple[str, str]]

    def into(self, stage: str) -> list[str]:
        return [a for a, b in self.edges if b == stage]

    def out_of(self, stage: str) -> list[str]:
        return [b for a, b in self.edges if a == stage]

    def below(self, stage: str) -> list[str]:
        """Everything that `stage`'s output reaches, by whatever way, nearest first; the client included."""
        found: list[str] = []
        reached = [stage]
        for name in reached:
            fresh = [other for other in self.out_of(name) if other not in found]
            found += fresh
            reached += [other for other in fresh if other != CLIENT]
        return found


def edge_name(source: str, target: str) -> str:
    return f"{source}>{target}"


def _closure(start: set[str], step: dict[str, list[str]]) -> set[str]:
    seen: set[str] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(step[name])
    return seen
