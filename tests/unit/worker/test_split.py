"""The split of a tiny Qwen2.5-Omni, which has all that can be cut: three stages, a processor, voices with tensors."""

import json
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from omni_worker.torchvision_shim import declare_ops

declare_ops()

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from omni_common.checkpoint import look_at, read_manifest  # noqa: E402
from omni_common.errors import OmniError  # noqa: E402
from omni_worker import split as module  # noqa: E402
from omni_worker.split import main, split  # noqa: E402

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_models.py"
STAGES = {"thinker": "thinker", "talker": "talker", "code2wav": "token2wav"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, threads = tmp_path_factory.mktemp("tiny"), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # The compiler's folder, made when a model is; nothing is compiled.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield runpy.run_path(str(TOOL))["make"]("qwen2_5_omni", folder)
    torch.set_num_threads(threads)


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """One to be spoiled."""
    return Path(shutil.copytree(source, tmp_path / "copy"))


def test_every_stage_has_its_modules_weights(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 400_000)
    target = tmp_path / "models" / "made"
    split(source, target)
    whole: Any = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(source)
    manifest = read_manifest(target)
    assert manifest is not None
    for stage, attribute in STAGES.items():
        files = sorted((target / stage).iterdir())
        assert {file.name: file.stat().st_size for file in files} == manifest.stages[stage]
        weights: dict[str, torch.Tensor] = {}
        for file in files:
            weights |= load_file(file)
        expected = getattr(whole, attribute).state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert len(manifest.stages["thinker"]) > 1
    assert (manifest.family, manifest.dtype) == ("qwen2_5_omni", "float32")
    assert manifest.source == look_at(source)
    assert [path.name for path in target.parent.iterdir()] == ["made"]


def test_voices_and_processor_come_along(source: Path, tmp_path: Path) -> None:
    assert main_with(source, tmp_path / "made") == 0
    voices = torch.load(source / "spk_dict.pt", weights_only=True)
    tensors = load_file(tmp_path / "made" / "speakers.safetensors")
    assert tensors.keys() == {f"{name}.{part}" for name in voices for part in ("cond", "ref_mel")}
    assert torch.equal(tensors["Ethan.cond"], voices["Ethan"]["cond"])
    tokens = json.loads((tmp_path / "made" / "speakers.json").read_text())
    assert tokens["Chelsie"] == {"bos_token": voices["Chelsie"]["bos_token"]}
    names = {path.name for path in (tmp_path / "made" / "processor").iterdir()}
    assert {"config.json", "tokenizer.json", "processor_config.json"} <= names
    assert not any(name.endswith((".safetensors", ".pt")) for name in names)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_fit_are_told_and_nothing_is_left(
    copy: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.startswith("talker."))
    if fault == "missing":
        del weights[name]
    elif fault == "unexpected":
        weights["talker.nobody.weight"] = torch.zeros(2)
    else:
        weights[name] = torch.zeros(3, 5)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "models").mkdir()
    assert main_with(copy, tmp_path / "models" / "made") == 1
    assert "talker." in capsys.readouterr().err
    assert not list((tmp_path / "models").iterdir())


def test_pickled_weights_are_not_read(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model.bin")
    with pytest.raises(OmniError, match="no weights as safetensors"):
        split(copy, tmp_path / "made")


def main_with(source: Path, target: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["split", str(source), str(target)])
        return main()
