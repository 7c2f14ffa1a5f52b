"""The thinker of Qwen2.5-Omni: transformers' Qwen2_5OmniThinkerForConditionalGeneration, step by step.

A talker hears the sum of what enters the decoder at a position and what leaves it behind the last norm; at positions of
media only the latter. So a token is heard when it has been an input.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, Qwen2_5OmniThinkerForConditionalGeneration

from omni_common.frames import Features
from omni_worker.engine import LoadContext
from omni_worker.engines.sequence import Shape, States
from omni_worker.engines.slot_cache import ATTENTION
from omni_worker.models.omni_thinker import Encoded, Thinker
from omni_worker.weights import load_stage


class Model(Thinker):
    """See the module's docstring."""

    state_with_token = False

    def load(self, folder: Path, context: LoadContext) -> None:
        self.setup(folder, context)
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = self.config = whole.thinker_config
        text = config.text_config
        text._attn_implementation = ATTENTION
        build: Callable[[], Any] = partial(Qwen2_5OmniThinkerForConditionalGeneration, config)
        self.module = load_stage(folder, "thinker", build, self.dtype, self.device, random=self.random)
        self.backbone = self.module.model
        # As in the library, which has no generation config of the thinker's own but what follows from its config.
        ends = self.module.generation_config.eos_token_id
        self.end_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        talker = whole.talker_config
        self._special_ids = [talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
        if self.feeds_talker:
            self._special_ids += voices(folder).values()
        memo = text.hidden_size if self.feeds_talker else 0
        head_dim = text.hidden_size // text.num_attention_heads
        self.shape = Shape(text.num_hidden_layers, text.num_key_value_heads, head_dim, text.hidden_size, memo=memo)

    def state(self, media: Tensor, embeds: Tensor, states: States, row: int) -> Tensor:
        return states.last[row] + embeds.masked_fill(media[:, None], 0.0)

    def specials(self) -> Tensor:
        """Of the end of text, the padding behind it, and each voice's beginning of speech."""
        return self.embed(self._special_ids)

    def encode(self, arrays: dict[str, Tensor], features: Features) -> Encoded:
        encoded = super().encode(arrays, features)
        config = self.config
        # As in the library: a placeholder that somebody wrote, with no media behind it, is heard like a word.
        present = [
            token
            for name, token in (
                ("input_features", config.audio_token_id),
                ("pixel_values", config.image_token_id),
                ("pixel_values_videos", config.video_token_id),
            )
            if name in arrays
        ]
        encoded.media = torch.isin(encoded.ids, encoded.ids.new_tensor(present))
        encoded.grids["use_audio_in_video"] = torch.tensor([int(features.use_audio_in_video)])
        return encoded


def voices(folder: Path) -> dict[str, int]:
    """By name in lower case and alphabetical order: the text token with which the voice begins to speak."""
    speakers: dict[str, Any] = json.loads((folder / "speakers.json").read_text())
    return {name.lower(): int(speakers[name]["bos_token"]) for name in sorted(speakers)}
