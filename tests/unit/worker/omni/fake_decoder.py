"""A fake decoder for the `transformers` engine: attention whose sums are whole numbers, so every mistake is exact.

Position j of a row holds id_j x (place_j + 1), where the place is what the engine gave as its position. The state of a
position is the sum of (i + 1) x held_i over what it sees, modulo nothing: below 2^53 floats of 64 bits hold it exactly,
in whatever order it is added up. A row that is written to a wrong slot or index, sees too much or too little, or has a
wrong place, says something else than `answer`, which knows nothing of slots, batches and pieces.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from omni_common.errors import invalid
from omni_common.frames import CLIENT, Features, Text
from omni_common.params import Generation
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.sequence import Sequence, Shape, States, not_finite
from omni_worker.engines.slot_cache import SlotCache

PART = "fake_decoder"
#: Ids at which something breaks: in `prepare`, in `forward`, in the states, in `decide`, in the scores, in `computed`.
BAD_PROMPT, BAD_INPUT, NO_NUMBER, BAD_CHOICE, NO_SCORE, BAD_STATE = range(900, 906)
VOCABULARY = 89
#: Places are further on than indices, as behind media.
DELTA = 5
#: Who gets notes of the prompt beside the tokens, and who sends the word for each further step.
LISTENER, PACER = "listener", "pacer"


def state(ids: list[int]) -> int:
    """Of the last of `ids`."""
    return sum((at + 1) * token * (at + DELTA + 1) for at, token in enumerate(ids))


def answer(ids: list[int], count: int, forced: Mapping[int, int] | None = None) -> list[int]:
    """`count` tokens to a prompt; `forced`: tokens by their index."""
    ids, said = list(ids), []
    for index in range(count):
        said.append((forced or {}).get(index, state(ids) % VOCABULARY))
        ids.append(said[-1])
    return said


class FakeAnswer(Sequence):
    """One answer of `params.max_tokens` tokens, or up to one of `params.stop_token_ids`."""

    def __init__(self, job: Job, model: "Model") -> None:
        super().__init__(job)
        assert isinstance(job.params, Generation)
        if job.params.voice:
            raise invalid("voice: a fake has none", "voice")
        self.params = job.params
        self.tokens: list[int] = []
        self.notes = LISTENER in job.sinks
        self.ids: list[int] = []
        self._model = model
        self._given: list[int] | None = None
        self._finished = self._told = False
        #: Tokens that may be fed; without a pacer all.
        self._words = 0 if PACER in job.sources else 10**9
        self._unfed: list[int] = []

    def push(self, piece: Piece) -> None:
        if isinstance(piece.body, Features):
            self._given = piece.arrays["ids"].tolist()
        else:
            self._words += 1
            self._feed_tokens()

    @property
    def unprepared(self) -> bool:
        return self._given is not None

    def prepare(self) -> None:
        assert self._given is not None
        self.ids, self._given = self._given, None
        self._model.prepared.append(self.job.request_id)
        if BAD_PROMPT in self.ids:
            raise invalid("a prompt that breaks", "messages[0]")
        places = torch.arange(len(self.ids)) + DELTA
        self.feed(_embed(self.ids), places.expand(3, -1))
        self.keys = list(self.ids)
        for decision in self.job.resume:
            assert isinstance(decision.body, Text)
            for token in decision.body.ids:
                self.say(token)

    def computed(self, start: int, embeds: Tensor, states: States, row: int, memo: Tensor | None) -> None:
        if (embeds == BAD_STATE).any():
            raise ValueError("a state that breaks")
        if memo is not None and self.notes:
            memo[start : start + len(embeds)] = embeds
            if not self._told and self.length >= len(self.ids):
                self._told = True
                body, notes = Text("", []), memo[: len(self.ids), 0].numpy().copy()
                self.outputs.append(Output(self.job.request_id, 0, 1, True, body, {"notes": notes}, (LISTENER,)))

    @property
    def deciding(self) -> bool:
        return not self._finished and not self._unfed

    def say(self, token: int) -> None:
        index = len(self.tokens)
        self.tokens.append(token)
        over = index + 1 >= self.params.max_tokens or self.fed + 1 > self._model.context
        finish = "stop" if token in self.params.stop_token_ids else "length" if over else ""
        self._finished = bool(finish)
        body = Text("", [token], finish)  # type: ignore[arg-type]
        self.outputs.append(Output(self.job.request_id, index, index + 1, self._finished, body, {}, (CLIENT,)))
        if not finish:
            self._unfed.append(token)
            self.keys.append(token)
            self._feed_tokens()

    def _feed_tokens(self) -> None:
        while self._unfed and self._words > 0:
            self._words -= 1
            self.feed(_embed([self._unfed.pop(0)]), self.fed + DELTA)


class Model:
    """Of `omni_worker.engines.sequence.Model`. `forced`: what (request, index) says in place of its token."""

    shape = Shape(layers=1, heads=1, head_dim=1, hidden=1, axes=3, memo=1)
    device = torch.device("cpu")
    dtype = torch.float64

    def load(self, folder: Path, context: LoadContext) -> None:
        self.context = int(context.options["context"])
        self.forced: dict[tuple[str, int], int] = {}
        self.prepared: list[str] = []
        #: (rows, positions) of every forward.
        self.forwards: list[tuple[int, int]] = []

    def open(self, job: Job) -> FakeAnswer:
        return FakeAnswer(job, self)

    def forward(self, embeds: Tensor, positions: Tensor, cache: SlotCache, extras: dict[str, Any]) -> States:
        rows, count, _ = embeds.shape
        self.forwards.append((rows, count))
        assert positions.shape == (3, rows, count)
        if (embeds == BAD_INPUT).any():
            raise RuntimeError("an input that breaks")
        # What is no number stays none wherever it is weighed, with 0 too, as behind a softmax.
        held = (embeds * (positions[0, ..., None] + 1)).masked_fill(embeds == NO_NUMBER, torch.nan)
        _, values = cache.update(torch.zeros(rows, 1, count, 1, dtype=torch.float64), held[:, None], 0)
        # What was computed before is there: of a prompt its beginning, of an answer all but this.
        length = values.shape[2]
        mask = cache.mask
        if mask is None:
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        weights = mask.to(torch.float64).expand(rows, 1, count, length) * (torch.arange(length) + 1)
        return States((weights @ values)[:, 0])

    def decide(self, sequences: list[FakeAnswer], hidden: Tensor) -> list[Failure]:
        choices = []
        for sequence, width in zip(sequences, hidden[:, 0].tolist(), strict=True):
            name, index = sequence.job.request_id, len(sequence.tokens)
            choices.append(self.forced.get((name, index), int(width) % VOCABULARY))
        if BAD_CHOICE in choices:
            raise RuntimeError("a choice that breaks")
        failures = []
        for sequence, choice in zip(sequences, choices, strict=True):
            if choice == NO_SCORE:
                failures.append(not_finite(sequence))
            else:
                sequence.say(choice)
        return failures


def _embed(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.float64)[:, None]


def module() -> ModuleType:
    """As the engine imports it."""
    made = ModuleType(f"omni_worker.models.{PART}")
    made.Model = Model  # type: ignore[attr-defined]
    return made
