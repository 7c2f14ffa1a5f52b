"""The talker of Qwen3-Omni: transformers' Qwen3OmniMoeTalkerForConditionalGeneration, frame by frame.

A frame (see `omni_talker`) is an id from the talker itself, and one a further code group from its code predictor, a
small decoder that runs once a group on the talker's last hidden state and the codes so far.

As in the library, `max_tokens` counts draws of the first group, and the frame of the last draw is not completed:
without an end there are `max_tokens - 1` frames.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3OmniMoeTalkerForConditionalGeneration

from omni_common.errors import OmniError
from omni_worker.engine import Failure, Job, LoadContext
from omni_worker.engines.sampler import sample, uniform
from omni_worker.engines.sequence import Shape, not_finite
from omni_worker.engines.slot_cache import ATTENTION
from omni_worker.models import omni_talker
from omni_worker.models.omni_talker import Opening, Talker
from omni_worker.models.qwen3_omni_predictor import Predictor
from omni_worker.weights import load_stage


class Model(Talker):
    """See the module's docstring."""

    def load(self, folder: Path, context: LoadContext) -> None:
        self.setup(folder, context)
        whole = self.whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = self.config = whole.talker_config
        # Looked up by the library's rope index when there is audio, and missing there.
        config.audio_config = whole.thinker_config.audio_config
        text = config.text_config
        text._attn_implementation = ATTENTION
        if self.experts:
            text._experts_implementation = self.experts
        build: Callable[[], Any] = partial(Qwen3OmniMoeTalkerForConditionalGeneration, config)
        self.module = module = load_stage(folder, "talker", build, self.dtype, self.device, random=self.random)
        self.backbone = module.model
        self.shape = Shape(text.num_hidden_layers, text.num_key_value_heads, text.head_dim, text.hidden_size)
        first, groups = module.get_input_embeddings(), config.num_code_groups
        graphs = self.device.type == "cuda" and bool(context.options.get("graphs", True))
        self.predictor = Predictor(module.code_predictor, first, groups, context.slots, self.device, graphs)
        self.voices = config.speaker_id
        # The special ids at the end of the vocabulary are no codes.
        last = text.vocab_size
        special = [number for number in range(last - 1024, last) if number != config.codec_eos_token_id]
        self.end_ids = frozenset([config.codec_eos_token_id])
        self.suppressed = torch.tensor(special, device=self.device)

    def open(self, job: Job) -> "Speech":
        return Speech(job, self)

    def heard(self, states: Tensor) -> Tensor:
        projected: Tensor = self.module.text_projection(states)
        return projected

    def decide(self, speeches: list["Speech"], hidden: Tensor) -> list[Failure]:
        firsts = sample(self.module.codec_head(hidden), [s.draw() for s in speeches], "talker", self.suppressed)
        drawn: list[int] = firsts.tolist()
        failures = [not_finite(speech) for speech, first in zip(speeches, drawn, strict=True) if first < 0]
        going = [row for row, speech in enumerate(speeches) if drawn[row] >= 0 and speech.begin_frame(drawn[row])]
        if not going:
            return failures
        try:
            codes, embeds = self._complete([speeches[row] for row in going], hidden[going], firsts[going])
        except Exception:
            # As if they had not been asked: the engine asks again, one by one.
            for row in going:
                speeches[row].drawn.pop()
            raise
        for at_row, (row, frame) in enumerate(zip(going, codes.tolist(), strict=True)):
            speeches[row].end_frame(frame, embeds[at_row : at_row + 1])
        return failures

    def _complete(self, speeches: list["Speech"], hidden: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
        """As `Predictor.complete`, with each speech's own numbers."""
        numbers = np.stack([speech.numbers(self.predictor.groups - 1) for speech in speeches])
        return self.predictor.complete(
            hidden,
            firsts,
            torch.from_numpy(numbers).to(self.device, torch.float32),
            torch.tensor([speech.params.temperature == 0 for speech in speeches], device=self.device),
        )


class Speech(omni_talker.Speech):
    """What one answer sounds like, as codes."""

    def __init__(self, job: Job, model: Model) -> None:
        super().__init__(job, model)
        self._model = model
        self._voice = model.voice(self.params)

    def lay_out(self, arrays: dict[str, Tensor]) -> Opening:
        """The user's turns, and the beginning of the answer."""
        model, whole, config = self._model, self._model.whole, self._model.config
        project = model.module.text_projection
        ids, states = arrays["prompt_ids"], arrays["prompt_states"]
        bos, eos, pad = project(arrays["specials"]).split(1)

        thinker = whole.thinker_config
        media = (ids == thinker.audio_token_id) | (ids == thinker.image_token_id) | (ids == thinker.video_token_id)
        users = _of_role(ids, whole.im_start_token_id, whole.user_token_id)
        turns = states.new_empty(int(users.sum()), config.text_config.hidden_size)
        turns[media[users]] = model.module.hidden_projection(states[users & media])
        turns[~media[users]] = project(states[users & ~media])

        begins = (ids[:-1] == whole.im_start_token_id) & (ids[1:] == whole.assistant_token_id)
        if not begins.any():
            raise OmniError("the prompt does not end with the beginning of an answer", code="invalid_prompt")
        answer = project(states[int(begins.nonzero()[-1]) :])
        first = project(arrays["state"])
        spoken = torch.cat([answer[:3], pad.expand(4, -1), bos, first])
        marks = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id]
        marks += [self._voice, config.codec_pad_id, config.codec_bos_id]
        spoken[3:] += model.predictor.embed_first(marks)

        pads = torch.full((len(spoken),), whole.tts_pad_token_id, device=ids.device)
        places = torch.cat([ids[users], pads])[None]
        positions, delta = model.module.get_rope_index(
            places,
            arrays.get("image_grid_thw"),
            arrays.get("video_grid_thw"),
            torch.ones_like(places),
            False,
            arrays.get("audio_lengths"),
            arrays.get("video_second_per_grid"),
        )
        return Opening(torch.cat([turns, spoken]), positions[:, 0], int(delta), end_mark=eos, padding=pad)

    def replay(self, frame: list[int]) -> None:
        self.drawn.append(frame[0])
        self.emit(frame, self._model.predictor.embed(torch.tensor([frame], device=self._model.device)))

    def numbers(self, count: int) -> np.ndarray[Any, Any]:
        """Random numbers for the further groups of the frame that was begun."""
        if self.params.temperature == 0:
            return np.zeros(count)
        seed = self.job.seed if self.params.seed is None else self.params.seed
        return uniform(seed, "predictor", len(self.drawn) - 1, count)

    def begin_frame(self, first: int) -> bool:
        """The first group's code was drawn; false when it ends the speech."""
        self.drawn.append(first)
        if first == self._model.config.codec_eos_token_id:
            self.end("stop")
        elif self.exhausted:
            self.end("length")
        return not self.finish

    def end_frame(self, frame: list[int], embed: Tensor) -> None:
        """All codes of the frame are there; `embed` [1, hidden] is what they add to the next input."""
        self.emit(frame, embed)
        self.feed_frames()


def _of_role(ids: Tensor, start: int, role: int) -> Tensor:
    """bool [length]: positions of turns whose first token behind `start` is `role`."""
    places = torch.arange(len(ids), device=ids.device)
    begun = torch.where(ids == start, places, -1).cummax(0).values.clamp_min(0)
    return ids[(begun + 1).clamp_max(len(ids) - 1)] == role
