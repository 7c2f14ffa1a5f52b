"""`GET /v1/audio/voices` and `/v1/audio/models`: the lists that Open WebUI and others fill their menus from.

Both need a key like every other route. Open WebUI asks without one and then shows OpenAI's names, which work here too.
"""

from typing import Any

from aiohttp import web

from omni_common.pipeline import Pipeline
from omni_gateway.context import BUS

_NOTE = "A voice with `alias_of` is another name for that voice. Names are taken in any case."


def add_routes(app: web.Application) -> None:
    app.router.add_get("/v1/audio/voices", list_voices)
    app.router.add_get("/v1/audio/models", list_models)


async def list_voices(request: web.Request) -> web.Response:
    """Every voice once, then every alias as an entry of its own, so that it can be chosen."""
    voices: dict[str, dict[str, Any]] = {}
    aliases: dict[str, dict[str, Any]] = {}
    for pipeline in request.app[BUS].pipelines.values():
        for voice in pipeline.voices:
            name = voice.name or voice.id
            entry = voices.setdefault(voice.id, {"id": voice.id, "name": name, "models": []})
            entry["models"].append(pipeline.name)
            for alias in voice.aliases:
                label = f"{alias.capitalize()} ({name})"
                entry = aliases.setdefault(alias, {"id": alias, "name": label, "alias_of": voice.id, "models": []})
                entry["models"].append(pipeline.name)
    entries = [*voices.values(), *(entry for alias, entry in aliases.items() if alias not in voices)]
    return web.json_response({"voices": entries, "note": _NOTE})


async def list_models(request: web.Request) -> web.Response:
    """Every name under which something speaks."""
    speaking = [p for p in request.app[BUS].pipelines.values() if "speech" in p.tasks]
    return web.json_response({"models": [{"id": name} for name in dict.fromkeys(_names(speaking))]})


def _names(pipelines: list[Pipeline]) -> list[str]:
    return [p.name for p in pipelines] + [alias for p in pipelines for alias in p.aliases]
