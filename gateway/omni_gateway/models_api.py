"""`GET /v1/models`: what can be asked for, one entry for every name and alias."""

import time
from typing import Any

from aiohttp import web

from omni_common.errors import invalid
from omni_common.pipeline import Pipeline
from omni_gateway.context import BUS
from omni_gateway.errors import quoted

_STARTED = int(time.time())


def add_routes(app: web.Application) -> None:
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", show_model)


async def list_models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": list(_models(request).values())})


async def show_model(request: web.Request) -> web.Response:
    wanted = request.match_info["model"]
    found = _models(request).get(wanted)
    if found is None:
        text = f"The model {quoted(wanted)} does not exist."
        raise invalid(text, "model", code="model_not_found", status=404)
    return web.json_response(found)


def _models(request: web.Request) -> dict[str, dict[str, Any]]:
    pipelines = request.app[BUS].pipelines.values()
    models = {pipeline.name: _model(pipeline.name, pipeline) for pipeline in pipelines}
    for pipeline in pipelines:
        for alias in pipeline.aliases:
            models.setdefault(alias, _model(alias, pipeline))
    return models


def _model(name: str, pipeline: Pipeline) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "omnibus",
        "root": pipeline.name,
        "parent": None,
        "max_model_len": pipeline.context_tokens,
    }
