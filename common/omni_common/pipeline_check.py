"""What can be wrong with a pipeline file, a line each: place, path of the key, what is wrong, the nearest right key.

Works on marked YAML (`yaml_marks.Node`), so a value from an overlay or a flag blames the overlay or the flag.
"""

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec

from omni_common.errors import OmniError
from omni_common.frames import CLIENT
from omni_common.params import BY_ENGINE
from omni_common.pipeline import Pipeline
from omni_common.yaml_marks import Node

#: Settings of a stage that its processes have but once, so pipelines that share the stage must agree on them.
PROCESS_SETTINGS = (
    "engine",
    "model",
    "options",
    "replicas",
    "slots",
    "threads",
    "arena_mib",
    "hold_mib",
    "stall_s",
    "load_s",
)
#: Engines that render what `formats` speaks of.
FORMATTING = ("processor", "fake")


class PipelineError(OmniError):
    """Pipeline files or `--set` flags are wrong. The message has one line a problem, with its place."""

    def __init__(self, problems: Iterable[str]) -> None:
        super().__init__("\n".join(dict.fromkeys(problems)), status=400, code="invalid_pipeline")


def suggest(key: str, valid: Collection[str]) -> str:
    """The end of a message about an unknown key: the nearest valid one, or else all of them."""
    near = difflib.get_close_matches(key, valid, n=1)
    if near:
        return f"; did you mean `{near[0]}`?"
    return f"; valid: {', '.join(sorted(valid))}" if valid else "; nothing is valid here"


def check(tree: Node) -> tuple[Pipeline | None, list[str]]:
    """The pipeline that `tree` describes, or None and the problems. The graph is looked at once types are right."""
    problems = [*_types(tree, Pipeline, ()), *_stage_params(tree)]
    if problems:
        return None, problems
    pipeline = msgspec.convert(tree.plain(), Pipeline)
    problems = list(_graph(tree, pipeline))
    return (None, problems) if problems else (pipeline, [])


def check_together(loaded: Collection[tuple[Node, Pipeline]]) -> Iterator[str]:
    """Problems of pipelines that one system is to serve at the same time."""
    owner: dict[str, str] = {}
    first: dict[str, tuple[Node, Pipeline]] = {}
    for tree, pipeline in loaded:
        if pipeline.name in first:
            yield f"{tree.at_path('name').at}: name: another loaded pipeline is also named `{pipeline.name}`"
        first[pipeline.name] = (tree, pipeline)
        for id_ in dict.fromkeys([pipeline.name, *pipeline.aliases]):
            if owner.setdefault(id_, pipeline.name) != pipeline.name:
                yield f"{tree.at_path('aliases').at}: aliases: `{id_}` also means pipeline `{owner[id_]}`"
        for other_tree, other in first.values():
            for name in pipeline.stages.keys() & other.stages.keys():
                for key in PROCESS_SETTINGS:
                    mine, theirs = getattr(pipeline.stages[name], key), getattr(other.stages[name], key)
                    if mine != theirs:
                        yield (
                            f"{tree.at_path('stages', name, key).at}: stages.{name}.{key}: {mine!r}, but pipeline "
                            f"`{other.name}`, which shares the stage, has {theirs!r} "
                            f"({other_tree.at_path('stages', name, key).at})"
                        )
                shared = set(pipeline.stages[name].inputs) & set(other.stages[name].inputs)
                for source in sorted(shared & (pipeline.held(name) ^ other.held(name))):
                    yield (
                        f"{tree.at_path('stages', name, 'stream').at}: stages.{name}.stream: `{source}` streams in one "
                        f"of `{pipeline.name}` and `{other.name}`, which share the stage, and not in the other"
                    )


def _types(node: Node, kind: Any, path: tuple[str, ...]) -> Iterator[str]:
    where = f"{node.at}: {'.'.join(path) or 'the file'}: "
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        if not isinstance(node.value, dict):
            yield f"{where}wants a mapping with {', '.join(fields)}"
            return
        for key, child in node.value.items():
            if key in fields:
                yield from _types(child, fields[key].type, (*path, key))
            else:
                yield f"{child.key_at}: {'.'.join((*path, key))}: unknown key `{key}`{suggest(key, fields)}"
        for key, field in fields.items():
            if field.required and key not in node.value:
                yield f"{where}`{key}` is missing"
    elif get_origin(kind) is dict and isinstance(node.value, dict):
        key_kind, value_kind = get_args(kind)
        for key, child in node.value.items():
            problem = _value(key, key_kind)
            if problem:
                yield f"{child.key_at}: {'.'.join((*path, key))}: {problem}"
            yield from _types(child, value_kind, (*path, key))
    elif get_origin(kind) is list and isinstance(node.value, list):
        for number, child in enumerate(node.value):
            yield from _types(child, get_args(kind)[0], (*path, str(number)))
    else:
        problem = _value(node.plain(), kind)
        if problem:
            yield where + problem


