"""Which processes one `omni serve` runs, and with what arguments. Pure."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from omni_common.pipeline import Pipeline, Stage

Role = Literal["scheduler", "worker", "gateway"]
#: Outside in: who takes new work stops first, who others need stops last.
STOP_ORDER: tuple[Role, ...] = ("gateway", "worker", "scheduler")
#: The gateway's keys, separated by spaces.
API_KEYS = "OMNI_API_KEY"
#: Seconds from start to serving for a process that loads nothing.
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Unit:
    """One process to keep running. `load_s`: after so long without having been ready it is stuck."""

    name: str
    role: Role
    argv: tuple[str, ...]
    stage: str = ""
    load_s: float = START_S
    #: Descriptors that it inherits under the same numbers.
    fds: tuple[int, ...] = ()
    #: Added to the environment.
    env: dict[str, str] = field(default_factory=dict)


def stages_of(pipelines: Iterable[Pipeline]) -> dict[str, Stage]:
    """Stages of all pipelines; a shared one, on whose settings they agree, is served by the same workers."""
    return {name: stage for pipeline in pipelines for name, stage in pipeline.stages.items()}


def worker_name(stage: str, number: int) -> str:
    return f"{stage}-{number}"


class Plan:
    """The units of one system. `arguments` are those of `omni serve`; gateways accept at the sockets `listening`."""

    def __init__(
        self, arguments: argparse.Namespace, pipelines: dict[str, Pipeline], run_dir: Path, listening: Sequence[int]
    ) -> None:
        self._listening = tuple(listening)
        self.stages = stages_of(pipelines.values())
        self._arguments = arguments
        self._common = ["--run-dir", str(run_dir), "--log-level", arguments.log_level, *pipeline_flags(arguments)]

    def units(self) -> list[Unit]:
        """Scheduler, a worker for every replica of every stage, gateway: in the order in which they are started."""
        workers = [self.worker(name, n) for name, stage in self.stages.items() for n in range(stage.replicas)]
        return [self._scheduler(), *workers, self._gateway()]

    def worker(self, stage: str, number: int) -> Unit:
        """Replica `number` of a stage; there may be more than the pipeline file says."""
        name = worker_name(stage, number)
        argv = _module("omni_worker.main", ["--stage", stage, "--name", name, *self._common])
        return Unit(name, "worker", argv, stage, self.stages[stage].load_s)

    def _scheduler(self) -> Unit:
        return Unit("scheduler", "scheduler", _module("omni_scheduler.main", self._common))

    def _gateway(self) -> Unit:
        arguments = self._arguments
        flags = _repeated("--listen-fd", [str(fd) for fd in self._listening])
        flags += _repeated("--cors-origin", arguments.cors_origin)
        if arguments.voices is not None:
            flags.append(f"--voices={arguments.voices}")
        # Other users of the machine can read arguments, not the environment.
        env = {API_KEYS: " ".join(arguments.api_key)} if arguments.api_key else {}
        return Unit(
            "gateway", "gateway", _module("omni_gateway.main", [*self._common, *flags]), fds=self._listening, env=env
        )


def pipeline_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags from which `omni_common.service.pipeline_arguments` parses these same values."""
    flags = [f"--pipelines={arguments.pipelines}", *_repeated("--set", arguments.overrides)]
    for name in ("platform", "temperature", "top_p", "max_tokens", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            flags.append(f"--{name.replace('_', '-')}={value}")
    return flags


def _repeated(flag: str, values: Sequence[str]) -> list[str]:
    return [f"{flag}={value}" for value in values]


def _module(module: str, flags: Sequence[str]) -> tuple[str, ...]:
    # -P: a folder of that name where the command happens to be run is not ours.
    return (sys.executable, "-P", "-m", module, *flags)
