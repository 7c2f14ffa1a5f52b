"""A pipeline as text, for `omni validate`. Pure."""

from omni_common.pipeline import Pipeline


def describe(pipeline: Pipeline) -> str:
    """Stages with their inputs and settings, then what clients can ask for and which way it goes."""
    lines = [f"{pipeline.name}: {pipeline.description}".rstrip(": "), "  stages"]
    entries: dict[str, list[str]] = {}
    for task in pipeline.tasks.values():
        for kind, entry in task.input.items():
            kinds = entries.setdefault(entry, [])
            kinds += [kind] if kind not in kinds else []
    for name, stage in pipeline.stages.items():
        held = pipeline.held(name)
        inputs = [f"{source} (whole)" if source in held else source for source in stage.inputs]
        sources = [*inputs, *([f"client ({', '.join(entries[name])})"] if name in entries else [])]
        engine = f"{stage.engine}({stage.model})" if stage.model else stage.engine
        replicas = f"{stage.replicas} x {stage.slots} slots"
        lines.append(f"    {name:<12} {engine:<28} {replicas:<16} <- {', '.join(sources)}")
        if stage.params:
            lines.append(f"    {'':<12} {', '.join(f'{key}={value}' for key, value in stage.params.items())}")
    lines.append("  tasks")
    for task_name, task in pipeline.tasks.items():
        for kind in task.input:
            for out in task.output:
                path = _path(pipeline, task_name, kind, out)
                if path:
                    lines.append(f"    {f'{task_name}: {kind} -> {out}':<30} {path}")
    return "\n".join(lines)


def _path(pipeline: Pipeline, task: str, kind: str, out: str) -> str:
    try:
        return " -> ".join(pipeline.plan(task, [kind], [out]).stages)
    except ValueError:
        return ""
