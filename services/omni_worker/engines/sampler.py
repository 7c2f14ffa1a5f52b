"""From logits to tokens, request by request, with random numbers that depend on (seed, stage, index) alone.

The order of the steps is that of transformers' logits processors: biases, penalties, suppression, temperature, top-k,
top-p, min-p. With temperature 0 the token is the one of the largest logit after biases, penalties and suppression.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omni_common.params import Sampling


@dataclass(slots=True)
class Draw:
    """How the next token of one sequence is chosen."""

    params: Sampling
    #: Of the request; its parameters may have another.
    job_seed: int
    #: Index of the token in the answer.
    index: int
    #: Ids that the repetition penalty counts: the prompt's too, where the reference does.
    seen: Sequence[int] = ()
    #: Ids of the answer, for the frequency and presence penalties.
    written: Sequence[int] = ()
    #: Ids that must not come now.
    forbidden: Sequence[int] = ()

    @property
    def seed(self) -> int:
        return self.job_seed if self.params.seed is None else self.params.seed


def uniform(seed: int, stage: str, index: int, draws: int = 1) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Numbers in [0, 1), float64 [draws]: Philox, keyed by seed and stage, from (index, 0) on."""
    key = np.array([seed & (2**64 - 1), zlib.crc32(stage.encode())], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, index, 0])).random(draws)


def sample(logits: Tensor, draws: Sequence[Draw], stage: str, suppress: Tensor | None = None) -> Tensor:
    """One id a row of `logits` [rows, vocabulary]: int64 [rows]. `suppress`: ids that no row may have."""
    scores = logits.float()
    if suppress is not None:
        scores = scores.index_fill(1, suppress, -torch.inf)
    changed = [row for row, draw in enumerate(draws) if _changes_scores(draw)]
    if changed:
        scores = scores.clone()
        for row in changed:
            _penalise(scores[row], draws[row])
    if all(draw.params.temperature == 0 for draw in draws):
        return scores.argmax(-1)
    numbers = [float(uniform(d.seed, stage, d.index)[0]) if d.params.temperature > 0 else 0.0 for d in draws]
    return choose(
        scores,
        *(
            torch.tensor(values, dtype=torch.float32, device=scores.device)
            for values in (
                numbers,
                [d.params.temperature for d in draws],
                [d.params.top_k for d in draws],
                [d.params.top_p for d in draws],
                [d.params.min_p for d in draws],
            )
        ),
    )


def choose(scores: Tensor, number: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The ids at `number` of what top-k, top-p and min-p leave of each distribution, likeliest first: int64 [rows].

    `scores` [rows, vocabulary] float32, the others [rows] float32. Works without a word to the host, so a graph can
    hold it. Of equal scores the smaller id stands first.
    """
    greedy = temperature == 0
    scaled = scores / torch.where(greedy, 1.0, temperature)[:, None]
    sorted_scores, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)[None]
    # As the library's processors do it: each renormalises what the one before left.
    sorted_scores = sorted_scores.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), -torch.inf)
    chances = sorted_scores.softmax(-1)
    # The token that crosses the bound stays.
    over = (chances.cumsum(-1) - chances >= top_p[:, None]) & (top_p[:, None] < 1) & (rank > 0)
    chances = sorted_scores.masked_fill(over, -torch.inf).softmax(-1)
    chances = chances.masked_fill(chances < min_p[:, None] * chances[:, :1], 0.0)
    reached = chances.double().cumsum(-1)
    at = torch.searchsorted(reached, number.double()[:, None] * reached[:, -1:], right=True)
    last = (chances > 0).sum(-1, keepdim=True) - 1
    at = torch.where(greedy[:, None], 0, torch.minimum(at, last))
    chosen: Tensor = ids.gather(1, at)[:, 0]
    return chosen


def _changes_scores(draw: Draw) -> bool:
    params = draw.params
    penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(penalties or params.logit_bias or draw.forbidden)


def _penalise(scores: Tensor, draw: Draw) -> None:
    """In place, on [vocabulary]."""
    params = draw.params
    if params.logit_bias:
        biases = params.biases
        scores[list(biases)] += torch.tensor(list(biases.values()), device=scores.device)
    if params.repetition_penalty != 1.0 and draw.seen:
        seen = torch.tensor(sorted(set(draw.seen)), device=scores.device)
        held = scores[seen]
        scores[seen] = torch.where(held < 0, held * params.repetition_penalty, held / params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and draw.written:
        ids, counts = np.unique(np.array(draw.written), return_counts=True)
        lowered = torch.from_numpy(counts * params.frequency_penalty + params.presence_penalty)
        scores[torch.from_numpy(ids).to(scores.device)] -= lowered.to(scores)
    if draw.forbidden:
        scores[list(draw.forbidden)] = -torch.inf
