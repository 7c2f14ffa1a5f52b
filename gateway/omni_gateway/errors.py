"""Every refusal and failure as OpenAI's error object, whatever raised it."""

import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_exceptions import HTTPException

from omni_common.errors import OmniError, invalid
from omni_gateway.context import ERROR_CODE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)
#: What aiohttp's server itself has to say.
http_log = logging.getLogger("omni_gateway.http")

#: Longest message that leaves the server: it may quote the request.
_MESSAGE_CHARS = 500
#: The same for the path of a field: a form's names are the client's.
_PARAM_CHARS = 200
#: OpenAI's SDKs send a request again after these, and after 409 and every other 5xx unless told not to.
_RETRY_HELPS = frozenset({408, 429, 502, 503, 504})
_RETRIED_BY_CLIENTS = frozenset({408, 409, 429})


def error_body(error: OmniError) -> dict[str, Any]:
    """OpenAI's `{"error": {"message", "type", "param", "code"}}`."""
    return {
        "error": {
            "message": _sendable(error.message, _MESSAGE_CHARS),
            "type": _type(error.status),
            "param": None if error.param is None else _sendable(error.param, _PARAM_CHARS),
            "code": error.code,
        }
    }


def error_response(error: OmniError) -> web.Response:
    """The error as a whole response; says when, and whether at all, to ask again."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    retried = error.status in _RETRIED_BY_CLIENTS or error.status >= 500
    if retried and error.status not in _RETRY_HELPS and error.code != "stage_lost":
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = msgspec.json.encode(error_body(error))
    return web.Response(body=body, status=error.status, content_type="application/json", headers=headers)


def internal_error(exc: Exception) -> OmniError:
    """Log what went wrong, tell the client nothing of it."""
    log.error("unexpected %s", type(exc).__name__, exc_info=exc)
    return OmniError("The server failed on this request; its log has the reason.")


def _not_malformed(record: logging.LogRecord) -> bool:
    """Logging filter. Bytes that are not HTTP are no fault of ours: one line for them, without traceback or bytes."""
    exc = record.exc_info[1] if record.exc_info else None
    if not isinstance(exc, (HttpProcessingError, web.RequestPayloadError)):
        return True
    log.info("malformed HTTP, %s: %s", type(exc).__name__, record.getMessage())
    return False


http_log.addFilter(_not_malformed)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises into an error response."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except OmniError as exc:
        error = exc
    except HTTPException as exc:
        error = _of_http(request, exc)
        headers = {name: value for name, value in exc.headers.items() if name == "Allow"}
    except (web.RequestPayloadError, HttpProcessingError):
        error = invalid("The request body could not be read to its end.", code="invalid_body")
    except ConnectionError:
        raise
    except Exception as exc:
        error = internal_error(exc)
    request[ERROR_CODE] = error.code
    response = error_response(error)
    response.headers.update(headers)
    return response


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _sendable(text: str, limit: int) -> str:
    """Cut; what a header or the name of a form's field holds may be no UTF-8, and stands here as surrogates."""
    return shorten(text, limit).encode(errors="replace").decode()


def quoted(value: str, limit: int = 60) -> str:
    """A client's value for a message: cut, and with control characters escaped."""
    return json.dumps(shorten(value, limit), ensure_ascii=False)


def _of_http(request: web.Request, exc: HTTPException) -> OmniError:
    where = f"{request.method} {shorten(request.path, 100)}"
    if exc.status == 404:
        return invalid(f"No such route: {where}.", code="route_not_found", status=404)
    if exc.status == 405:
        return invalid(f"Not allowed: {where}.", code="method_not_allowed", status=405)
    if exc.status == 413:
        return invalid("The request body is too large.", code="body_too_large", status=413)
    return OmniError(exc.reason, status=exc.status, code="http_error")


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
