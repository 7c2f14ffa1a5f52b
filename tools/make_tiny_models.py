"""Random checkpoints of the omni families, a few MB each, with a real tokenizer and processor: for tests and newcomers.

`python tools/make_tiny_models.py FOLDER [FAMILY]` writes FOLDER/<family>_tiny, of one or of all, deterministic from a
seed. What they say means nothing; that they are loaded, split, batched and streamed right can be checked with them.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omni_worker.torchvision_shim import declare_ops

declare_ops()

import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeProcessor,
    WhisperFeatureExtractor,
)

Settings = dict[str, Any]

#: Of the thinker; the tokenizer has a few less.
VOCABULARY = 352
MERGED = 256 + 64
TEXT = (
    "Hello, how are you today? The quick brown fox jumps over the lazy dog. Tell me a story about the sea and the sky.",
    "What is in this image? Describe the sound that you hear. You are a helpful assistant. What happens in the video?",
)
ROLES = ("system", "user", "assistant")
#: Around what is not for reading; the model's own words, not specials. At the end, so that all else has its old ids.
FORMATS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: By family: what stands for audio, image, video and around them, and the marks of the talker.
NAMES = {
    "qwen3_omni": {
        "audio_token": "<|audio_pad|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
    "qwen2_5_omni": {
        "audio_token": "<|AUDIO|>",
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
    },
}
MARKS = {
    "qwen3_omni": ("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    "qwen2_5_omni": ("<tts_pad>", "<tts_bos>", "<tts_eos>"),
}
#: Qwen3-Omni without a talker, which thinks before it answers.
THINKING = "qwen3_omni_thinking"
NAMES[THINKING], MARKS[THINKING] = NAMES["qwen3_omni"], MARKS["qwen3_omni"]
#: Standard deviations of matrices, by a part of their names; `OTHERS` of all else. Chosen so that answers are not one
#: token over and over, hang on all of the prompt, and that sound neither clips nor ignores codes, voice or noise.
DECODERS = {"thinker.model.": 0.3, "thinker.lm_head": 0.3, "talker.": 0.3}
DEVIATIONS = {
    "qwen3_omni": DECODERS | {"audio_tower.conv2d": 0.4, "audio_tower.conv_out": 0.2},
    "qwen2_5_omni": DECODERS
    | {"audio_tower.conv": 0.5, "audio_tower.": 0.2, "thinker.visual.": 0.15}
    # Vocoders grow with the square of their input: wider, they leave what floats resolve, and clip.
    | {"code2wav_bigvgan": 0.12, "codec_embed": 1.0},
}
OTHERS = 0.08
#: Of the norms of queries and keys: at 1 attention is nearly even, and the answer hangs on the last token alone.
QUERY_KEY_SCALE = 2.0
SPEAKERS = {"qwen3_omni": ("ethan", "chelsie", "aiden"), "qwen2_5_omni": ("Chelsie", "Ethan")}


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, in which every role and every special is one token."""
    names = NAMES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=MERGED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    specials = (*CONTROL, *names.values(), *MARKS[family])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    if family != "qwen2_5_omni":
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in FORMATS])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32768,
        extra_special_tokens=names,
    )
    made.padding_side = "left"
    made.chat_template = make_template(family)
    return made


def make_template(family: str) -> str:
    """A turn a message, as the families have it; `content` is a string or a list of parts.

    Those of Qwen3-Omni have tools and calls too, and the one that thinks begins with it unless it is told not to.
    """
    names = NAMES[family]
    image = names["vision_bos_token"] + names["image_token"] + names["vision_eos_token"]
    video = names["vision_bos_token"] + names["video_token"] + names["vision_eos_token"]
    audio = names["audio_bos_token"] + names["audio_token"] + names["audio_eos_token"]
    plain = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}"
        f"{{% elif part['type'] == 'image' %}}{image}{{% elif part['type'] == 'video' %}}{video}"
        f"{{% elif part['type'] == 'audio' %}}{audio}{{% endif %}}{{% endfor %}}{{% endif %}}"
    )
    tools = calls = thought = opened = ""
    if family != "qwen2_5_omni":
        tools = (
            "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}"
            "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
        )
        calls = (
            "{% for call in message['tool_calls'] or [] %}{{ '\n<tool_call>\n{\"name\": \"' }}"
            "{{ call['function']['name'] }}{{ '\", \"arguments\": ' }}{{ call['function']['arguments'] | tojson }}"
            "{{ '}\n</tool_call>' }}{% endfor %}"
        )
    if family == THINKING:
        thought = (
            "{% if message['reasoning_content'] %}{{ '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}"
            "{% endif %}"
        )
        opened = "{{ '<think>\n' }}{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}"
    return (
        f"{tools}{{% for message in messages %}}{{{{ '<|im_start|>' + message['role'] + '\n' }}}}"
        f"{thought}{plain}{calls}{{{{ '<|im_end|>\n' }}}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        f"{opened}{{% endif %}}"
    )


