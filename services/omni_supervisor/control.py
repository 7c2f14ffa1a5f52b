"""The supervisor's control socket, both ends: a Unix socket in the run folder that speaks HTTP.

`POST /orders` with an order as JSON (`{"order": "scale", "stage": "talker", "count": 3}`). An order that is refused is
answered 4xx or 503 with `{"error": {"message", "code"}}`; one that is begun with 200 and a line of JSON for everything
that happens, the last of which has `end`. It is carried out whether or not anybody listens to the end.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from omni_common.errors import OmniError, invalid
from omni_common.run_dir import PREFIX, default_base
from omni_supervisor.client import refusal
from omni_supervisor.orders import Order

log = logging.getLogger("omni.supervisor")

SOCKET = "supervisor.sock"
#: For the server's name in URLs, which a Unix socket does not need.
_URL = "http://supervisor/orders"
#: Orders are small.
_MAX_BODY_BYTES = 4096
_MAX_REPORTS = 1000
#: Seconds that answers get to leave when the supervisor ends.
_CLOSE_S = 1.0

CarryOut = Callable[[Order, Callable[[str], None]], "asyncio.Task[None]"]


class Report(msgspec.Struct, omit_defaults=True):
    """One line of the answer. `end` comes last, with what went wrong in `error`, else empty."""

    said: str = ""
    end: bool = False
    error: str = ""


@contextlib.asynccontextmanager
async def control_server(run_dir: Path, carry_out: CarryOut) -> AsyncIterator[None]:
    """Takes orders inside the block. The run folder's lock must be held: a socket that lies there is of a dead one."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_post("/orders", _Handler(carry_out).take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    path = run_dir / SOCKET
    path.unlink(missing_ok=True)
    await runner.setup()
    try:
        await web.UnixSite(runner, path).start()
        path.chmod(0o660)
        yield
    finally:
        await runner.cleanup()
        path.unlink(missing_ok=True)


class _Handler:
    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out

    async def take(self, request: web.Request) -> web.StreamResponse:
        # Bounded for a listener that has stopped to read: it misses what is oldest.
        reports: deque[Report] = deque(maxlen=_MAX_REPORTS)
        news = asyncio.Event()

        def tell(report: Report) -> None:
            reports.append(report)
            news.set()

        try:
            order = _decode(await request.read())
            task = self._carry_out(order, lambda text: tell(Report(said=text)))
        except OmniError as error:
            body = {"error": {"message": error.message, "code": error.code}}
            return web.Response(status=error.status, body=msgspec.json.encode(body), content_type="application/json")
        task.add_done_callback(lambda task: tell(Report(end=True, error=_what_failed(task))))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        report = Report()
        while not report.end:
            while not reports:
                news.clear()
                await news.wait()
            report = reports.popleft()
            await response.write(msgspec.json.encode(report) + b"\n")
        return response


def _decode(body: bytes) -> Order:
    """Raises OmniError 400 that names the field."""
    try:
        return msgspec.json.decode(body, type=Order)
    except msgspec.MsgspecError as error:
        raise invalid(str(error)) from None


def _what_failed(task: "asyncio.Task[None]") -> str:
    if task.cancelled():
        return "omni serve has been stopped meanwhile"
    error = task.exception()
    if error is None:
        return ""
    if isinstance(error, OmniError):
        return error.message
    log.error("an order failed", exc_info=error)
    return f"internal error, see the log of omni serve: {error!r}"


# ------------------------------------------------------------------------------------------------------ the other end


def find_supervisor(given: Path | None) -> Path:
    """The control socket in the run folder `given`, else in `$OMNI_RUN_DIR`, else of the only `omni serve` here.

    Raises OmniError when there is none, or more than one.
    """
    folder = given or os.environ.get("OMNI_RUN_DIR")
    if folder:
        return Path(folder) / SOCKET
    running = sorted(path for path in default_base().glob(f"{PREFIX}*") if _is_alive(path / SOCKET))
    if len(running) == 1:
        return running[0] / SOCKET
    found = f"several run: {', '.join(map(str, running))}" if running else "none runs here (`omni serve`)"
    raise OmniError(f"which run folder? {found}; name one with --run-dir or OMNI_RUN_DIR", code="run_dir")


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


async def send_order(path: Path, order: Order) -> AsyncIterator[str]:
    """What the supervisor at `path` says while it carries out `order`.

    Raises OmniError when there is none, it refuses, or the order fails.
    """
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as session,
            session.post(_URL, data=msgspec.json.encode(order)) as answer,
        ):
            if answer.status != 200:
                raise refusal(answer.status, await answer.read())
            async for line in answer.content:
                report = msgspec.json.decode(line, type=Report)
                if report.error:
                    raise OmniError(report.error)
                if report.end:
                    return
                yield report.said
    except aiohttp.ClientConnectorError as error:
        raise OmniError(f"no omni serve at {path.parent}: {error.strerror}", code="run_dir") from None
    except aiohttp.ClientError as error:
        raise OmniError(f"the connection broke: {error}; see the log of omni serve") from None
    raise OmniError("omni serve has ended meanwhile")
