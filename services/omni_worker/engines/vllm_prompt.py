"""From the preprocessor's `Features` to a prompt of vLLM: ids, and media that its encoders take as they are.

vLLM has its own processor for raw media, which is not used: what it makes of them is handed in instead, item by item
and with the places of their positions, so that both engines see the same prompt.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, TokensInput, mm_input, tokens_input
from vllm.model_executor.models.qwen2_5_omni_thinker import create_qwen2_5_omni_thinker_field_factory
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from omni_common.errors import OmniError
from omni_common.frames import Features
from omni_worker.engines.vllm_kind import NEEDED, Media


@dataclass(frozen=True, slots=True)
class Run:
    """Positions [start, end) of one part of a conversation: a medium, or a video and its sound."""

    start: int
    end: int
    modalities: tuple[str, ...]


def engine_input(
    ids: list[int], features: Features, arrays: dict[str, Tensor], media: Media | None
) -> TokensInput | MultiModalInput:
    """What `Features` has, and behind its ids those that were decided before: `ids` are all.

    Raises OmniError when media and placeholders differ.
    """
    present = [name for name, needed in NEEDED.items() if needed in arrays]
    if not present or media is None:
        return tokens_input(ids)
    inputs = _inputs(arrays, features)
    config = create_qwen2_5_omni_thinker_field_factory(media.merge)(inputs)
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), config)
    tokens = {name: media.tokens[name] for name in present}
    prompt = arrays["ids"].numpy()
    runs, digests = find_runs(prompt, tokens), features.digests
    places: dict[str, list[PlaceholderRange]] = {name: [] for name in items}
    hashes: dict[str, list[str]] = {name: [] for name in items}
    for number, run in enumerate(runs):
        digest = digests[number] if len(runs) == len(digests) else f"{''.join(digests)} {number}"
        held = torch.from_numpy(prompt[run.start : run.end])
        for name in run.modalities:
            places[name].append(PlaceholderRange(run.start, run.end - run.start, held == tokens[name]))
            hashes[name].append(f"{name} {digest}")
    if any(len(places[name]) != len(items[name]) for name in items):
        raise OmniError("the prompt has not a place for each of its media", code="invalid_prompt")
    return mm_input(ids, items, hashes, places)


def positions(length: int, features: Features, arrays: dict[str, Tensor], media: Media | None) -> list[list[int]]:
    """Of the prompt and what was decided behind it, `length` in all: as the library has them, int [3, length].

    Empty where they just count up. vLLM's own differ for a video with its sound (0.32, Qwen2.5-Omni).
    """
    if media is None or not any(needed in arrays for needed in NEEDED.values()):
        return []
    ids = arrays["ids"]
    found, _ = media.module.get_rope_index(
        ids[None],
        arrays.get("image_grid_thw"),
        arrays.get("video_grid_thw"),
        torch.ones_like(ids[None]),
        features.use_audio_in_video,
        arrays.get("audio_lengths"),
        arrays.get("video_second_per_grid"),
    )
    # As in the library from the last position: a video that outlasts its sound has larger ones before it.
    later = found[0, 0, -1] + 1 + torch.arange(length - len(ids))
    joined: list[list[int]] = torch.cat([found[:, 0], later.expand(3, -1)], 1).long().tolist()
    return joined


def find_runs(ids: np.ndarray[Any, Any], tokens: dict[str, int]) -> list[Run]:
    """Stretches of placeholders of `ids` int64 [length], in order; `tokens` by modality."""
    held = np.isin(ids, list(tokens.values()))
    edges = np.flatnonzero(np.diff(held.astype(np.int8), prepend=0, append=0)).tolist()
    runs = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        here = set(ids[start:end].tolist())
        runs.append(Run(start, end, tuple(name for name, token in tokens.items() if token in here)))
    return runs


def _inputs(arrays: dict[str, Tensor], features: Features) -> dict[str, Tensor]:
    """The arrays under the names and in the shapes that vLLM's encoders take."""
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    inputs = {name: arrays[name] for name in names if name in arrays}
    if "pixel_values_videos" in inputs:
        inputs["use_audio_in_video"] = torch.tensor(features.use_audio_in_video)
        if "video_second_per_grid" in arrays:
            inputs["second_per_grid_ts"] = arrays["video_second_per_grid"]
    if "input_features" in arrays:
        # [items, bands, frames] padded to the longest becomes [bands, frames of all items].
        mask = arrays["feature_attention_mask"]
        inputs["input_audio_features"] = arrays["input_features"].permute(0, 2, 1)[mask.bool()].T.contiguous()
        inputs["audio_feature_lengths"] = arrays["audio_lengths"]
        inputs["feature_attention_mask"] = mask
    return inputs
