"""Reads `deploy/pipelines/NAME.yaml`: `base:`, `only:`, platform overlays and `--set`, checked before anything starts.

A file may say `base: OTHER.yaml` (relative to itself) and is then merged over it: mappings member by member, lists and
scalars replaced. `only: [stages]` keeps these stages of the base, without its tasks and without the inputs that they
had from other stages. `NAME.PLATFORM.yaml` beside a file of that chain is merged over it when the platform is asked
for. Over the result come the global parameters, then `--set` in order. A pipeline's name is never inherited: without
`name:` it is the file's stem.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from omni_common.frames import Params
from omni_common.params import BY_ENGINE, NoParams
from omni_common.paths import deploy_dir
from omni_common.pipeline import Pipeline
from omni_common.pipeline_check import PipelineError, check, check_together, suggest
from omni_common.yaml_marks import Node, YamlError, merge, nest, parse

#: In `global_params`: every stage whose engine knows the parameter.
EVERY_STAGE = "*"


def known_pipelines() -> list[str]:
    """Names that `load_pipelines` finds without a path."""
    return sorted(path.stem for path in deploy_dir("pipelines").glob("*.yaml") if "." not in path.stem)


def load_pipelines(
    names: Sequence[str],
    overrides: Sequence[str] = (),
    platform: str | None = None,
    global_params: Mapping[str, Params] | None = None,
) -> dict[str, Pipeline]:
    """Load and check pipelines that one system is to serve, by pipeline name.

    `names`: known names or paths to `.yaml` files. `overrides`: values of `--set`, such as
    `stages.talker.params.speed=1.2`, applied to every pipeline that has the stage or task. `global_params`: parameters
    by stage, or under `EVERY_STAGE`. Raises PipelineError with every problem found.
    """
    trees = [_read(path, platform) for path in dict.fromkeys(_find(name) for name in names)]
    settings = [*_global_settings(trees, global_params or {}), *(_flag(override) for override in overrides)]
    problems = [problem for setting in settings for problem in _fits_nowhere(setting, trees)]
    if problems:
        raise PipelineError(problems)
    loaded: list[tuple[Node, Pipeline]] = []
    for tree in trees:
        for setting in settings:
            if _fits(setting.path, tree):
                tree = merge(tree, nest(setting.path, setting.value))
        pipeline, found = check(tree)
        problems += found
        if pipeline is not None:
            loaded.append((tree, pipeline))
    problems = problems or list(check_together(loaded))
    if problems:
        raise PipelineError(problems)
    return {pipeline.name: pipeline for _, pipeline in loaded}


def _find(name: str) -> Path:
    if "/" in name or name.endswith(".yaml"):
        path = Path(name).resolve()
        if not path.is_file():
            raise PipelineError([f"{name}: no such file"])
        return path
    known = known_pipelines()
    if name not in known:
        raise PipelineError([f"no pipeline `{name}`; known: {', '.join(known)}"])
    return (deploy_dir("pipelines") / f"{name}.yaml").resolve()


# ------------------------------------------------------------------------------------------------- base and overlays


def _read(path: Path, platform: str | None) -> Node:
    tree, overlays = _chain(path, platform, ())
    if platform is not None and not overlays:
        have = sorted(other.stem.split(".", 1)[1] for other in path.parent.glob(f"{path.stem}.*.yaml"))
        there = f"; there are: {', '.join(have)}" if have else "; it has none"
        raise PipelineError([f"{path}: no overlay {path.stem}.{platform}.yaml for platform `{platform}`{there}"])
    return tree


def _chain(path: Path, platform: str | None, above: tuple[Path, ...]) -> tuple[Node, int]:
    """The file merged over its bases, each with its overlay; and how many overlays there were."""
    tree, overlays = _parse_file(path), 0
    base, only = tree.members().get("base"), tree.members().get("only")
    own = {key: node for key, node in tree.members().items() if key not in ("base", "only")}
    own.setdefault("name", Node(path.stem, tree.at))
    tree = Node(own, tree.at)
    if base is not None:
        target = (path.parent / str(base.value)).resolve()
        if target in (*above, path):
            trail = " > ".join(p.name for p in (*above, path, target))
            raise PipelineError([f"{base.at}: base: the files are each other's base: {trail}"])
        if not target.is_file():
            near = suggest(target.name, [p.name for p in target.parent.glob("*.yaml")])
            raise PipelineError([f"{base.at}: base: no file {target}{near}"])
        below, overlays = _chain(target, platform, (*above, path))
        tree = merge(_keep_only(below, only) if only is not None else below, tree)
    elif only is not None:
        raise PipelineError([f"{only.key_at}: only: keeps stages of a base, and this file has no `base:`"])
    overlay = path.with_name(f"{path.stem}.{platform}.yaml")
    if platform is not None and overlay.is_file():
        tree, overlays = merge(tree, _parse_file(overlay)), overlays + 1
    return tree, overlays


def _parse_file(path: Path) -> Node:
    try:
        tree = parse(path.read_text(encoding="utf-8"), lambda line, column: f"{path}:{line + 1}:{column + 1}")
    except YamlError as error:
        raise PipelineError([str(error)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError([f"{path}: cannot be read: {error}"]) from None
    if not isinstance(tree.value, dict):
        raise PipelineError([f"{tree.at}: the file: wants a mapping with name, stages, tasks"])
    return tree


def _keep_only(base: Node, only: Node) -> Node:
    stages = base.at_path("stages").members()
    keep = only.value if isinstance(only.value, list) else [only]
    names = {str(node.value) for node in keep}
    problems = [
        f"{node.at}: only: the base has no stage `{node.value}`{suggest(str(node.value), stages)}"
        for node in keep
        if str(node.value) not in stages
    ]
    if problems or not names:
        raise PipelineError(problems or [f"{only.at}: only: names no stage{suggest('', stages)}"])

    def without_dropped(stage: Node) -> Node:
        inputs, stream = stage.members().get("inputs"), stage.members().get("stream")
        members = dict(stage.members())
        if inputs is not None and isinstance(inputs.value, list):
            kept = [node for node in inputs.value if str(node.value) in names]
            members["inputs"] = Node(kept, inputs.at, inputs.key_at)
        if stream is not None and isinstance(stream.value, dict):
            streams = {source: node for source, node in stream.value.items() if source in names}
            members["stream"] = Node(streams, stream.at, stream.key_at)
        return Node(members, stage.at, stage.key_at) if isinstance(stage.value, dict) else stage

    members = {key: node for key, node in base.members().items() if key != "tasks"}
    old = members["stages"]
    kept = {name: without_dropped(stage) for name, stage in stages.items() if name in names}
    members["stages"] = Node(kept, old.at, old.key_at)
    return Node(members, base.at)


# ------------------------------------------------------------------------------------------------------------- flags


@dataclass(frozen=True, slots=True)
class _Setting:
    """A value from a flag; `value.at` is the flag."""

    path: list[str]
    value: Node


def _flag(text: str) -> _Setting:
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise PipelineError([f"--set {text}: wants KEY=VALUE, such as stages.talker.params.speed=1.2"])
    try:
        return _Setting(path, parse(value, lambda line, column: f"--set {text}"))
    except YamlError as error:
        raise PipelineError([f"{error}; put the value in quotes"]) from None


def _global_settings(trees: Iterable[Node], params: Mapping[str, Params]) -> list[_Setting]:
    settings = []
    for target, values in params.items():
        for key, value in values.items():
            leaf = _leaf(value, f"global parameter {key}")
            stages = [target] if target != EVERY_STAGE else _stages_that_know(key, trees)
            settings += [_Setting(["stages", stage, "params", key], leaf) for stage in stages]
    return settings


def _stages_that_know(key: str, trees: Iterable[Node]) -> list[str]:
    found: list[str] = []
    keys: set[str] = set()
    for tree in trees:
        for name, stage in tree.at_path("stages").members().items():
            kind = BY_ENGINE.get(str(stage.at_path("engine").value), NoParams)
            known = {field.encode_name for field in msgspec.structs.fields(kind)}
            keys |= known
            if key in known:
                found.append(name)
    if not found:
        raise PipelineError([f"global parameter {key}: no stage takes it{suggest(key, keys)}"])
    return list(dict.fromkeys(found))


def _leaf(value: object, at: str) -> Node:
    if isinstance(value, list):
        return Node([_leaf(item, at) for item in value], at)
    assert value is None or isinstance(value, str | int | float | bool)
    return Node(value, at)


def _fits(path: list[str], tree: Node) -> bool:
    """Whether a setting means this pipeline: one for a stage or task does when the pipeline has it."""
    return len(path) < 2 or path[0] not in ("stages", "tasks") or path[1] in tree.at_path(path[0]).members()


def _fits_nowhere(setting: _Setting, trees: Sequence[Node]) -> list[str]:
    path = setting.path
    if any(_fits(path, tree) for tree in trees):
        return []
    have = {name for tree in trees for name in tree.at_path(path[0]).members()}
    return [f"{setting.value.at}: {path[0]}.{path[1]}: no loaded pipeline has it{suggest(path[1], have)}"]
