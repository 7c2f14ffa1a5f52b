"""The engines of omni models without processes: on fakes with exact arithmetic, and on tiny random checkpoints."""

import sys
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

from unit.worker.omni import fake_decoder  # noqa: E402
from unit.worker.omni.driving import Driver, context  # noqa: E402

ROOT = Path(__file__).parents[4]

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the stages have it; and what an engine sets for its thread is undone."""
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


@pytest.fixture(scope="module")
def make_driver() -> Iterator[Any]:
    """Makes `Driver`s of an autoregressive engine with the fake decoder."""
    from omni_worker.engines.autoregressive import Autoregressive

    def make(*, slots: int = 3, **options: Any) -> Driver:
        engine = Autoregressive()
        options = {"part": fake_decoder.PART, "context": 64, "prefill": 8} | options
        engine.load(context(slots, **options))
        return Driver(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, f"omni_worker.models.{fake_decoder.PART}", fake_decoder.module())
        yield make


@pytest.fixture
def drive(make_driver: Any) -> Iterator[Any]:
    """As `make_driver`; what was made ends with the test, and must have left nothing."""
    made: list[Driver] = []

    def make(**options: Any) -> Driver:
        made.append(make_driver(**options))
        return made[-1]

    yield make
    for driver in made:
        driver.assert_nothing_left()
        driver.engine.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `qwen3_omni_tiny`, split, and `whole/`, as a hub would have it."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from make_tiny_models import make  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    from omni_worker.split import split

    folder = tmp_path_factory.mktemp("tiny")
    made = make("qwen3_omni", folder / "whole")
    split(made, folder / made.name)
    return folder