def _value(value: Any, kind: Any) -> str:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error).split(" - at `")[0]
        if get_origin(kind) is Literal and isinstance(value, str):
            return f"unknown value `{value}`" + suggest(value, get_args(kind))
        return text[0].lower() + text[1:]
    return ""


def _stage_params(tree: Node) -> Iterator[str]:
    for name, stage in tree.at_path("stages").members().items():
        engine = stage.members().get("engine")
        if engine is None or not isinstance(engine.value, str):
            continue
        if engine.value not in BY_ENGINE:
            near = suggest(engine.value, BY_ENGINE)
            yield f"{engine.at}: stages.{name}.engine: unknown engine `{engine.value}`{near}"
        elif "params" in stage.members():
            yield from _types(stage.members()["params"], BY_ENGINE[engine.value], ("stages", name, "params"))


def _graph(tree: Node, pipeline: Pipeline) -> Iterator[str]:
    def wrong(what: str, *path: str) -> str:
        node = tree.at_path(*path)
        return f"{node.at}: {'.'.join(path)}: {what}"

    stages = pipeline.stages
    known = True
    if CLIENT in stages:
        yield wrong(f"`{CLIENT}` stands for the client and cannot be a stage", "stages", CLIENT)
    for name, stage in stages.items():
        for source, count in Counter(stage.inputs).items():
            if source not in stages:
                known = False
                yield wrong(f"no stage `{source}`{suggest(source, stages)}", "stages", name, "inputs")
            elif count > 1:
                yield wrong(f"`{source}` stands {count} times", "stages", name, "inputs")
        for source in stage.stream if isinstance(stage.stream, dict) else ():
            if source not in stage.inputs:
                yield wrong(f"no input `{source}`{suggest(source, stage.inputs)}", "stages", name, "stream", source)
    for task, spec in pipeline.tasks.items():
        for side, ends in (("input", spec.input), ("output", spec.output)):
            if not ends:
                yield wrong("is empty: name a modality and its stage", "tasks", task, side)
            for modality, name in ends.items():
                if name not in stages:
                    known = False
                    yield wrong(f"no stage `{name}`{suggest(name, stages)}", "tasks", task, side, modality)
    if not known:
        return
    cycle = _cycle(pipeline)
    if cycle:
        yield wrong(f"the stages feed each other in a circle: {' > '.join(cycle)}", "stages", cycle[-1], "inputs")
        return
    if pipeline.formats.reasoning and any("audio" in spec.output for spec in pipeline.tasks.values()):
        yield wrong("what the model thinks would be spoken: no task may have audio output", "formats", "reasoning")
    for key in ("tools", "reasoning") if "chat" in pipeline.tasks else ():
        entry = stages[pipeline.tasks["chat"].input.get("text", next(iter(stages)))]
        if getattr(pipeline.formats, key) and entry.engine not in FORMATTING:
            yield wrong(f"chat enters by an engine that renders no {key}: {entry.engine}", "formats", key)
    used: set[str] = set()
    for task, spec in pipeline.tasks.items():
        for source in spec.input:
            used |= _served(pipeline, task, [source], list(spec.output))
        for target in spec.output:
            if not any(_served(pipeline, task, [source], [target]) for source in spec.input):
                yield wrong(f"no input of {task} leads to `{spec.output[target]}`", "tasks", task, "output", target)
    for name in stages:
        if name not in used:
            yield wrong(
                "no task uses this stage: nothing leads from a task's input through it to an output", "stages", name
            )


def _served(pipeline: Pipeline, task: str, inputs: list[Any], outputs: list[Any]) -> set[str]:
    """Stages on the way from the inputs to those outputs that can be reached from them."""
    served: set[str] = set()
    for output in outputs:
        try:
            served |= set(pipeline.plan(task, inputs, [output]).stages)
        except ValueError:
            continue
    return served


def _cycle(pipeline: Pipeline) -> list[str]:
    """Names along one cycle, the first repeated at the end; empty when there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for source in pipeline.stages[name].inputs:
            found = visit(source, [*trail, name])
            if found:
                return found
        done.add(name)
        return []

    for name in pipeline.stages:
        found = visit(name, [])
        if found:
            return found[::-1]
    return []
