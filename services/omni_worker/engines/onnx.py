"""The `onnx` engine: small models on onnxruntime, one grain of one job a step, the jobs in turn.

The model is a module of `omni_worker.models` with a class `Model` (the port below). The engine knows nothing of what
it computes: it keeps the turn, skips jobs whose consumers have no room, and turns a job's error into its failure.
"""

import importlib
from collections.abc import Set
from typing import Protocol

from omni_worker.engine import Failure, Job, LoadContext, Output, Piece, failure


class Task(Protocol):
    """One job of a model."""

    @property
    def ready(self) -> bool:
        """Whether `advance` would do something without further input."""
        ...

    def push(self, piece: Piece) -> None:
        """Take input; cheap. Raises OmniError when it is not what the model takes."""
        ...

    def advance(self) -> Output | None:
        """Do one grain of work (some ten milliseconds). The output with `last` ends the job."""
        ...


class Model(Protocol):
    """A model of this engine."""

    def load(self, context: LoadContext) -> None:
        """Load and warm up."""
        ...

    def open(self, job: Job) -> Task:
        """Begin a job. Raises OmniError when its parameters cannot be served."""
        ...


class Onnx:
    """Runs the jobs of one model in turn. See `omni_worker.engine.Engine` for the contract.

    What a model computes depends on its input and the seed alone, so after a death it is computed again.
    """

    in_flight = False
    resumes = False
    rebuilds = False

    def __init__(self) -> None:
        self.busy = False
        #: In the order of their turns: who has had one goes to the end.
        self._tasks: dict[str, Task] = {}

    def load(self, context: LoadContext) -> None:
        if not context.model.isidentifier():
            raise ValueError(f"{context.model!r} is not the name of a model: a module of omni_worker.models")
        model: Model = importlib.import_module(f"omni_worker.models.{context.model}").Model()
        model.load(context)
        self._model = model

    def add(self, job: Job) -> None:
        self._tasks[job.request_id] = self._model.open(job)

    def push(self, request_id: str, piece: Piece) -> None:
        task = self._tasks[request_id]
        task.push(piece)
        self.busy = self.busy or task.ready

    def cancel(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)
        self._look()

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        """One grain of the job whose turn it is, among those that can advance and are not blocked."""
        turn = next((name for name, task in self._tasks.items() if task.ready and name not in blocked), None)
        if turn is None:
            return []
        task = self._tasks.pop(turn)
        result = _advance(turn, task)
        if not isinstance(result, Failure) and not (result and result.last):
            self._tasks[turn] = task
        self._look()
        return [result] if result else []

    def close(self) -> None:
        self._tasks.clear()
        self._look()

    def _look(self) -> None:
        self.busy = any(task.ready for task in self._tasks.values())


def _advance(request_id: str, task: Task) -> Output | Failure | None:
    """One grain; an error is that job's failure, whatever its kind."""
    try:
        return task.advance()
    except Exception as error:
        return failure(request_id, error)
