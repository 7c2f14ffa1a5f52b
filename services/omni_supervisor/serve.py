"""`omni serve`: everything that can be wrong is checked before the first process is started."""

import argparse
import asyncio
import contextlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from omni_common.errors import OmniError
from omni_common.paths import models_dir
from omni_common.pipeline import Pipeline
from omni_common.run_dir import default_base
from omni_common.service import DEFAULT_PIPELINES, load_arguments, pipeline_arguments
from omni_supervisor.checkpoint import with_model
from omni_supervisor.control import control_server
from omni_supervisor.health import Probe
from omni_supervisor.merged_log import MergedLog
from omni_supervisor.plan import API_KEYS, Plan
from omni_supervisor.prepare import check_models
from omni_supervisor.run_folder import run_folder
from omni_supervisor.supervisor import Supervisor

DEFAULT_PORT = 8000
#: Connections that wait for a gateway.
BACKLOG = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pipeline_arguments(parser)
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME|FOLDER",
        help="serve this checkpoint, prepared if it is a folder, by the pipeline of its family",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at, default 127.0.0.1")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}")
    parser.add_argument(
        "--api-key",
        action="append",
        default=os.environ.get(API_KEYS, "").split(),
        metavar="KEY",
        help=f"ask clients for it; may be repeated, and be in ${API_KEYS}",
    )
    parser.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="browser pages that may call"
    )
    parser.add_argument(
        "--voices", type=Path, metavar="DIR", help="where uploaded voices are kept (default: see omni-gateway --help)"
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder for sockets (default: a fresh one)")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument(
        "--stop-timeout", type=float, default=30.0, metavar="SECONDS", help="what runs then is killed, default 30"
    )


def serve(arguments: argparse.Namespace) -> int:
    """Check, start, run until told to stop; returns the exit status.

    Raises OmniError (PipelineError for a pipeline) when the system cannot be started; nothing has been started then.
    """
    if arguments.model:
        arguments = with_model(arguments, models_dir())
    pipelines = load_arguments(arguments)
    check_prepared(pipelines.values())
    with (
        listening(arguments.host, arguments.port) as sockets,
        run_folder(arguments.run_dir, default_base()) as run,
    ):
        plan = Plan(arguments, pipelines, run.path, [listener.fileno() for listener in sockets])
        units = plan.units()
        log = MergedLog(sys.stdout, width=max(len(unit.name) for unit in units))
        url = local_url(arguments.host, arguments.port)
        started = time.monotonic()

        async def run_units() -> int:
            def on_ready() -> list[str]:
                took = f"ready after {time.monotonic() - started:.1f} s"
                return [f"{took}: {', '.join(pipelines)} at {url}/v1", f"try: {example(arguments, url)}"]

            probe = Probe(url, next(iter(arguments.api_key), ""))
            workers = {stage: partial(plan.worker, stage) for stage in plan.stages}
            supervisor = Supervisor(units, workers, probe, log, on_ready, arguments.stop_timeout)
            async with control_server(run.path, supervisor.carry_out):
                return await supervisor.run()

        return asyncio.run(run_units())


def check_prepared(pipelines: Iterable[Pipeline]) -> None:
    """Raises OmniError that says which models are missing and how to get them."""
    missing = check_models(pipelines, models_dir())
    if missing:
        models = ", ".join(model for models in missing.values() for model in models)
        commands = " && ".join(f"omni prepare {name}" for name in missing)
        raise OmniError(f"not prepared in {models_dir()}: {models}; run: {commands}", code="not_prepared")


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets that listen at every address of `host`.

    The supervisor holds them and gateways accept at them: clients that connect while one gateway takes over from
    another, or comes back after a crash, wait in the kernel. Raises OmniError that names the port.
    """
    where = f"port {port} of {host}"
    with contextlib.ExitStack() as stack:
        sockets = []
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in addresses:
                listener = stack.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
                sockets.append(listener)
        except socket.gaierror as error:
            raise OmniError(f"host {host}: {error.strerror}", code="bad_host") from None
        except OSError as error:
            message = f"cannot listen at {where}: {error.strerror}; choose another: --port"
            raise OmniError(message, code="port") from None
        yield sockets


def local_url(host: str, port: int) -> str:
    """The base URL by which this host reaches a server that listens at `host`."""
    loopback = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{loopback}]:{port}" if ":" in loopback else f"http://{loopback}:{port}"


def example(arguments: argparse.Namespace, url: str) -> str:
    """A command to try, in the shell's quoting. The key is not repeated: logs are kept."""
    command = ["omni", "ask", "What is the capital of France?", "--out", "answer.wav"]
    if arguments.pipelines != DEFAULT_PIPELINES:
        command += ["--model", arguments.pipelines.split(",")[0]]
    if arguments.port != DEFAULT_PORT:
        command += ["--url", url]
    if arguments.api_key:
        command += ["--api-key", "..."]
    return shlex.join(command)


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: 1 to 65535")
    return port
