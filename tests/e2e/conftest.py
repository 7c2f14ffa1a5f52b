"""One `omni serve` with the embedded models for all end-to-end tests; it must stop clean when they are over."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from e2e.clients.api import Api
from e2e.clients.instance import Instance, serving


@pytest.fixture(scope="package")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with serving(tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture
async def api(instance: Instance) -> AsyncIterator[Api]:
    async with aiohttp.ClientSession() as session:
        yield Api(session, instance.url)


@pytest.fixture(scope="package")
def spoken_question(instance: Instance, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The question about France, as a file that `omni say` made."""
    file = tmp_path_factory.mktemp("say") / "question.wav"
    instance.omni("say", "What is the capital of France?", "--out", str(file))
    return file
