"""The HTTP application: which handlers there are, and what stands around each of them."""

from aiohttp import web

from omni_gateway import chat, health, models_api, speech, speech_batch, status, transcriptions, voices
from omni_gateway.auth import auth
from omni_gateway.context import BUS, DRAIN, METRICS, SETTINGS, VOICES, Settings
from omni_gateway.cors import allow_origin, cors
from omni_gateway.drain import Drain
from omni_gateway.errors import errors, http_log
from omni_gateway.metrics import Metrics, exposition
from omni_gateway.requests_log import name_response, requests_log
from omni_gateway.stream import Bus
from omni_gateway.voice_store import VoiceStore


def create_app(bus: Bus, settings: Settings) -> web.Application:
    """The application over `bus`; serve it with `make_runner`."""
    drain = Drain()
    app = web.Application(
        middlewares=[drain.count, requests_log, cors, errors, auth],
        client_max_size=settings.max_body_bytes,
    )
    app[BUS] = bus
    app[SETTINGS] = settings
    app[METRICS] = Metrics(lambda: bus.fleet)
    app[DRAIN] = drain
    app[VOICES] = VoiceStore(settings.voices)
    app.on_response_prepare.append(drain.last_answer)
    app.on_response_prepare.append(name_response)
    app.on_response_prepare.append(allow_origin)
    app.router.add_get("/metrics", show_metrics)
    for module in (health, status, models_api, chat, speech, speech_batch, transcriptions, voices):
        module.add_routes(app)
    return app


def make_runner(app: web.Application, *, shutdown_s: float = 60.0) -> web.AppRunner:
    """A runner that cancels a handler when its client disconnects, which is what cancels the request on the bus.

    `shutdown_s` is how long `cleanup` lets requests in flight go on.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=http_log,
        shutdown_timeout=shutdown_s,
        # A few kilobytes would become gigabytes, on the event loop; `receiving` refuses compressed bodies by name.
        auto_decompress=False,
    )


async def show_metrics(request: web.Request) -> web.Response:
    return exposition(request.app[METRICS])
