"""A running `omni serve` for tests: its log, its processes, what the command line says about it."""

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil

from omni_common.frames import Fleet, Replica

PIPELINES = Path(__file__).parents[1] / "pipelines"
#: Six Python processes start on a machine that may be loaded.
PATIENCE_S = 60.0
OMNI = (sys.executable, "-m", "omni_supervisor.cli")


class Serving:
    """Made by `serving`. Its log is read all the time."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())
            self._changed.set()

    async def seen(self, pattern: str, times: int = 1) -> str:
        async with asyncio.timeout(PATIENCE_S):
            while len(found := [line for line in self.lines if re.search(pattern, line)]) < times:
                self._changed.clear()
                assert not self._reader.done(), self.lines
                await self._changed.wait()
        return found[times - 1]

    async def ready(self, times: int = 1) -> None:
        await self.seen(r"^omni +\| ready after", times)

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """(module or, for workers, name) and process; while one takes over from another there are two of a name."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                line = child.cmdline()
                module = line[line.index("-m") + 1].split(".")[0].removeprefix("omni_")
                found.append((line[line.index("--name") + 1] if "--name" in line else module, child))
        return found

    def children(self) -> dict[str, psutil.Process]:
        return dict(self.processes())

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.processes()}

    async def fleet(self) -> Fleet:
        status, out = await omni("status", "--json", "--url", self.url)
        assert status == 0, out
        return msgspec.json.decode(out, type=Fleet)

    async def replicas(self, stage: str) -> list[Replica]:
        return [replica for replica in (await self.fleet()).replicas if replica.stage == stage]

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await self.wait()

    async def wait(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            status = await self.process.wait()
            await self._reader
        return status


async def omni(*arguments: str) -> tuple[int, str]:
    """Exit status of the command line, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *OMNI, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def start(*flags: str, pipeline: str = "identity3", port: int | None = None) -> Serving:
    """Start `omni serve` with a pipeline of the test rig."""
    port = port or free_port()
    process = await asyncio.create_subprocess_exec(
        *OMNI, "serve", "--pipeline", str(PIPELINES / f"{pipeline}.yaml"), "--port", str(port), *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    return Serving(process, port)


@contextlib.asynccontextmanager
async def serving(*flags: str, pipeline: str = "identity3") -> AsyncIterator[Serving]:
    """A ready `omni serve`, killed at the end if it still runs."""
    started = await start(*flags, pipeline=pipeline)
    try:
        await started.ready()
        yield started
    finally:
        await started.end(signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def assert_ends(fds: list[int], within_s: float) -> None:
    """The processes behind these pidfds end."""
    deadline = time.monotonic() + within_s
    for fd in fds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(max(0.0, deadline - time.monotonic()) * 1000), "a process is still alive"
        os.close(fd)
