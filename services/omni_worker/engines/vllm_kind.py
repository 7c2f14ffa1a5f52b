"""What the model of a checkpoint is to the `vllm` engine: where answers end, where media stand, what a talker hears."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    GenerationConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from omni_worker.models.qwen2_5_omni_thinker import voices

#: By modality: the array of `Features` without which there is none of it.
NEEDED = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
GRIDS = ("image_grid_thw", "video_grid_thw", "video_second_per_grid", "audio_lengths")
#: `Hearing.layer`: what leaves the decoder behind its last norm.
LAST_NORM = -1


@dataclass(frozen=True, slots=True)
class Media:
    """How media stand in prompts of a family."""

    #: Ids that stand for a piece of each modality.
    tokens: dict[str, int]
    #: Patches a side of the square that becomes one position.
    merge: int
    #: transformers' thinker without weights: it knows the positions.
    module: Any
    #: Whether a placeholder of a modality that the prompt has none of is a word like others.
    only_present: bool


@dataclass(frozen=True, slots=True)
class Hearing:
    """What a talker hears of a thinker: embeddings, and hidden states of some positions in their place or added."""

    #: Number of the decoder layer whose output is heard, or LAST_NORM.
    layer: int
    #: Whether the states of all positions are added to their embeddings, or only media have states.
    everywhere: bool
    #: Ids whose embeddings a talker needs besides.
    specials: list[int]
    #: Names of arrays that it gets along with the prompt, for its positions.
    grids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A model of the `vllm` engine. Without `media` and `hearing`: text alone."""

    #: Names in vLLM's registry: the model, and what it is made of.
    architectures: list[str]
    end_ids: frozenset[int]
    #: Tokens that there are.
    vocabulary: int
    media: Media | None = None
    hearing: Hearing | None = None


def read_kind(checkpoint: Path, prepared: Path) -> Kind:
    """`checkpoint` is complete, as a hub has it; `prepared` is the folder that `omni prepare` made, if there is one."""
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    read = {"qwen3_omni_moe": _qwen3_omni, "qwen2_5_omni": _qwen2_5_omni}.get(config.model_type)
    return read(config, prepared) if read else _text(config, checkpoint)


def _text(config: Any, checkpoint: Path) -> Kind:
    if (checkpoint / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(checkpoint, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    return Kind(list(config.architectures), _ids(generation.eos_token_id), config.get_text_config().vocab_size)


def _qwen3_omni(config: Any, prepared: Path) -> Kind:
    thinker = config.thinker_config
    accepted = config.talker_config.accept_hidden_layer
    layer = accepted - 1 if accepted < thinker.text_config.num_hidden_layers else LAST_NORM
    specials = [config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]
    return Kind(
        architectures=list(config.architectures),
        end_ids=frozenset([config.im_end_token_id]),
        vocabulary=thinker.text_config.vocab_size,
        media=_media(Qwen3OmniMoeThinkerForConditionalGeneration, thinker, only_present=False),
        hearing=Hearing(layer, False, specials, GRIDS),
    )


def _qwen2_5_omni(config: Any, prepared: Path) -> Kind:
    thinker, talker = config.thinker_config, config.talker_config
    specials = [talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
    if (prepared / "speakers.json").exists():
        specials += voices(prepared).values()
    return Kind(
        architectures=[*config.architectures, "Qwen2ForCausalLM"],
        # As in the library, where the thinker has no generation config of its own.
        end_ids=_ids(GenerationConfig.from_model_config(thinker).eos_token_id),
        vocabulary=thinker.text_config.vocab_size,
        media=_media(Qwen2_5OmniThinkerForConditionalGeneration, thinker, only_present=True),
        hearing=Hearing(LAST_NORM, True, specials, (*GRIDS, "use_audio_in_video")),
    )


def _media(build: Callable[[Any], Any], thinker: Any, *, only_present: bool) -> Media:
    tokens = {name: getattr(thinker, f"{name}_token_id") for name in ("audio", "image", "video")}
    with torch.device("meta"):
        module = build(thinker)
    return Media(tokens, thinker.vision_config.spatial_merge_size, module, only_present)


def _ids(ends: int | list[int] | None) -> frozenset[int]:
    return frozenset([ends] if isinstance(ends, int) else ends or ())
