"""The engine's sampler within vLLM, which has its own.

vLLM's random numbers depend on what a request drew before, and a seed is of the request. So the tokens are chosen by
`omni_worker.engines.sampler`, as in the other engine, keyed by (seed, stage, index): a custom logits processor leaves
vLLM's greedy choice nothing but the token that was chosen.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from omni_common.params import Generation
from omni_worker.engines.sampler import Draw, sample

#: Key in `SamplingParams.extra_args`.
CHOICE = "omni_choice"


class Choice(msgspec.Struct):
    """How the tokens of one answer are chosen; travels to the processes of vLLM."""

    params: Generation
    seed: int
    #: Ids that end an answer.
    ends: list[int]
    #: Tokens at the end of the prompt that are of the answer: decided before.
    decided: int = 0
    #: Names the stage for the random numbers.
    stage: str = "thinker"

    def to_extra_args(self) -> dict[str, Any]:
        return {CHOICE: msgspec.to_builtins(self)}

    @property
    def plain(self) -> bool:
        """The likeliest token, always."""
        params = self.params
        penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        return not (params.temperature or penalties or params.logit_bias or params.ignore_eos or params.min_tokens)


@dataclass(slots=True)
class _Row:
    choice: Choice
    prompt: list[int]
    #: vLLM's own list, which grows.
    answer: list[int]

    def draw(self) -> Draw:
        choice, params = self.choice, self.choice.params
        written = self.prompt[len(self.prompt) - choice.decided :] + self.answer
        early = len(written) < params.min_tokens
        forbidden = list(choice.ends) if early or params.ignore_eos else []
        forbidden += params.stop_token_ids if early else []
        seen = self.prompt + self.answer if params.repetition_penalty != 1.0 else []
        return Draw(params, choice.seed, len(written), seen, written, forbidden)


class Chooser(LogitsProcessor):  # type: ignore[misc]
    """Rows of the batch by their index, as vLLM tells of them."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, answer in batch_update.added:
            self._rows.pop(index, None)
            row = _row(params, prompt or [], answer)
            if row is not None:
                self._rows[index] = row
        for one, other, direction in batch_update.moved:
            moved, replaced = self._rows.pop(one, None), self._rows.pop(other, None)
            if moved is not None:
                self._rows[other] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[one] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """`logits` [rows, vocabulary] float32, changed in place."""
        at = sorted(self._rows)
        if not at:
            return logits
        rows = [self._rows[index] for index in at]
        chosen = sample(logits[at], [row.draw() for row in rows], rows[0].choice.stage)
        logits[at] = -torch.inf
        logits[at, chosen] = 0.0
        return logits


def _row(params: SamplingParams, prompt: list[int], answer: list[int]) -> _Row | None:
    sent = (params.extra_args or {}).get(CHOICE)
    if sent is None:
        return None
    choice = msgspec.convert(sent, Choice)
    return None if choice.plain else _Row(choice, prompt, answer)
