"""The other side of `embedded`: the same engines, with the same parameters, called one after the other in one process.

`python -m tools.bench.in_a_row PIPELINES` reads one `Question` a line (JSON) and writes one `Answer` a line. No bus, no
HTTP, no overlap: the recogniser hears all, then the thinker writes all, then the talker and code2wav speak all of it.
"""

import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np

from omni_common.errors import OmniError
from omni_common.frames import CLIENT, Audio, AudioPart, Body, Message, Prompt, Text, TextPart
from omni_common.ids import new_request_id
from omni_common.params import check_params
from omni_common.paths import models_dir
from omni_common.pipeline import Pipeline, Stage
from omni_common.pipeline_file import load_pipelines
from omni_worker.engine import Arrays, Failure, Job, LoadContext, Output, Piece
from omni_worker.main import limit_threads, make_engine

Samples = np.ndarray[Any, np.dtype[np.float32]]
Pieces = list[tuple[Body | None, Arrays]]
HEARD_RATE = 16_000
#: Prompts that push earlier ones out of the thinker's cache, so that no question is known when it is timed. They differ
#: from their first words on, and there are as many as the thinker has slots.
OTHERS = ("Name three fruits.", "Say hello to Maria.", "Are cats clever?", "How long is a day?")


class Question(msgspec.Struct):
    """`heard`: a file of float32 at 16 kHz (`numpy.save`), asked instead of `text`. `say`: only speak `text`."""

    text: str = ""
    heard: str = ""
    say: bool = False
    max_tokens: int = 96
    #: Where the samples of the answer go (`numpy.save`).
    out: str = ""


class Answer(msgspec.Struct):
    text: str
    samples: int
    #: Of each stage, and of all.
    took_s: dict[str, float]
    total_s: float


class StageInRow:
    """One engine, driven as the worker does, but by one caller that waits."""

    def __init__(self, name: str, stage: Stage) -> None:
        self._name = name
        self._stage = stage
        self._news = threading.Event()
        limit_threads(stage)
        self._engine = make_engine(stage.engine)
        self._engine.load(
            LoadContext(
                model=stage.model,
                options=stage.options,
                models=str(models_dir()),
                slots=stage.slots,
                threads=stage.threads,
                progress=lambda what, fraction: None,
                wake=self._news.set,
            )
        )

    def run(self, source: str, *inputs: Pieces, **params: int) -> list[list[Output]]:
        """The outputs of one job for each of `inputs`, all together; positions are of no interest to the engines."""
        jobs: dict[str, list[Output]] = {}
        for pieces in inputs:
            request_id = new_request_id()
            jobs[request_id] = []
            checked = check_params(self._stage.engine, {**self._stage.params, **params}, self._name)
            self._engine.add(Job(request_id, 1, checked, (source,), (CLIENT,)))
            for number, (body, arrays) in enumerate(pieces):
                last = number == len(pieces) - 1
                self._engine.push(request_id, Piece(source, number, number + 1, last, body, arrays))
        open_jobs = set(jobs)
        while open_jobs:
            self._news.clear()
            outputs = self._engine.step(frozenset())
            for output in outputs:
                if isinstance(output, Failure):
                    raise OmniError(f"{self._name}: {output.message}", code=output.code)
                jobs[output.request_id].append(output)
                if output.last:
                    open_jobs.discard(output.request_id)
            if open_jobs and not outputs and not self._engine.busy:
                self._news.wait()
        return list(jobs.values())

    def close(self) -> None:
        self._engine.close()


class Row:
    """listener, thinker, talker, code2wav."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._stages = {name: StageInRow(name, stage) for name, stage in pipeline.stages.items()}

    def answer(self, question: Question) -> Answer:
        if not question.say:
            prompts: list[Pieces] = [[(_prompt(TextPart(text)), {})] for text in OTHERS]
            self._stages["thinker"].run(CLIENT, *prompts, max_tokens=1)
        heard = np.load(question.heard) if question.heard else None
        took: dict[str, float] = {}
        began = time.perf_counter()
        if question.say:
            text: Pieces = [(Text(question.text), {})]
        else:
            text = self._think(question, heard, took)
        latents = self._timed(took, "talker", "thinker", text)
        sound = self._timed(took, "code2wav", "talker", [(output.body, output.arrays) for output in latents])
        total = time.perf_counter() - began
        samples = np.concatenate([output.arrays["samples"] for output in sound if output.arrays])
        if question.out:
            np.save(question.out, samples)
        words = "".join(body.text for body, _ in text if isinstance(body, Text))
        return Answer(words, len(samples), took, total)

    def _think(self, question: Question, heard: Samples | None, took: dict[str, float]) -> Pieces:
        if heard is None:
            pieces: Pieces = [(_prompt(TextPart(question.text)), {})]
        else:
            audio = (Audio(rate=HEARD_RATE), {"samples": heard})
            transcripts = self._timed(took, "listener", CLIENT, [audio])
            pieces = [(_prompt(AudioPart(0)), {}), *((output.body, {}) for output in transcripts)]
        written = self._timed(took, "thinker", CLIENT, pieces, max_tokens=question.max_tokens)
        return [(output.body, {}) for output in written]

    def _timed(self, took: dict[str, float], stage: str, source: str, pieces: Pieces, **params: int) -> list[Output]:
        began = time.perf_counter()
        (outputs,) = self._stages[stage].run(source, pieces, **params)
        took[stage] = time.perf_counter() - began
        return outputs

    def close(self) -> None:
        for stage in self._stages.values():
            stage.close()


def _prompt(part: TextPart | AudioPart) -> Prompt:
    return Prompt([Message("user", [part])])


def main(pipeline: str) -> None:
    (loaded,) = load_pipelines([pipeline]).values()
    row = Row(loaded)
    decoder = msgspec.json.Decoder(Question)
    print("ready", flush=True)
    for line in sys.stdin:
        print(msgspec.json.encode(row.answer(decoder.decode(line))).decode(), flush=True)
    row.close()


if __name__ == "__main__":
    main(sys.argv[1])
