"""The port between the `transformers` engine and a model: a job as a sequence of positions, and what computes them."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.slot_cache import SlotCache


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cache of a backbone needs."""

    layers: int
    heads: int
    head_dim: int
    #: Width of an input.
    hidden: int
    #: Axes of a position: 3 for multimodal rotary embeddings.
    axes: int = 3
    #: Width of what is kept of every position beside keys and values; 0: nothing.
    memo: int = 0


@dataclass(frozen=True, slots=True)
class States:
    """What a forward of [rows, n] positions gave."""

    #: [rows, n, hidden], behind the last norm.
    last: Tensor
    #: [rows, n, hidden]: of the layer that another stage listens to.
    heard: Tensor | None = None


class Sequence:
    """One job of a model: inputs that are known, [start, end) by position, and outputs that wait to be taken.

    Subclasses feed inputs as they become known and are asked for the next decision when all that was fed is computed.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.slot = -1
        #: Positions that the cache holds.
        self.length = 0
        #: Positions that were fed.
        self.fed = 0
        self.outputs: deque[Output] = deque()
        self._inputs: deque[tuple[int, Tensor, Tensor | int]] = deque()
        #: Sinks that have got their last output.
        self.ended: set[str] = set()
        #: One number a position, equal for equal input: what a held prefix is compared by. Empty: nothing is shared.
        self.keys: list[int] = []
        #: Whether `computed` writes the memo; only then may a prefix be taken over by one that reads it.
        self.notes = False

    def feed(self, embeds: Tensor, positions: Tensor | int) -> None:
        """The next inputs: `embeds` [n, hidden], `positions` [axes, n] int64, or a number that all axes share."""
        self._inputs.append((self.fed, embeds, positions))
        self.fed += len(embeds)

    def reuse(self, length: int) -> None:
        """The cache holds the first `length` positions already."""
        self.length = length

    @property
    def ready(self) -> int:
        """Positions whose input is known and not computed."""
        return self.fed - self.length

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs of the next `count` positions: embeds [count, hidden], positions [axes or 1, count].

        They are given up when `length` has passed them: what failed can be taken again.
        """
        self._give_up()
        embeds, positions, end = [], [], self.length + count
        for start, block, places in self._inputs:
            low, high = max(self.length - start, 0), min(end - start, len(block))
            embeds.append(block[low:high])
            positions.append(torch.tensor([[places]]) if isinstance(places, int) else places[:, low:high].cpu())
            if start + high == end:
                break
        axes = max(len(part) for part in positions)
        return torch.cat(embeds), torch.cat([part.expand(axes, -1) for part in positions], 1)

    def take_one(self) -> tuple[Tensor, Tensor]:
        """As `take(1)`, and quick in the usual case: what was fed last, alone."""
        self._give_up()
        _, block, places = self._inputs[0]
        if isinstance(places, int):
            return block, torch.tensor([[places]])
        return self.take(1)

    def _give_up(self) -> None:
        while self._inputs[0][0] + len(self._inputs[0][1]) <= self.length:
            self._inputs.popleft()

    # -------------------------------------------------------------------------------------- what subclasses define

    def push(self, piece: Piece) -> None:
        """Take input; cheap."""
        raise NotImplementedError

    @property
    def unprepared(self) -> bool:
        """Whether `prepare` has work to do (encoders of media, for one)."""
        return False

    def prepare(self) -> None:
        """Work that comes before the first position; runs alone in a step. Raises OmniError."""

    def extras(self, start: int, end: int) -> dict[str, Any]:
        """Further arguments of the backbone for the positions [start, end) of a prompt."""
        return {}

    def computed(self, start: int, embeds: Tensor, states: States, row: int, memo: Tensor | None) -> None:
        """The positions from `start` on were computed from `embeds` [n, hidden]; theirs is `row` of `states`.

        `memo` [context, width] is what this slot keeps of its positions: to be written.
        """

    @property
    def deciding(self) -> bool:
        """All that was fed is computed: is the next decision due (and not an earlier one known already)?"""
        return True


class Model(Protocol):
    """A model of this engine."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype

    def load(self, folder: Path, context: LoadContext) -> None:
        """Load the weights of the stage from a prepared checkpoint."""
        ...

    def open(self, job: Job) -> Sequence:
        """Begin a job. Raises OmniError when its parameters cannot be served."""
        ...

    def forward(self, embeds: Tensor, positions: Tensor, cache: SlotCache, extras: dict[str, Any]) -> States:
        """Compute `embeds` [rows, n, hidden] at `positions` [axes, rows, n]."""
        ...

    def decide(self, sequences: list[Any], hidden: Tensor) -> list[Failure]:
        """Choose what comes next for each; `hidden` [rows, width] is of their last positions. Feeds and outputs.

        When it raises, the sequences that it had not come to are as before, and asked for again, each alone.
        """
        ...


def not_finite(sequence: Sequence) -> Failure:
    """What to say of a sequence whose states or scores are no numbers."""
    return Failure(sequence.job.request_id, "the model's numbers are not finite", "numerical_error")
