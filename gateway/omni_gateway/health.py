"""`/health`, `/health/live`, `/health/ready`: what works, and which stage is missing.

Live: this process answers. Ready: every stage of every pipeline has a ready replica. `/health` itself stays 200 as long
as any task works for some modalities, so that a dead talker does not take text away.
"""

from typing import Any

from aiohttp import web

from omni_common.frames import Fleet
from omni_common.pipeline import Pipeline
from omni_gateway.context import BUS


def add_routes(app: web.Application) -> None:
    app.router.add_get("/health", health)
    app.router.add_get("/health/live", live)
    app.router.add_get("/health/ready", ready)


async def live(_request: web.Request) -> web.Response:
    return web.json_response({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    report = _report(request)
    return web.json_response(report, status=200 if report["status"] == "ready" else 503)


async def health(request: web.Request) -> web.Response:
    report = _report(request)
    names = {"ready": "healthy", "degraded": "degraded", "unavailable": "unhealthy"}
    report["status"] = names[report["status"]]
    return web.json_response(report, status=503 if report["status"] == "unhealthy" else 200)


def _report(request: web.Request) -> dict[str, Any]:
    bus = request.app[BUS]
    missing = missing_stages(bus.fleet, list(bus.pipelines.values()))
    pipelines = {p.name: task_states(p, set(missing)) for p in bus.pipelines.values()}
    works = [ways for tasks in pipelines.values() for task in tasks.values() for ways in task.values()]
    status = "unavailable" if not any(works) else "degraded" if missing else "ready"
    report: dict[str, Any] = {"status": status, "missing": missing, "pipelines": pipelines}
    if bus.fleet is None:
        report["reason"] = "no scheduler has been heard yet"
    return report


def missing_stages(fleet: Fleet | None, pipelines: list[Pipeline]) -> dict[str, str]:
    """Stage -> why it has no ready replica."""
    states = {s.stage: s for s in fleet.stages} if fleet else {}
    missing: dict[str, str] = {}
    for pipeline in pipelines:
        for name in pipeline.stages:
            state = states.get(name)
            if state is None or not state.ready:
                missing[name] = (state.missing if state else "") or "no worker"
    return missing


def task_states(pipeline: Pipeline, missing: set[str]) -> dict[str, dict[str, bool]]:
    """Task -> `input>output` -> whether every stage on that way is ready."""
    tasks: dict[str, dict[str, bool]] = {}
    for name, task in pipeline.tasks.items():
        tasks[name] = {}
        for source in task.input:
            for target in task.output:
                try:
                    plan = pipeline.plan(name, [source], [target])
                except ValueError:
                    continue  # That output needs another input as well.
                tasks[name][f"{source}>{target}"] = not missing & set(plan.stages)
    return tasks
