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

from omni_common.frames import Features
from omni_worker.engine import LoadContext
from omni_worker.engines.sequence import Shape, States
from omni_worker.engines.slot_cache import ATTENTION, SlotCache
from omni_worker.models.omni_thinker import Encoded, Thinker, content_keys
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
        build: Callable[[], Any] = partial(Qwen3OmniMoeThinkerForConditionalGeneration, config)
        self.module = load_stage(folder, "thinker", build, self.dtype, self.device, random=self.random)
        self.backbone = self.module.model
        self.end_ids = frozenset([whole.im_end_token_id])
        self._special_ids = [whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id]
        memo = text.hidden_size if self.feeds_talker else 0
        self.shape = Shape(text.num_hidden_layers, text.num_key_value_heads, text.head_dim, memo=memo)
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

    def encode(self, arrays: dict[str, Tensor], features: Features) -> Encoded:
        config, module = self.config, self.module
        ids = arrays["ids"]
        embeds: Tensor = module.get_input_embeddings()(ids)
        image, video = ids == config.image_token_id, ids == config.video_token_id
        audio = ids == config.audio_token_id
        lengths = None
        if "input_features" in arrays:
            mask = arrays["feature_attention_mask"]
            lengths = mask.sum(1)
            heard = module.get_audio_features(arrays["input_features"].to(self.dtype), mask, return_dict=True)
            embeds = embeds.masked_scatter(audio[:, None], heard.last_hidden_state.to(embeds.dtype))
        looked = []
        for name, grid, where, look in (
            ("pixel_values", "image_grid_thw", image, module.get_image_features),
            ("pixel_values_videos", "video_grid_thw", video, module.get_video_features),
        ):
            if name in arrays:
                seen = look(arrays[name].to(self.dtype), arrays[grid], return_dict=True)
                embeds = embeds.masked_scatter(where[:, None], torch.cat(tuple(seen.pooler_output)).to(embeds.dtype))
                looked.append((where, [_joined(layer) for layer in seen.deepstack_features]))
        positions, delta = module.get_rope_index(
            ids[None],
            arrays.get("image_grid_thw"),
            arrays.get("video_grid_thw"),
            torch.ones_like(ids[None]),
            features.use_audio_in_video,
            lengths,
            arrays.get("video_second_per_grid"),
        )
        wanted: list[str] = ["image_grid_thw", "video_grid_thw", "video_second_per_grid"]
        grids = {name: arrays[name] for name in wanted if name in arrays}
        if lengths is not None:
            grids["audio_lengths"] = lengths
        media = image | video | audio
        visual, deepstack = _merged(looked)
        return Encoded(
            ids=ids,
            embeds=embeds,
            positions=positions[:, 0],
            delta=int(delta),
            media=media,
            keys=content_keys(ids, media, features.digests, starts(media)),
            grids=grids,
            visual=visual,
            deepstack=deepstack,
        )


def starts(media: Tensor) -> list[int]:
    """Where each run of media positions begins."""
    before = torch.nn.functional.pad(media[:-1], (1, 0))
    begun: list[int] = (media & ~before).nonzero()[:, 0].tolist()
    return begun


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
