"""What every server process does the same way at its start: arguments, logs, the loop, signals, the end."""

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from omni_common.errors import OmniError
from omni_common.orphan import end_with_parent
from omni_common.pipeline import Pipeline
from omni_common.pipeline_file import EVERY_STAGE, load_pipelines
from omni_common.run_dir import RunDir, find_running

log = logging.getLogger("omni")

DEFAULT_PIPELINES = "embedded,speech"


class Stop:
    """What asks a process to end. `wait` returns at the first request (drain); a second one ends it at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""
        #: Exit status: 0 for an ordered end.
        self.status = 0

    def request(self, reason: str, status: int = 0) -> None:
        """End in order; the first reason holds."""
        if not self._event.is_set():
            self.reason, self.status = reason, status
            self._event.set()

    def signalled(self) -> None:
        if self._event.is_set():
            log.info("second signal: ending at once")
            raise SystemExit(1)
        self.request("signal")

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(frozen=True, slots=True)
class Common:
    """The arguments that all processes share."""

    run: RunDir
    pipelines: dict[str, Pipeline]


def common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", type=Path, help="folder with the sockets of the instance (default: the running one)"
    )
    pipeline_arguments(parser)
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pipelines", "--pipeline", default=DEFAULT_PIPELINES, help=f"names or files, default {DEFAULT_PIPELINES}"
    )
    parser.add_argument("--set", action="append", default=[], metavar="stages.X.KEY=VALUE", dest="overrides")
    parser.add_argument("--platform", help="overlay NAME.PLATFORM.yaml")
    for name in ("temperature", "top_p", "max_tokens", "seed"):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int if name in ("max_tokens", "seed") else float,
            help="default of every stage that samples",
        )


def load_arguments(arguments: argparse.Namespace) -> dict[str, Pipeline]:
    """The pipelines that the command line names. Raises PipelineError."""
    flags = {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
    given = {name: value for name, value in flags.items() if value is not None}
    return load_pipelines(
        arguments.pipelines.split(","),
        arguments.overrides,
        arguments.platform,
        {EVERY_STAGE: given} if given else None,
    )


def run_service(
    parser: argparse.ArgumentParser,
    serve: Callable[[argparse.Namespace, Common, Stop], Awaitable[None]],
    argv: list[str] | None = None,
) -> int:
    """Parse, load, run `serve` on uvloop until it returns. Errors that a person can mend are one line and status 2."""
    end_with_parent()
    common_arguments(parser)
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    try:
        common = Common(RunDir(arguments.run_dir or find_running()), load_arguments(arguments))
    except OmniError as error:
        print(f"{parser.prog}: {error.message}", file=sys.stderr)
        return 2
    try:
        return uvloop.run(_main(arguments, common, serve))
    except OmniError as error:
        print(f"{parser.prog}: {error.message}", file=sys.stderr)
        return 1
    except SystemExit as end:
        return int(end.code or 0)


async def _main(
    arguments: argparse.Namespace,
    common: Common,
    serve: Callable[[argparse.Namespace, Common, Stop], Awaitable[None]],
) -> int:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled)
    # What start-up made stays; a collection every 700 objects took a seventh of a streaming gateway's time.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    await serve(arguments, common, stop)
    if stop.status:
        log.error("%s", stop.reason)
    return stop.status
