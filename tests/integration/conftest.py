"""Each test has its run folders to itself: what the command line finds there is what the test started."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where run folders are made. Short, because sockets lie in it."""
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "r"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)
