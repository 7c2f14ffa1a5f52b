"""A fake engine: the test rig's and the benchmark's stage. It computes nothing that anybody would want.

`model:` chooses what it does with its input:

- `identity`: every piece goes on with the same body, each tensor read and written anew;
- `tokens`: when the input has ended, `max_tokens` tokens (` w0`, ` w1`, ...) leave, one a step; with the option
  `entropy` each carries a random number of this process, so that deciding anew would show;
- `tone`: every piece of text becomes 0.1 s of a tone whose frequency is 200 Hz + 10 Hz x its first number;
- `echo`: the text of the prompt's last message or the transcript comes back word by word.

Options: `per_step` (tokens of a job in one step), `step_s` (a step takes this long), `fail_load` (the reason why
loading fails), `raise_at` (the job fails at this token), `die_at` (the process kills itself at this token), `rate`,
`notes` (a folder, see `fake_notes.py`).
"""

import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from omni_common.frames import Audio, Body, Prompt, Text, TextPart, Transcript
from omni_common.params import Sampling
from omni_worker.engine import Arrays, Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.fake_notes import Notes

TONE_S = 0.1


@dataclass(slots=True)
class _FakeJob:
    job: Job
    pieces: deque[Piece] = field(default_factory=deque)
    #: Sources that have not ended.
    open: set[str] = field(default_factory=set)
    words: list[str] | None = None
    text: str = ""
    position: int = 0

    @property
    def able(self) -> bool:
        return bool(self.pieces) or self.words is not None


class FakeEngine:
    """See the module's docstring."""

    in_flight = False
    rebuilds = False

    def __init__(self) -> None:
        # The event loop asks whether it is busy before it is loaded, and while the engine thread changes this.
        self._jobs: dict[str, _FakeJob] = {}

    def load(self, context: LoadContext) -> None:
        options = context.options
        self._mode = context.model or "identity"
        self._per_step = int(options.get("per_step", 1))
        self._step_s = float(options.get("step_s", 0.0))
        self._raise_at = int(options.get("raise_at", -1))
        self._die_at = int(options.get("die_at", -1))
        self._entropy = bool(options.get("entropy", False))
        self._rate = int(options.get("rate", 24_000))
        self._notes = Notes(options["notes"]) if "notes" in options else None
        context.progress("pretending to load", 0.5)
        if "fail_load" in options:
            raise RuntimeError(str(options["fail_load"]))

    @property
    def busy(self) -> bool:
        return any(job.able for job in list(self._jobs.values()))

    @property
    def resumes(self) -> bool:
        return self._mode == "tokens"

    def add(self, job: Job) -> None:
        position = job.resume[-1].end if job.resume else 0
        self._jobs[job.request_id] = _FakeJob(job, open=set(job.sources), position=position)
        if self._notes:
            self._notes.job(job.request_id)

    def push(self, request_id: str, piece: Piece) -> None:
        job = self._jobs[request_id]
        if piece.last:
            job.open.discard(piece.source)
        if self._mode in ("identity", "tone"):
            job.pieces.append(piece)
            return
        job.text += _words_of(piece.body)
        if not job.open:
            wanted = job.job.params.max_tokens if isinstance(job.job.params, Sampling) else 16
            job.words = job.text.split() if self._mode == "echo" else [f"w{index}" for index in range(wanted)]

    def cancel(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        outputs: list[Output | Failure] = []
        for request_id, job in list(self._jobs.items()):
            if request_id in blocked or not job.able:
                continue
            if job.words is None:
                outputs += self._pass_on(job)
            else:
                for _ in range(self._per_step):
                    outputs.append(self._next_word(job))
                    if request_id not in self._jobs:
                        break
        if self._notes:
            for output in outputs:
                if isinstance(output, Output):
                    self._notes.output(output.request_id, output.start, output.end, output.last)
        if outputs and self._step_s:
            time.sleep(self._step_s)
        return outputs

    def close(self) -> None:
        self._jobs = {}
        if self._notes:
            self._notes.close()
            self._notes = None

    def _pass_on(self, job: _FakeJob) -> list[Output | Failure]:
        outputs: list[Output | Failure] = []
        while job.pieces:
            piece = job.pieces.popleft()
            last = not job.open and not job.pieces
            if self._mode == "tone":
                outputs.append(self._tone(job, piece, last))
            else:
                arrays: Arrays = {name: array + array.dtype.type(1) for name, array in piece.arrays.items()}
                outputs.append(Output(job.job.request_id, piece.start, piece.end, last, piece.body, arrays))
            if last:
                del self._jobs[job.job.request_id]
        return outputs

    def _tone(self, job: _FakeJob, piece: Piece, last: bool) -> Output:
        text = _words_of(piece.body)
        digits = "".join(char if char.isdigit() else " " for char in text).split()
        samples = np.zeros(0, np.float32)
        if text.strip():
            times = np.arange(int(TONE_S * self._rate)) / self._rate
            frequency = 200.0 + 10.0 * (int(digits[0]) if digits else 0)
            samples = (0.5 * np.sin(2 * np.pi * frequency * times)).astype(np.float32)
        start, job.position = job.position, job.position + len(samples)
        body = Audio(rate=self._rate, text=text)
        return Output(job.job.request_id, start, job.position, last, body, {"samples": samples})

    def _next_word(self, job: _FakeJob) -> Output | Failure:
        assert job.words is not None
        request_id, index, words = job.job.request_id, job.position, job.words
        if index == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self._raise_at:
            del self._jobs[request_id]
            return Failure(request_id, f"told to fail at token {index}")
        last = index + 1 >= len(words)
        word = words[index] if words else ""
        if self._entropy:
            word = f"{word}.{secrets.randbelow(10**9)}"
        text = (" " if index else "") + word
        job.position += 1 if words else 0
        if last:
            del self._jobs[request_id]
        body = Text(text, [index] if words else [], "stop" if last else "", len(job.text.split()) if last else 0)
        return Output(request_id, index, job.position, last, body)


def _words_of(body: Body | None) -> str:
    if isinstance(body, Prompt):
        return " ".join(part.text for part in body.messages[-1].parts if isinstance(part, TextPart))
    if isinstance(body, Transcript):
        return " ".join(segment.text for segment in body.segments)
    return body.text if isinstance(body, Text) else ""
