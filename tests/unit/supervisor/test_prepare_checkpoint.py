"""`omni prepare FOLDER` as it is used: the real split, in its own process, of tiny checkpoints, sound and spoiled."""

import json
import runpy
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from omni_worker.torchvision_shim import declare_ops

declare_ops()

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from omni_supervisor.cli import main  # noqa: E402

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_models.py"
FAMILIES = {"qwen3_omni": {"aiden", "chelsie", "ethan"}, "qwen2_5_omni": {"Chelsie", "Ethan"}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, threads = tmp_path_factory.mktemp("tiny"), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # The compiler's folder, made when a model is; nothing is compiled.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        make = runpy.run_path(str(TOOL))["make"]
        for family in FAMILIES:
            make(family, folder)
        yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNI_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "models"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_prepared_once_and_readable_for_others(
    family: str, checkpoints: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoints / f"{family}_tiny"
    assert main(["prepare", str(source), "--name", "mine"]) == 0
    assert "mine: ready" in capsys.readouterr().out
    assert main(["prepare", str(source), "--name", "mine"]) == 0
    assert capsys.readouterr().out == "mine: already there\n"
    manifest = json.loads((models / "mine" / "manifest.json").read_text())
    assert (manifest["family"], set(manifest["speakers"])) == (family, FAMILIES[family])
    kept = sum(t.numel() for file in (models / "mine").glob("*/*.safetensors") for t in load_file(file).values())
    assert kept == sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    for path in (models / "mine").rglob("*"):
        assert path.stat().st_mode & (stat.S_IROTH | stat.S_IRGRP) == stat.S_IROTH | stat.S_IRGRP, path
    assert {path.name for path in models.iterdir()} == {".lock", "mine"}


def without_a_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["talker.codec_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


def without_voices(folder: Path) -> None:
    (folder / "spk_dict.pt").unlink()


def voices_of_code(folder: Path) -> None:
    """A pickle that would call something."""
    torch.save({"Ethan": print}, folder / "spk_dict.pt")


def half_a_voice(folder: Path) -> None:
    torch.save({"Ethan": {"bos_token": 1, "cond": torch.zeros(1, 24)}}, folder / "spk_dict.pt")


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_a_weight, "1 missing keys, first talker.codec_head.weight"),
        (cut_short, "SafetensorError"),
        (without_voices, "spk_dict.pt cannot be read as voices"),
        (voices_of_code, "spk_dict.pt cannot be read as voices"),
        (half_a_voice, "cannot be read as voices: 'ref_mel'"),
        (pickled, "no weights as safetensors"),
    ],
)
def test_a_spoiled_checkpoint_is_refused_and_nothing_is_left(
    spoil: Callable[[Path], None],
    said: str,
    checkpoints: Path,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = Path(shutil.copytree(checkpoints / "qwen2_5_omni_tiny", tmp_path / "spoiled"))
    spoil(source)
    assert main(["prepare", str(source)]) == 1
    assert said in capsys.readouterr().err
    assert {path.name for path in models.glob("*")} <= {".lock"}
