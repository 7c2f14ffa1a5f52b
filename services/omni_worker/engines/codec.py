"""The `codec` engine: codes to sound, several requests' chunks in one forward.

What is decoded when depends on positions alone: a chunk is due when all its frames are there (or the speech has ended),
whatever came before it, so load changes when sound comes and never what it is. The model is a module of
`omni_worker.models` (the port below).

Options: `part` (the module), `batch` (chunks of a step, default 8), `device` (cpu), `dtype` (float32), and the model's.
"""

import importlib
import logging
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from omni_common.frames import Audio, Codes
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece, failure

log = logging.getLogger(__name__)

Samples = np.ndarray[Any, np.dtype[np.float32]]


class Decoding:
    """One job: its frames so far, and how much of them is sound."""

    def __init__(self, job: Job) -> None:
        self.job = job
        #: A list a frame, an id a code group.
        self.frames: list[list[int]] = []
        self.ended = False
        #: Frames of which sound was made, and samples that were put out.
        self.decoded = 0
        self.samples = 0

    def push(self, piece: Piece) -> None:
        if isinstance(piece.body, Codes):
            self.frames += piece.body.frames
        self.ended = self.ended or piece.last


class Model(Protocol):
    """A model of this engine."""

    #: In Hz.
    rate: int

    def load(self, folder: Path, context: LoadContext) -> None:
        """Load the weights from a prepared checkpoint, and warm up."""
        ...

    def open(self, job: Job) -> Decoding:
        """Begin a job. Raises OmniError when its parameters cannot be served."""
        ...

    def due(self, decoding: Decoding) -> int:
        """The frame up to which the next chunk goes, 0: it is not complete yet."""
        ...

    def decode(self, chunks: list[tuple[Decoding, int]]) -> list[Samples]:
        """For each (job, due frame) the samples that follow those that it has put out: float32 [n], n may be 0."""
        ...


class Codec:
    """See the module's docstring, and `omni_worker.engine.Engine` for the contract.

    Sound depends on codes, voice and seed alone, so after a death it is made again.
    """

    in_flight = False
    resumes = False
    rebuilds = False

    def __init__(self) -> None:
        self.busy = False
        #: In the order of their turns: who has had one goes to the end.
        self._jobs: dict[str, Decoding] = {}

    def load(self, context: LoadContext) -> None:
        part = str(context.options.get("part", ""))
        if not part.isidentifier():
            raise ValueError(f"options.part {part!r} is not a module of omni_worker.models")
        torch.set_num_threads(context.threads)
        torch.set_grad_enabled(False)
        self._batch = int(context.options.get("batch", 8))
        model: Model = importlib.import_module(f"omni_worker.models.{part}").Model()
        context.progress("weights", 0.1)
        model.load(Path(context.models) / context.model, context)
        self._model = model

    def add(self, job: Job) -> None:
        self._jobs[job.request_id] = self._model.open(job)

    def push(self, request_id: str, piece: Piece) -> None:
        decoding = self._jobs[request_id]
        decoding.push(piece)
        self.busy = self.busy or self._able(decoding)

    def cancel(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)
        self._look()

    @torch.inference_mode()
    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        able = [d for name, d in self._jobs.items() if name not in blocked and self._able(d)][: self._batch]
        chunks = [(decoding, self._model.due(decoding)) for decoding in able]
        due = [(decoding, end) for decoding, end in chunks if end > decoding.decoded]
        results: list[Output | Failure] = []
        made = self._decode(due, results)
        failed = {result.request_id for result in results}
        for decoding, end in chunks:
            name = decoding.job.request_id
            samples = made.get(name, np.zeros(0, np.float32))
            del self._jobs[name]
            if name in failed:
                continue
            if not np.isfinite(samples).all():
                results.append(Failure(name, "the decoder's samples are not finite", "numerical_error"))
                continue
            decoding.decoded = max(end, decoding.decoded)
            last = decoding.ended and decoding.decoded == len(decoding.frames)
            start, decoding.samples = decoding.samples, decoding.samples + len(samples)
            if len(samples) or last:
                body = Audio(self._model.rate)
                results.append(Output(name, start, decoding.samples, last, body, {"samples": samples}))
            if not last:
                self._jobs[name] = decoding
        self._look()
        return results

    def close(self) -> None:
        self._jobs.clear()
        self.busy = False

    def _decode(self, due: list[tuple[Decoding, int]], results: list[Output | Failure]) -> dict[str, Samples]:
        """Samples by request. Where that fails, one after another, to find who is to blame."""
        if not due:
            return {}
        names = [decoding.job.request_id for decoding, _ in due]
        try:
            return dict(zip(names, self._model.decode(due), strict=True))
        except Exception as error:
            if torch.cuda.is_initialized():
                # Raises where the device is lost: then nobody can go on.
                torch.cuda.synchronize()
            if len(due) == 1:
                results.append(failure(names[0], error))
                return {}
            log.warning("a step of %d chunks failed: %s", len(due), error)
        made: dict[str, Samples] = {}
        for chunk in due:
            made |= self._decode([chunk], results)
        return made

    def _able(self, decoding: Decoding) -> bool:
        """A chunk is complete, or only the end has to be said."""
        return self._model.due(decoding) > 0 or (decoding.ended and decoding.decoded == len(decoding.frames))

    def _look(self) -> None:
        self.busy = any(self._able(decoding) for decoding in self._jobs.values())
