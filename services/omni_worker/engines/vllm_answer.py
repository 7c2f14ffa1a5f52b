"""One job of the `vllm` engine: the prompt, the tokens so far, what is not handed out yet. Knows nothing of vLLM."""

from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from omni_common.errors import OmniError, invalid
from omni_common.frames import CLIENT, Features, Text
from omni_common.params import Generation, check_biases
from omni_worker.engine import Arrays, Job, Output, Piece
from omni_worker.engines.token_text import TokenText
from omni_worker.engines.torch_arrays import to_numpy, to_torch
from omni_worker.engines.vllm_kind import NEEDED, Kind

Embed = Callable[[list[int]], Tensor]


class Answer:
    """What comes out is as of the thinkers of the `transformers` engine (`omni_worker.models.omni_thinker`)."""

    def __init__(self, job: Job, kind: Kind, detokenize: Callable[[list[int]], str], context: int) -> None:
        if not isinstance(job.params, Generation):
            raise OmniError("this stage takes parameters of a generation", code="invalid_params")
        check_biases(job.params, kind.vocabulary)
        self.job = job
        self.params = job.params
        self.talkers = tuple(sink for sink in job.sinks if sink != CLIENT)
        if self.talkers and kind.hearing is None:
            raise OmniError(f"the model has nothing for {', '.join(self.talkers)} to hear", code="invalid_config")
        #: Name of the request in vLLM while it has it.
        self.name = ""
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.finish: Literal["", "stop", "length"] = ""
        #: Of the preprocessor; media are here until vLLM has them.
        self.features: Features | None = None
        self.arrays: dict[str, Tensor] = {}
        self.outputs: deque[Output] = deque()
        #: Sinks that have got their last output.
        self.ended: set[str] = set()
        self._kind, self._detokenize, self._context = kind, detokenize, context
        self._text = TokenText(detokenize, job.params.stop)
        self._bodies: list[Text] = []
        #: Tokens that the talkers have got.
        self._told = 0
        #: [positions, hidden]: what they hear; and of how many positions the hidden states are known.
        self._states: Tensor | None = None
        self._media: Tensor | None = None
        self._heard = 0

    def push(self, piece: Piece) -> None:
        if isinstance(piece.body, Features):
            self.features = piece.body
            arrays = {name: to_torch(array, torch.device("cpu")) for name, array in piece.arrays.items()}
            if "feature_attention_mask" in arrays:
                arrays["audio_lengths"] = arrays["feature_attention_mask"].sum(1)
            arrays["use_audio_in_video"] = torch.tensor([int(piece.body.use_audio_in_video)])
            self.arrays = arrays

    def open(self, embed: Embed) -> list[int]:
        """Begin: go along what was decided before. Returns the ids for vLLM, of the prompt and of what is decided and
        goes into the model. Raises OmniError 400 when they do not fit."""
        self.prompt = self.arrays["ids"].tolist()
        if len(self.prompt) >= self._context:
            raise invalid(
                f"The prompt takes {len(self.prompt)} positions, and the context has {self._context}.",
                "messages",
                code="context_length_exceeded",
            )
        known = [
            token for decision in self.job.resume if isinstance(decision.body, Text) for token in decision.body.ids
        ]
        if self.talkers:
            self._begin_states(embed)
        for token in known:
            self.append(token)
        fed = self.tokens[: len(self.tokens) - bool(self.finish)]
        self.embedded(len(self.prompt), embed(fed) if self.talkers and fed else None)
        return self.prompt + fed

    def free(self) -> None:
        """vLLM has the media; only what a talker needs is kept."""
        grids = self._kind.hearing.grids if self._kind.hearing else ()
        self.arrays = {name: self.arrays[name] for name in ("ids", *grids) if name in self.arrays}

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return min(self.params.max_tokens, self._context - len(self.prompt)) - len(self.tokens)

    # -------------------------------------------------------------------------------------------------- the tokens

    def append(self, token: int) -> None:
        """The next token was decided, now or by a former self of this stage."""
        index = len(self.tokens)
        self.tokens.append(token)
        shown = ""
        if token in self._kind.end_ids or token in self.params.stop_token_ids:
            self.finish = "stop"
        else:
            shown = self._text.push(token, self._detokenize([token]), may_stop=index >= self.params.min_tokens)
            if self._text.stopped:
                self.finish = "stop"
            elif self.left == 0:
                self.finish = "length"
        if self.finish and not self._text.stopped:
            shown += self._text.flush()
        body = Text(shown, [token], self.finish, len(self.prompt) if self.finish else 0)
        self._bodies.append(body)
        if CLIENT in self.job.sinks:
            name = self.job.request_id
            self.outputs.append(Output(name, index, index + 1, bool(self.finish), body, sinks=(CLIENT,)))

    # -------------------------------------------------------------------------------------------------- the states

    @property
    def listened(self) -> int:
        """Positions whose hidden states are wanted."""
        hearing = self._kind.hearing
        if not self.talkers or hearing is None:
            return 0
        if hearing.everywhere:
            return self._context
        assert self._media is not None
        return len(self.prompt) if self._media.any() else 0

    def embedded(self, start: int, embeds: Tensor | None) -> None:
        """Embeddings [n, hidden] of the answer's tokens, from position `start` on."""
        if embeds is not None:
            assert self._states is not None
            self._states[start : start + len(embeds)] = embeds

    def hear(self, start: int, states: Tensor) -> None:
        """Hidden states [n, hidden] from position `start` on. Some may come again: vLLM computes anew what it threw out
        for want of memory."""
        hearing, new = self._kind.hearing, self._heard - start
        if self._states is None or self._media is None or hearing is None or new >= len(states):
            return
        assert new >= 0, "positions that were never computed"
        start, states = start + new, states[new:]
        end = start + len(states)
        if hearing.everywhere:
            self._states[start:end] += states
        else:
            media = self._media[start:end]
            self._states[start : start + len(media)][media] += states[: len(media)][media]
        self._heard = end

    def _begin_states(self, embed: Embed) -> None:
        media = self._kind.media
        tokens = media.tokens if media else {}
        if media and media.only_present:
            tokens = {name: token for name, token in tokens.items() if NEEDED[name] in self.arrays}
        self._media = torch.isin(torch.tensor(self.prompt), torch.tensor(list(tokens.values()), dtype=torch.int64))
        embeds = embed(self.prompt)
        length = min(len(self.prompt) + self.params.max_tokens, self._context)
        self._states = embeds.new_zeros(length, embeds.shape[1])
        self._states[: len(embeds)] = embeds.masked_fill(self._media[:, None], 0.0)

    # ------------------------------------------------------------------------------------------------- the talkers

    def tell(self, specials: Tensor) -> None:
        """Hand every token whose states are known to the talkers; `specials` [n, hidden]."""
        if not self.talkers or self._states is None or self._heard < min(self.listened, len(self.prompt)):
            return
        while self._told < len(self.tokens):
            index, last = self._told, bool(self.finish) and self._told == len(self.tokens) - 1
            position = len(self.prompt) + index
            arrays = self._prompt_arrays(specials) if index == 0 else {}
            if not last:
                if position < self.listened and position >= self._heard:
                    return
                arrays["state"] = to_numpy(self._states[position : position + 1])
            body = self._bodies[index]
            self.outputs.append(Output(self.job.request_id, index, index + 1, last, body, arrays, self.talkers))
            self._told += 1

    def _prompt_arrays(self, specials: Tensor) -> Arrays:
        assert self._states is not None
        grids = self._kind.hearing.grids if self._kind.hearing else ()
        arrays = {name: to_numpy(self.arrays[name]) for name in grids if name in self.arrays}
        arrays["prompt_ids"] = to_numpy(self.arrays["ids"])
        arrays["prompt_states"] = to_numpy(self._states[: len(self.prompt)])
        arrays["specials"] = to_numpy(specials)
        return arrays
