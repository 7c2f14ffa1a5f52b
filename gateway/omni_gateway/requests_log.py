"""Outermost around every handler: names the request, counts it once, and writes its one log line."""

import asyncio
import logging
import re
import uuid

from aiohttp import web

from omni_gateway.context import ARRIVED, CLIENT_REQUEST_ID, ERROR_CODE, METRICS, REQUEST_ID, RUN_ID
from omni_gateway.errors import Handler, shorten
from omni_gateway.metrics import Outcome

log = logging.getLogger(__name__)

_CLIENT_ID_CHARS = 128
#: What nginx writes for a client that closed the connection.
_CLIENT_CLOSED = 499
#: Probes: at `info` they would bury everything else.
_ASKED_EVERY_SECOND = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/omni/status"})


@web.middleware
async def requests_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No payload, header or query reaches the log: only method, path, status, time and ids."""
    loop = asyncio.get_running_loop()
    metrics = request.app[METRICS]
    route = route_name(request)
    request[ARRIVED] = loop.time()
    request[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
    request[CLIENT_REQUEST_ID] = _client_id(request)
    metrics.in_flight.labels(route).inc()
    status, outcome = _CLIENT_CLOSED, Outcome.ABORT
    try:
        response = await handler(request)
        status = response.status
        outcome = Outcome.ERROR if ERROR_CODE in request or status >= 400 else Outcome.SUCCESS
        return response
    except ConnectionError:
        # The client left while it was written to; aiohttp finds out the same when it sends this.
        return web.Response(status=_CLIENT_CLOSED)
    finally:
        metrics.in_flight.labels(route).dec()
        metrics.ended(route, status, outcome)
        log.log(
            logging.DEBUG if route in _ASKED_EVERY_SECOND else logging.INFO,
            "%s %s %d %s %.3fs request=%s%s%s%s",
            request.method,
            ascii(shorten(request.path, 200))[1:-1],
            status,
            outcome.value,
            loop.time() - request[ARRIVED],
            request[REQUEST_ID],
            _field("run", request.get(RUN_ID, "")),
            _field("client", request[CLIENT_REQUEST_ID]),
            _field("code", request.get(ERROR_CODE, "")),
        )


async def name_response(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: every response says which request it answers."""
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
        if request[CLIENT_REQUEST_ID]:
            response.headers["x-client-request-id"] = request[CLIENT_REQUEST_ID]


def route_name(request: web.Request) -> str:
    """The route's pattern, never the path: a label per path would grow without bound."""
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical


def _client_id(request: web.Request) -> str:
    given = request.headers.get("x-client-request-id") or request.headers.get("x-request-id") or ""
    return re.sub(r"[^A-Za-z0-9._:/+=-]", "", given[: 4 * _CLIENT_ID_CHARS])[:_CLIENT_ID_CHARS]


def _field(name: str, value: str) -> str:
    return f" {name}={value}" if value else ""
