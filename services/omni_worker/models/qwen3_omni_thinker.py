"""The thinker of Qwen3-Omni: transformers' Qwen3OmniMoeThinkerForConditionalGeneration, step by step.

A talker hears the embedding of a text position, and of a position of media the hidden state that enters layer
`accept_hidden_layer` (before DeepStack adds to it).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3OmniMoeThinkerForConditionalGeneration

from omni_worker.engine import LoadContext
from omni_worker.engines.sequence import Shape, States
from omni_worker.engines.slot_cache import ATTENTION, SlotCache
from omni_worker.models.omni_thinker import Thinker
from omni_worker.weights import load_stage


class Model(Thinker):
    """See the module's docstring."""

    state_with_token = True

    def load(self, folder: Path, context: LoadContext) -> None:
        self.setup(folder, context)
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = self.config = whole.thinker_config
        text = config.text_config
        text._attn_implementation = ATTENTION
        if self.experts:
            text._experts_implementation = self.experts
        build: Callable[[], Any] = partial(Qwen3OmniMoeThinkerForConditionalGeneration, config)
        self.module = load_stage(folder, "thinker", build, self.dtype, self.device, random=self.random)
        self.backbone = self.module.model
        self.end_ids = frozenset([whole.im_end_token_id])
        self._special_ids = [whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id]
        memo = text.hidden_size if self.feeds_talker else 0
        self.shape = Shape(text.num_hidden_layers, text.num_key_value_heads, text.head_dim, text.hidden_size, memo=memo)
        self._heard: Tensor | None = None
        accepted = whole.talker_config.accept_hidden_layer
        if self.feeds_talker and accepted < text.num_hidden_layers:
            self.module.model.layers[accepted - 1].register_forward_hook(self._hear)

    def _hear(self, _: Any, __: Any, output: Tensor) -> None:
        self._heard = output

    def forward(self, embeds: Tensor, positions: Tensor, cache: SlotCache, extras: dict[str, Any]) -> States:
        self._heard = None
        states = super().forward(embeds, positions, cache, extras)
        return States(states.last, states.last if self._heard is None else self._heard)

    def state(self, media: Tensor, embeds: Tensor, states: States, row: int) -> Tensor:
        assert states.heard is not None
        return torch.where(media[:, None], states.heard[row], embeds)

    def specials(self) -> Tensor:
        return self.embed(self._special_ids)

    def deepen(self, looked: list[tuple[Tensor, Any]]) -> tuple[Tensor | None, list[Tensor]]:
        return _merged([(where, [_joined(layer) for layer in seen.deepstack_features]) for where, seen in looked])


def _joined(layer: Any) -> Tensor:
    """DeepStack features of one layer; newer versions of transformers split them by item."""
    return layer if isinstance(layer, Tensor) else torch.cat(tuple(layer))


def _merged(looked: list[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor | None, list[Tensor]]:
    """The DeepStack features of images and videos together, in the order of their positions."""
    if not looked:
        return None, []
    if len(looked) == 1:
        return looked[0]
    (image, image_layers), (video, video_layers) = looked
    visual = image | video
    layers = []
    for of_images, of_videos in zip(image_layers, video_layers, strict=True):
        layer = of_images.new_empty(int(visual.sum()), of_images.shape[-1])
        layer[image[visual]], layer[video[visual]] = of_images, of_videos
        layers.append(layer)
    return visual, layers
