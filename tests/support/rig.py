"""A real instance for tests: scheduler and fake or real workers as processes, a gateway's link in this one."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np

from omni_common.frames import Params, Replica, Text
from omni_common.pipeline import Pipeline
from omni_common.pipeline_file import load_pipelines
from omni_common.run_dir import RunDir
from omni_common.service import Stop
from omni_gateway.link import Link
from omni_gateway.stream import Ask, Event, Given

PIPELINES = Path(__file__).parents[1] / "pipelines"
PATIENCE_S = 30.0


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for an event that only shows as state."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class Rig:
    """`await worker("talker")` starts one; everything ends with the context."""

    def __init__(
        self, folder: Path, pipeline: str, overrides: tuple[str, ...] = (), platform: str | None = None
    ) -> None:
        self.run = RunDir(folder)
        self._names = pipeline.split(",")
        self._overrides = list(overrides)
        self._platform = platform
        self.pipelines = load_pipelines(self._names, self._overrides, platform)
        self.stop = Stop()
        self.link = Link(self.run, "rig-gateway", self.pipelines, 64, self.stop)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def pipeline(self) -> Pipeline:
        return next(iter(self.pipelines.values()))

    def _arguments(self) -> list[str]:
        arguments = ["--run-dir", str(self.run.path), "--pipelines", ",".join(self._names)]
        for setting in self._overrides:
            arguments += ["--set", setting]
        return [*arguments, "--platform", self._platform] if self._platform else arguments

    def start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *self._arguments(), *arguments]
        self.processes[name] = subprocess.Popen(command)
        return self.processes[name]

    def scheduler(self) -> subprocess.Popen[bytes]:
        return self.start("scheduler", "omni_scheduler.main")

    def worker(self, stage: str, name: str = "") -> subprocess.Popen[bytes]:
        return self.start(name or stage, "omni_worker.main", "--stage", stage, "--name", name or stage)

    def replicas(self, stage: str) -> list[Replica]:
        fleet = self.link.fleet
        return [replica for replica in fleet.replicas if replica.stage == stage] if fleet else []

    def ready(self, stage: str) -> int:
        fleet = self.link.fleet
        return sum(status.ready for status in fleet.stages if status.stage == stage) if fleet else 0

    async def all_ready(self) -> None:
        stages = {stage for pipeline in self.pipelines.values() for stage in pipeline.stages}
        await until(lambda: all(self.ready(stage) for stage in stages))

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[name].pid, number)

    async def wait(self, name: str) -> int:
        """Exit status of a process that is about to end."""
        return await asyncio.to_thread(self.processes.pop(name).wait, PATIENCE_S)

    def ask(
        self,
        text: str = "hello",
        outputs: tuple[str, ...] = ("text",),
        params: dict[str, Params] | None = None,
        arrays: dict[str, np.ndarray] | None = None,
        pipeline: str = "",
    ) -> Ask:
        chosen = self.pipelines[pipeline] if pipeline else self.pipeline
        task = next(iter(chosen.tasks))
        given = Given("text", Text(text), 0, len(text), True, arrays or {})
        return Ask(chosen, task, list(outputs), [given], 1, params or {})

    async def answer(self, ask: Ask) -> list[Event]:
        """Submit and read to the end."""
        async with contextlib.aclosing(await self.link.submit(ask)) as stream:
            return [event async for event in stream]

    async def idle(self) -> None:
        """Wait until nothing of any request is left in any process."""

        def empty() -> bool:
            fleet = self.link.fleet
            return (
                fleet is not None
                and fleet.running == fleet.queued == 0
                and all(replica.running == 0 and replica.arena_used == 0 for replica in fleet.replicas)
            )

        await until(empty)

    async def close(self) -> None:
        await self.link.close()
        scheduler = self.processes.pop("scheduler", None)
        for group in (self.processes, {"scheduler": scheduler} if scheduler else {}):
            for process in group.values():
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.terminate()
            for process in group.values():
                try:
                    await asyncio.to_thread(process.wait, 10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextlib.asynccontextmanager
async def running(
    pipeline: str, *overrides: str, stages: tuple[str, ...] | None = None, platform: str | None = None
) -> AsyncIterator[Rig]:
    """An instance with one worker for each of `stages` (default: all), ready."""
    with tempfile.TemporaryDirectory(prefix="rig") as folder:
        rig = Rig(Path(folder), pipeline, overrides, platform)
        await rig.link.start()
        try:
            rig.scheduler()
            started = tuple(rig.pipeline.stages) if stages is None else stages
            for stage in started:
                rig.worker(stage)
            await until(lambda: rig.link.fleet is not None and all(rig.ready(stage) for stage in started))
            yield rig
        finally:
            await rig.close()


def fake(name: str) -> str:
    """Path of a fake pipeline for `running`."""
    return str(PIPELINES / f"{name}.yaml")
