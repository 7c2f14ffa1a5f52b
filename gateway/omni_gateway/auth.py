"""API keys: every route needs one, unless it is on the short list of those that do not."""

import hashlib
import hmac

from aiohttp import web

from omni_common.errors import invalid
from omni_gateway.context import KEY_DIGEST, SETTINGS
from omni_gateway.errors import Handler
from omni_gateway.requests_log import route_name

#: Health checks carry no keys. Compared with the route that will run, so no spelling of a path gets past.
PUBLIC = frozenset({"/health", "/health/live", "/health/ready"})


@web.middleware
async def auth(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request pass that has one of the keys as `Authorization: Bearer KEY`. Raises OmniError 401."""
    request[KEY_DIGEST] = ""
    keys = request.app[SETTINGS].api_keys
    if keys and route_name(request) not in PUBLIC:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = _digest(token.strip())
        # All are compared, in constant time, so that time tells nothing of the keys.
        matches = [hmac.compare_digest(given, _digest(key)) for key in keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise invalid("A valid API key is needed: Authorization: Bearer KEY.", code="invalid_api_key", status=401)
        request[KEY_DIGEST] = given
    return await handler(request)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
