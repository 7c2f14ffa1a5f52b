"""The talker of Qwen2.5-Omni: transformers' Qwen2_5OmniTalkerForConditionalGeneration, code by code.

A frame (see `omni_talker`) is one code. The inputs are as wide as the thinker's states, which stand beside the codes as
they are; the decoder begins with a projection of the sums.

As in the library, the repetition penalty counts the marks that stand for the prompt too, and the code that pads ends a
speech like the one that ends it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, Qwen2_5OmniTalkerForConditionalGeneration

from omni_worker.engine import Failure, Job, LoadContext
from omni_worker.engines.sampler import Draw, sample
from omni_worker.engines.sequence import Shape, States, not_finite
from omni_worker.engines.slot_cache import ATTENTION, SlotCache
from omni_worker.models import omni_talker
from omni_worker.models.omni_talker import Opening, Talker
from omni_worker.models.qwen2_5_omni_thinker import voices
from omni_worker.weights import load_stage


class Model(Talker):
    """See the module's docstring."""

    def load(self, folder: Path, context: LoadContext) -> None:
        self.setup(folder, context)
        self.whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = self.config = self.whole.talker_config
        config._attn_implementation = ATTENTION
        build: Callable[[], Any] = partial(Qwen2_5OmniTalkerForConditionalGeneration, config)
        self.module = load_stage(folder, "talker", build, self.dtype, self.device, random=self.random)
        self.backbone = self.module.model
        self.shape = Shape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.embedding_size)
        self.voices = voices(folder)
        self.suppressed = torch.tensor([config.tts_codec_start_token_id], device=self.device)
        self.end_ids = frozenset([config.tts_codec_pad_token_id, config.tts_codec_end_token_id])

    def open(self, job: Job) -> "Speech":
        return Speech(job, self)

    def heard(self, states: Tensor) -> Tensor:
        return states

    def embed(self, codes: list[int]) -> Tensor:
        """[n, width of an input]"""
        embedded: Tensor = self.module.get_input_embeddings()(torch.tensor(codes, device=self.device))
        return embedded

    def forward(self, embeds: Tensor, positions: Tensor, cache: SlotCache, extras: dict[str, Any]) -> States:
        return super().forward(self.module.thinker_to_talker_proj(embeds), positions, cache, extras)

    def decide(self, speeches: list["Speech"], hidden: Tensor) -> list[Failure]:
        codes = sample(self.module.codec_head(hidden), [s.draw() for s in speeches], "talker", self.suppressed)
        embeds = self.module.get_input_embeddings()(codes.clamp_min(0))
        failures = []
        for row, (speech, code) in enumerate(zip(speeches, codes.tolist(), strict=True)):
            if code < 0:
                failures.append(not_finite(speech))
            else:
                speech.say(code, embeds[row : row + 1])
        return failures


class Speech(omni_talker.Speech):
    """What one answer sounds like, as codes."""

    def __init__(self, job: Job, model: Model) -> None:
        super().__init__(job, model)
        self._model = model
        self._voice = model.voice(self.params)
        config = model.config
        self._marks = [config.tts_codec_mask_token_id, config.tts_codec_pad_token_id, config.tts_codec_start_token_id]

    def lay_out(self, arrays: dict[str, Tensor]) -> Opening:
        """The whole conversation, the voice, and the first token of the answer."""
        model, config = self._model, self._model.config
        ids, specials = arrays["prompt_ids"], arrays["specials"]
        voice = specials[2 + list(model.voices.values()).index(self._voice)]
        pad, start = model.embed([config.tts_codec_pad_token_id, config.tts_codec_start_token_id])
        embeds = torch.cat([arrays["prompt_states"], (voice + pad)[None], arrays["state"] + start])
        # Two more words; which ones makes no difference to their positions.
        places = torch.cat([ids, ids.new_full((2,), self._voice)])[None]
        positions, delta = model.module.get_rope_index(
            places,
            arrays.get("image_grid_thw"),
            arrays.get("video_grid_thw"),
            torch.ones_like(places),
            bool(arrays["use_audio_in_video"]),
            arrays.get("audio_lengths"),
            arrays.get("video_second_per_grid"),
        )
        return Opening(embeds, positions[:, 0], int(delta), end_mark=specials[:1], padding=specials[1:2])

    def draw(self) -> Draw:
        draw = super().draw()
        draw.seen = [*self._marks, *self.drawn]
        return draw

    def say(self, code: int, embed: Tensor) -> None:
        """A code was decided, now or by a former self of this stage; `embed` [1, width] is its embedding."""
        self.drawn.append(code)
        if code in self._model.end_ids:
            self.end("stop")
            return
        over = self.exhausted
        self.emit([code], embed)
        if over:
            self.end("length")
        self.feed_frames()

    def replay(self, frame: list[int]) -> None:
        self.say(frame[0], self._model.embed(frame))
