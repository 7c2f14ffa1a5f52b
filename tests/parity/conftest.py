"""Tests against transformers' own single-process `generate`, on tiny checkpoints that are made once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from omni_worker.torchvision_shim import declare_ops

declare_ops()

import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = Path(__file__).parents[2]
FAMILIES = ("qwen3_omni", "qwen2_5_omni")

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """As the stages have it: sums of floats depend on how many share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `<family>_tiny` for each family, as a hub would have them, and `models/`, split."""
    folder = tmp_path_factory.mktemp("checkpoints")
    _python(ROOT / "tools" / "make_tiny_models.py", folder)
    for family in FAMILIES:
        name = f"{family}_tiny"
        _python("-m", "omni_worker.split", folder / name, folder / "models" / name)
    return folder


@pytest.fixture
def models(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The split checkpoints, as the place where processes look for models."""
    monkeypatch.setenv("OMNI_MODELS", str(checkpoints / "models"))
    return checkpoints / "models"


def _python(*arguments: str | Path) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
