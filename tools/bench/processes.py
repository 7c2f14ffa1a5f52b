"""Processes of a benchmark: a real instance of Omnibus, and helpers of our own. All end with their context."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from omni_common.errors import OmniError
from omni_common.pipeline_file import load_pipelines
from omni_common.run_dir import RunDir
from omni_common.service import Stop
from omni_gateway.link import Link

PIPELINES = Path(__file__).parent / "pipelines"
START_S = 60.0
END_S = 10.0


async def until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    """Wait for what only shows as state. Raises OmniError that says what did not come."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise OmniError(f"after {timeout_s:g} s: {what}") from None


@contextlib.contextmanager
def helper(module: str, *arguments: str, cores: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process `python -m module`, with a pipe from its output; `cores` as in `taskset -c`."""
    with subprocess.Popen(command(module, arguments, cores), stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            end([process])


def command(module: str, arguments: Sequence[str], cores: str = "") -> list[str]:
    pinned = ["taskset", "-c", cores] if cores else []
    return [*pinned, sys.executable, "-m", module, *arguments]


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Instance:
    """A scheduler, the workers that `worker` starts, and this process as a gateway without HTTP."""

    def __init__(self, folder: Path, pipeline: Path, overrides: Sequence[str]) -> None:
        self.run = RunDir(folder)
        (self.pipeline,) = load_pipelines([str(pipeline)], list(overrides)).values()
        self._flags = ["--run-dir", str(folder), "--pipelines", str(pipeline), "--log-level", "warning"]
        self._flags += [f"--set={override}" for override in overrides]
        self.link = Link(self.run, "bench", {self.pipeline.name: self.pipeline}, 512, Stop())
        self._workers: list[subprocess.Popen[bytes]] = []
        self._others: list[subprocess.Popen[bytes]] = []

    async def start(self, worker_module: str = "omni_worker.main") -> None:
        await self.link.start()
        self._others.append(self._start("omni_scheduler.main"))
        self._workers += [self._start(worker_module, "--stage", stage) for stage in self.pipeline.stages]
        await until(self._ready, "the stages are not ready")

    async def gateway(self) -> tuple[int, int]:
        """Start one that serves HTTP; returns (pid, port) once it listens and has heard of the stages."""
        port = free_port()
        process = self._start("omni_gateway.main", "--port", str(port))
        self._others.insert(0, process)
        await until(lambda: answers(f"http://127.0.0.1:{port}/health/ready"), "the gateway is not ready")
        return process.pid, port

    def _ready(self) -> bool:
        fleet = self.link.fleet
        return fleet is not None and len(fleet.stages) > 0 and all(status.ready for status in fleet.stages)

    def _running(self) -> int:
        return self.link.fleet.running if self.link.fleet else 0

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(module, [*self._flags, *arguments]))

    async def close(self) -> None:
        # What ended a moment ago is not closed everywhere yet.
        await until(lambda: not self._running(), "requests still run", END_S)
        await self.link.close()
        await asyncio.to_thread(end, self._workers)
        await asyncio.to_thread(end, self._others)


@contextlib.asynccontextmanager
async def instance(pipeline: str, *overrides: str, worker_module: str = "omni_worker.main") -> AsyncIterator[Instance]:
    """An instance of `pipelines/<pipeline>.yaml`, every stage ready; `overrides` as of `--set`."""
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        running = Instance(Path(folder), PIPELINES / f"{pipeline}.yaml", overrides)
        try:
            await running.start(worker_module)
            yield running
        finally:
            await running.close()


def answers(url: str) -> bool:
    """Whether a GET is answered with 200 now."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads together, to the nanosecond.

    Its clock's number is made as in linux/posix-timers.h: the inverted pid, and 2 for the scheduler's own count.
    """
    return time.clock_gettime((~pid << 3) | 2)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
