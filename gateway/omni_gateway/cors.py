"""Calls from browser pages of other origins: off unless origins are listed; credentials (cookies) are never allowed."""

import re

from aiohttp import web

from omni_gateway.context import SETTINGS
from omni_gateway.errors import Handler

_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = "x-request-id, x-client-request-id, retry-after, x-should-retry"
_HEADER_LIST = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_MAX_AGE_S = "600"


@web.middleware
async def cors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer preflights, which never carry a key, before anything asks for one."""
    wanted = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or not wanted or not _allowed(request):
        return await handler(request)
    response = web.Response(status=204)
    response.headers["Access-Control-Allow-Methods"] = _METHODS
    response.headers["Access-Control-Max-Age"] = _MAX_AGE_S
    names = request.headers.get("Access-Control-Request-Headers", "")
    if _HEADER_LIST.fullmatch(names):
        response.headers["Access-Control-Allow-Headers"] = names
    return response


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: errors and streams carry the headers too, or the page could not read them."""
    if not request.app[SETTINGS].cors_origins:
        return
    origin = _allowed(request)
    if origin:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
    if origin != "*":
        response.headers.add("Vary", "Origin")


def _allowed(request: web.Request) -> str:
    """The value of `Access-Control-Allow-Origin`; empty when the origin may not call."""
    origins = request.app[SETTINGS].cors_origins
    origin = request.headers.get("Origin", "")
    if not origin:
        return ""
    if "*" in origins:
        return "*"
    return origin if origin in origins else ""