def save_processor(family: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    patch, kind = (14, Qwen2_5OmniProcessor) if family == "qwen2_5_omni" else (16, Qwen3OmniMoeProcessor)
    processor = kind(
        image_processor=Qwen2VLImageProcessor(patch_size=patch, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 64),
        video_processor=Qwen2VLVideoProcessor(patch_size=patch, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 64),
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(folder)


def qwen3_omni(folder: Path, seed: int, family: str = "qwen3_omni") -> None:
    """Thinker and talker are mixtures of four experts; four code groups. The one that thinks has a thinker only."""
    tokenizer = make_tokenizer(family)
    token: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
    names = NAMES["qwen3_omni"]
    hidden, codebook, groups = 64, 64, 4
    rope: Settings = {"rope_type": "default", "rope_theta": 1e6}
    mrope: Settings = rope | {"mrope_section": [6, 5, 5], "interleaved": True, "mrope_interleaved": True}
    decoder: Settings = {"hidden_size": hidden, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    experts: Settings = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    text: Settings = decoder | experts | {"vocab_size": VOCABULARY, "intermediate_size": 128, "num_hidden_layers": 3}
    text |= {"max_position_embeddings": 4096, "rope_parameters": mrope, "norm_topk_prob": True}
    text |= {"eos_token_id": token("<|im_end|>"), "pad_token_id": token("<|endoftext|>"), "tie_word_embeddings": False}
    audio: Settings = {"num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    audio |= {"d_model": 64, "n_window": 50, "n_window_infer": 800, "output_dim": hidden, "conv_chunksize": 500}
    audio |= {"downsample_hidden_size": 16}
    vision: Settings = {"depth": 3, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 16}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden, "image_size": 128}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "apply_vit_abs_pos_embed": True}
    ids: Settings = {f"{kind}_token_id": token(names[f"{kind}_token"]) for kind in ("audio", "image", "video")}
    ids |= {f"audio_{end}_token_id": token(f"<|audio_{end}|>") for end in ("start", "end")}
    ids |= {f"vision_{end}_token_id": token(f"<|vision_{end}|>") for end in ("start", "end")}
    # The library forbids the last 1024 ids of a talker's vocabulary, the specials, but for the end.
    specials = ("pad", "bos", "eos", "nothink", "think_bos", "think_eos")
    marks: Settings = {f"codec_{name}_id": codebook + at for at, name in enumerate(specials) if name != "eos"}
    predictor: Settings = decoder | {"vocab_size": codebook, "intermediate_size": 96, "num_hidden_layers": 2}
    predictor |= {"num_code_groups": groups, "rope_parameters": rope, "max_position_embeddings": 512}
    talking: Settings = (
        decoder | experts | {"vocab_size": 1024 + codebook, "intermediate_size": 96, "num_hidden_layers": 2}
    )
    talking |= {"shared_expert_intermediate_size": 32, "rope_parameters": mrope, "max_position_embeddings": 4096}
    wave: Settings = {"codebook_size": codebook, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    wave |= {"sliding_window": 72, "intermediate_size": 96, "num_hidden_layers": 2, "num_quantizers": groups}
    wave |= {"rope_parameters": rope | {"rope_theta": 1e4}, "upsample_rates": [8, 5, 4, 3], "decoder_dim": 64}
    wave |= {"upsampling_ratios": [2, 2], "max_position_embeddings": 8000}
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": text,
            "audio_config": audio,
            "vision_config": vision,
            "user_token_id": token("user"),
            **ids,
        },
        talker_config={
            "code_predictor_config": predictor,
            "text_config": talking,
            "num_code_groups": groups,
            "thinker_hidden_size": hidden,
            "accept_hidden_layer": 2,
            "codec_eos_token_id": codebook + 2,
            "speaker_id": {name: codebook + 20 + at for at, name in enumerate(SPEAKERS["qwen3_omni"])},
            "spatial_merge_size": 2,
            **marks,
            **ids,
        },
        code2wav_config=wave,
        enable_audio_output=family == "qwen3_omni",
        im_start_token_id=token("<|im_start|>"),
        im_end_token_id=token("<|im_end|>"),
        tts_pad_token_id=token("<tts_pad>"),
        tts_bos_token_id=token("<tts_text_bos>"),
        tts_eos_token_id=token("<tts_text_eod>"),
        **{f"{role}_token_id": token(role) for role in ROLES},
    )
    torch.manual_seed(seed)
    model = Qwen3OmniMoeForConditionalGeneration(config).eval()
    fill(model, DEVIATIONS["qwen3_omni"])
    model.save_pretrained(folder)
    save_processor(family, tokenizer, folder)


def qwen2_5_omni(folder: Path, seed: int) -> None:
    """Dense decoders, one code a frame, and a vocoder of diffusion."""
    tokenizer = make_tokenizer("qwen2_5_omni")
    token: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
    names = NAMES["qwen2_5_omni"]
    hidden, codes = 64, 64 + 8
    rope: Settings = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    decoder: Settings = {
        "hidden_size": hidden,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    decoder |= {"max_position_embeddings": 4096, "rope_parameters": rope}
    ids: Settings = {f"{kind}_token_index": token(names[f"{kind}_token"]) for kind in ("audio", "image", "video")}
    ids |= {"audio_start_token_id": token("<|audio_bos|>"), "audio_end_token_id": token("<|audio_eos|>")}
    ids |= {"vision_start_token_id": token("<|vision_bos|>"), "vision_end_token_id": token("<|vision_eos|>")}
    ends: Settings = {"bos_token_id": None, "eos_token_id": token("<|im_end|>"), "pad_token_id": token("<|endoftext|>")}
    text: Settings = decoder | ends | {"vocab_size": VOCABULARY, "intermediate_size": 128, "tie_word_embeddings": False}
    audio: Settings = {"num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    audio |= {"d_model": 32, "n_window": 100, "output_dim": hidden}
    vision: Settings = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": hidden}
    vision |= {"fullatt_block_indexes": [1]}
    thinker: Settings = {
        "text_config": text,
        "audio_config": audio,
        "vision_config": vision,
        "user_token_id": token("user"),
    }
    talker: Settings = decoder | {
        "vocab_size": codes,
        "embedding_size": hidden,
        "intermediate_size": 96,
        "head_dim": 32,
    }
    talker |= {"tts_text_start_token_id": token("<tts_bos>"), "tts_text_end_token_id": token("<tts_eos>")}
    talker |= {"tts_text_pad_token_id": token("<tts_pad>"), "tts_codec_pad_token_id": 64}
    talker |= {"tts_codec_start_token_id": 65, "tts_codec_end_token_id": 66, "tts_codec_mask_token_id": 68}
    dit: Settings = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 32, "ff_mult": 2}
    dit |= {"emb_dim": 32, "block_size": 24, "look_ahead_layers": [1], "look_backward_layers": [0, 2], "repeats": 2}
    dit |= {"num_embeds": codes, "mel_dim": 80, "enc_emb_dim": 24, "enc_dim": 16, "enc_channels": [32] * 4 + [96]}
    dit |= {"enc_kernel_sizes": [5, 3, 3, 3, 1], "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 16}
    dit |= {"enc_res2net_scale": 2, "enc_se_channels": 16}
    vocoder: Settings = {"mel_dim": 80, "upsample_initial_channel": 64, "resblock_kernel_sizes": [3]}
    vocoder |= {"resblock_dilation_sizes": [[1, 3, 5]], "upsample_rates": [5, 3, 2, 2, 2, 2]}
    vocoder |= {"upsample_kernel_sizes": [11, 7, 4, 4, 4, 4]}
    config = Qwen2_5OmniConfig(
        thinker_config=thinker | ids | ends,
        talker_config=talker | ids,
        token2wav_config={"dit_config": dit, "bigvgan_config": vocoder},
        enable_audio_output=True,
    )
    torch.manual_seed(seed)
    model = Qwen2_5OmniForConditionalGeneration(config).eval()
    fill(model, DEVIATIONS["qwen2_5_omni"])
    with torch.no_grad():
        # Two of so few codes end the speech: at their full size most of it would be over within a chunk.
        model.talker.codec_head.weight[[64, 66]] *= 0.9
    model.save_pretrained(folder)
    save_processor("qwen2_5_omni", tokenizer, folder)
    chance = torch.Generator().manual_seed(seed)
    speakers = {
        name: {
            "bos_token": token("<tts_bos>"),
            "cond": torch.randn(1, 24, generator=chance),
            "ref_mel": torch.randn(1, 30, 80, generator=chance),
        }
        for name in SPEAKERS["qwen2_5_omni"]
    }
    torch.save(speakers, folder / "spk_dict.pt")


def fill(model: torch.nn.Module, deviations: Mapping[str, float]) -> None:
    """Weights from normal distributions; vectors differ from their neutral 0 and 1, so that one left out is noticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, next((wide for part, wide in deviations.items() if part in name), OTHERS))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if name.endswith("audio_tower.conv1.weight"):
                # The spectrum's level, which all sounds share, would drown what differs.
                parameter.sub_(parameter.mean((1, 2), keepdim=True))
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(QUERY_KEY_SCALE)


MAKERS: dict[str, Callable[[Path, int], None]] = {
    "qwen3_omni": qwen3_omni,
    "qwen2_5_omni": qwen2_5_omni,
    THINKING: partial(qwen3_omni, family=THINKING),
}


def make(family: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint of `family` to `folder`/<family>_tiny and return that."""
    made = folder / f"{family}_tiny"
    made.mkdir(parents=True, exist_ok=True)
    MAKERS[family](made, seed)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("family", nargs="?", choices=[*MAKERS, "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Its remarks on configurations are on those of the families as they are.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for family in MAKERS if arguments.family == "all" else [arguments.family]:
        print(make(family, arguments.folder, arguments.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
