"""The engine port: what a stage's engine must do, and what it may rely on.

The worker's shell owns sockets, credits and tensors; an engine sees jobs, numpy arrays and nothing of the bus. Every
method is called from one thread, the engine thread, so an engine needs no locks. `step` must not wait for work: when
nothing can be done it returns at once and `busy` is false until `push`, `add`, or `wake` from one of the engine's own
threads.
"""

import logging
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from omni_common.errors import OmniError
from omni_common.frames import Body, Decision
from omni_common.params import AnyParams

log = logging.getLogger("omni.worker")

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """One request at this stage."""

    request_id: str
    #: Of the request; sampling is keyed by (seed, stage, token index), never by the batch.
    seed: int
    params: AnyParams
    #: Stages (or `client`) that will send input, and that take output.
    sources: tuple[str, ...]
    sinks: tuple[str, ...]
    pipeline: str = ""
    #: Output of a former self of this stage, which died; only for engines that `resumes`.
    resume: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Input of a job from one source, in order, without gaps or doubles."""

    source: str
    start: int
    end: int
    #: The source's last piece; it may be empty (`body` None).
    last: bool
    body: Body | None
    #: Read-only views of shared memory: valid as long as they (or slices of them) are referenced. Drop them early.
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a job for all its sinks (or only `sinks`). Positions are [start, end) in the stage's unit."""

    request_id: str
    start: int
    end: int
    last: bool = False
    body: Body | None = None
    #: C-contiguous; must not be written after `step` returned it.
    arrays: Arrays = field(default_factory=dict)
    sinks: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """This job cannot go on; the others can. `status` 4xx: the input is to blame, `param` says which field."""

    request_id: str
    message: str
    code: str = "engine_error"
    status: int = 500
    param: str | None = None


def failure(request_id: str, error: BaseException) -> Failure:
    """An error of one job as its failure."""
    if isinstance(error, OmniError):
        return Failure(request_id, error.message, error.code, error.status, error.param)
    log.exception("request %s failed", request_id, exc_info=error)
    return Failure(request_id, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What an engine gets at start."""

    #: The stage's `model:` and `options:` of the pipeline file.
    model: str
    options: dict[str, Any]
    #: Folder with prepared model files (see `omni prepare`).
    models: str
    #: Most jobs at a time.
    slots: int
    #: Threads that the engine may use.
    threads: int
    #: Call as progress(what, fraction 0..1) while loading.
    progress: Callable[[str, float], None]
    #: Thread-safe; makes the worker call `step` again.
    wake: Callable[[], None]


class Engine(Protocol):
    """One model at work on many jobs."""

    #: True when another `step` would do work without further input.
    busy: bool
    #: Threads of the engine's own compute: `step` has nothing to do until they `wake`, but the engine is not idle.
    in_flight: bool
    #: How a job goes on after the death of the process that ran it. True: `add` gets what was decided (`job.resume`),
    #: and the job's outputs begin after it. False: the job is computed again from its input, which gives the same
    #: output at the same positions; what the consumers have is not sent again.
    resumes: bool
    #: With `resumes`: outputs have tensors that a decision does not hold, so the engine computes them again from
    #: position 0, along what was decided. False: the shell hands the decisions on, outputs begin after them.
    rebuilds: bool

    def load(self, context: LoadContext) -> None:
        """Load the weights and run a tiny job (the warm-up). Raises with the reason when the stage cannot work."""
        ...

    def add(self, job: Job) -> None:
        """Begin a job. Raises OmniError when its parameters cannot be served."""
        ...

    def push(self, request_id: str, piece: Piece) -> None:
        """Input for a job that was added and is not finished."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a job, finished or not, known or not. Nothing of it may come out of a later `step`."""
        ...

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        """Advance every job that can, except those in `blocked` (their consumers have no room). Never waits long:
        a step is the grain of cancellation and of fairness between jobs.

        A job is finished by its output with `last` (for every sink) or by its failure.
        """
        ...

    def close(self) -> None:
        """Free everything; threads and child processes of the engine end."""
        ...
