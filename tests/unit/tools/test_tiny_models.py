"""The tiny checkpoints, on which the tests of the omni families rest: the same every time, and not degenerate."""

import hashlib
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from omni_worker.torchvision_shim import declare_ops

declare_ops()

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoProcessor  # noqa: E402

from parity.library import ASKED, CLASSES, TOKENS, Library  # noqa: E402

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_models.py"
#: What vLLM's attention takes.
HEAD_SIZES = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tool() -> Iterator[dict[str, Any]]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield runpy.run_path(str(TOOL))


@pytest.fixture(scope="module")
def checkpoints(tool: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        # The compiler's folder, made when a model is; nothing is compiled.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        for family in CLASSES:
            assert tool["make"](family, folder) == folder / f"{family}_tiny"
        yield folder


@pytest.fixture(params=CLASSES)
def family(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def folder(family: str, checkpoints: Path) -> Path:
    return checkpoints / f"{family}_tiny"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_command_makes_the_same_files_every_time(checkpoints: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    families = [*CLASSES, "qwen3_omni_thinking"]
    assert done.stdout.split() == [str(tmp_path / f"{family}_tiny") for family in families]
    for family in CLASSES:
        assert digests(tmp_path / f"{family}_tiny") == digests(checkpoints / f"{family}_tiny")


def test_another_seed_makes_other_weights(tool: dict[str, Any], checkpoints: Path, tmp_path: Path) -> None:
    made = digests(tool["make"]("qwen2_5_omni", tmp_path, 1))
    first = digests(checkpoints / "qwen2_5_omni_tiny")
    assert {name for name in made if made[name] != first[name]} == {"model.safetensors", "spk_dict.pt"}


def test_they_are_small_and_no_weight_has_a_neutral_value(folder: Path) -> None:
    """A weight of ones that nobody read could pass for one that was."""
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8_000_000
    weights = load_file(folder / "model.safetensors")
    assert [name for name, tensor in weights.items() if tensor.numel() > 1 and tensor.std() == 0] == []
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_the_librarys_own_loader_finds_every_weight(family: str, folder: Path) -> None:
    # Of the base class: a family's own does not hand the report on.
    load: Any = transformers.PreTrainedModel.from_pretrained
    _, report = load.__func__(getattr(transformers, CLASSES[family]), folder, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_shapes_are_such_as_vllm_takes(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["thinker_config"]["text_config"]
    assert text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) in HEAD_SIZES


# ----------------------------------------------------------------------------------------------------------- processor


def test_the_tokenizer_takes_any_text_and_has_its_marks_as_one_token(family: str, folder: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    for text in ("Hello world", "Größe 漢字 🙂\n\t", "\x00\x7f", "<|im_start|>user\nHi<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # Merges are in use: it is not one token a byte.
    assert len(tokenizer.encode("Tell me a story about the sea.")) < 20
    config = json.loads((folder / "config.json").read_text())
    thinker = config["thinker_config"]
    assert len(tokenizer) <= thinker["text_config"]["vocab_size"]
    for mark in ("system", "user", "assistant", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer.encode(mark)) == 1, mark
    assert tokenizer.encode("user") == [thinker["user_token_id"]]
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    suffix = "token_id" if family == "qwen3_omni" else "token_index"
    for kind in ("audio", "image", "video"):
        assert tokenizer.encode(getattr(tokenizer, f"{kind}_token")) == [thinker[f"{kind}_{suffix}"]]


def test_the_template_renders_every_role_and_part(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    parts = [{"type": "image"}, {"type": "text", "text": "Hi"}, {"type": "audio"}, {"type": "video"}]
    conversation = [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    ]
    rendered = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    tokenizer = processor.tokenizer
    image, audio, video = tokenizer.image_token, tokenizer.audio_token, tokenizer.video_token
    begin, end = tokenizer.vision_bos_token, tokenizer.vision_eos_token
    heard = f"{tokenizer.audio_bos_token}{audio}{tokenizer.audio_eos_token}"
    assert rendered == (
        "<|im_start|>system\nBe good.<|im_end|>\n"
        f"<|im_start|>user\n{begin}{image}{end}Hi{heard}{begin}{video}{end}<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>assistant\n"
    )


# -------------------------------------------------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def libraries(checkpoints: Path) -> dict[str, Library]:
    return {family: Library(family, checkpoints / f"{family}_tiny") for family in CLASSES}


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_no_token_over_and_over_and_is_heard(
    family: str, name: str, libraries: dict[str, Library]
) -> None:
    library = libraries[family]
    answer = library.say(ASKED[name])
    assert len(set(answer.ids)) >= 6
    assert len(answer.ids) == TOKENS or answer.ids[-1] == library.end
    assert len(answer.samples) > 1000 and answer.samples.std() > 0.02
    # Not clipped: a wave of which only the signs are left says nothing about how exact it is.
    assert np.abs(answer.samples).max() < 0.99


def test_an_answer_hangs_on_the_prompt_from_its_first_token(family: str, libraries: dict[str, Library]) -> None:
    answers = [tuple(libraries[family].say(asked).ids) for asked in ASKED.values()]
    assert len(set(answers)) == len(answers)
    assert len({answer[0] for answer in answers}) >= len(answers) // 2


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_an_answer_hangs_on_what_is_in_the_media(family: str, kind: str, libraries: dict[str, Library]) -> None:
    """Else a stage that mixes up two of a kind would go unnoticed."""
    asked = ASKED[kind]
    media: dict[str, Any] = {
        name: [each[::-1].copy() for each in getattr(asked, name)] for name in ("audios", "images", "videos")
    }
    assert libraries[family].say(asked).ids != libraries[family].say(replace(asked, **media)).ids


def test_sound_hangs_on_the_voice_and_text_does_not(family: str, libraries: dict[str, Library]) -> None:
    ethan, chelsie = (libraries[family].say(ASKED["text"], voice) for voice in ("Ethan", "Chelsie"))
    assert ethan.ids == chelsie.ids
    common = min(len(ethan.samples), len(chelsie.samples))
    assert np.abs(ethan.samples[:common] - chelsie.samples[:common]).max() > 0.05
