"""`GET /omni/status`: the scheduler's view of the fleet as JSON, for `omni status` and for people."""

import msgspec
from aiohttp import web

from omni_common.errors import OmniError
from omni_gateway.context import BUS


def add_routes(app: web.Application) -> None:
    app.router.add_get("/omni/status", show_status)


async def show_status(request: web.Request) -> web.Response:
    fleet = request.app[BUS].fleet
    if fleet is None:
        raise OmniError("the scheduler has not been heard of yet", status=503, code="scheduler_missing")
    return web.Response(body=msgspec.json.encode(fleet), content_type="application/json")
