"""The running server against the library: the same token ids, the same sound, alone, together, and over deaths.

Five processes and the bus between them; chunks stream as they do for any client. Of float32 on one thread the decoders'
ids are equal; sound is decoded in chunks, so it is equal to 1e-5.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_common.frames import Text
from omni_gateway.stream import Ask, Event
from parity.conftest import FAMILIES
from parity.library import ASKED, FRAMES, SEED, TOKENS, Library, Said, joined
from support.rig import Rig, running, until

pytestmark = pytest.mark.slow

STAGES = ("preprocessor", "thinker", "talker", "code2wav")
TOLERANCE = 1e-5
#: Of a stage: which figure says that it is in the middle of the answer.
VICTIMS = ("preprocessor", "thinker", "talker", "code2wav")


@contextlib.asynccontextmanager
async def served(family: str, *overrides: str) -> AsyncIterator[Rig]:
    names = [f"stages.{stage}.model={family}_tiny" for stage in STAGES]
    async with running(family, *names, *overrides, platform="cpu") as rig:
        yield rig


def ask(rig: Rig, name: str, **talker: Any) -> Ask:
    params: dict[str, Any] = {
        "thinker": {"temperature": 0.0, "max_tokens": TOKENS},
        "talker": {"temperature": 0.0, "max_tokens": FRAMES, "repetition_penalty": 1.05, "voice": "ethan"} | talker,
    }
    if "voice" in rig.pipeline.stages["code2wav"].params:
        params["code2wav"] = {"voice": params["talker"]["voice"]}
    return Ask(rig.pipeline, "chat", ["text", "audio"], ASKED[name].given(), SEED, params)


def said(events: list[Event]) -> Said:
    ids = [token for event in events if isinstance(event.body, Text) for token in event.body.ids]
    return Said(ids, joined([event.arrays["samples"] for event in events if "samples" in event.arrays]))


def assert_equal(found: Said, expected: Said, name: str) -> None:
    assert found.ids == expected.ids, name
    assert found.samples.shape == expected.samples.shape, name
    assert np.abs(found.samples - expected.samples).max(initial=0.0) <= TOLERANCE, name


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def expected(family: str, checkpoints: Path) -> dict[str, Said]:
    """What the library says. An answer in which its talker ends before it begins is an error there."""
    library = Library(family, checkpoints / f"{family}_tiny")
    found = {}
    for name, asked in ASKED.items():
        with contextlib.suppress(RuntimeError, IndexError):
            found[name] = library.say(asked)
    return found


async def test_alone_and_in_a_batch_of_eight(family: str, expected: dict[str, Said], models: Path) -> None:
    assert {"text", "image", "audio", "video"} <= expected.keys()
    # Random weights: a few fall silent at once.
    assert sum(len(answer.samples) > 10_000 for answer in expected.values()) >= 5
    async with served(family) as rig:
        for name, answer in expected.items():
            assert_equal(said(await rig.answer(ask(rig, name))), answer, name)
        eight = (list(expected) * 2)[:8]
        answers = await asyncio.gather(*(rig.answer(ask(rig, name)) for name in eight))
        for name, events in zip(eight, answers, strict=True):
            assert_equal(said(events), expected[name], f"{name} among eight")
        await rig.idle()


async def test_sound_that_is_not_streamed_is_the_librarys_bit_for_bit(
    family: str, expected: dict[str, Said], models: Path
) -> None:
    async with served(family, "stages.code2wav.options.stream=false") as rig:
        for name, answer in expected.items():
            assert np.array_equal(said(await rig.answer(ask(rig, name))).samples, answer.samples), name


async def test_a_stage_that_dies_in_mid_answer_is_not_noticed(
    family: str, expected: dict[str, Said], models: Path
) -> None:
    """Each stage in turn, by SIGKILL, with a second replica of it ready."""
    async with served(family) as rig:
        for victim in VICTIMS:
            rig.worker(victim, f"{victim}-2")
        await until(lambda: all(rig.ready(stage) == 2 for stage in VICTIMS))
        for victim in VICTIMS:
            for name, answer in expected.items():
                doomed = next(iter(rig.replicas(victim)))
                async with contextlib.aclosing(await rig.link.submit(ask(rig, name))) as stream:
                    events = []
                    async for event in stream:
                        events.append(event)
                        if len(events) == 3 and name == "text":
                            busy = [r for r in rig.replicas(victim) if r.running] or [doomed]
                            rig.kill(busy[0].name)
                assert_equal(said(events), answer, f"{name} with a dead {victim}")
                if name == "text":
                    await rig.wait(busy[0].name)
                    rig.worker(victim, busy[0].name)
                    await until(lambda victim=victim: rig.ready(victim) == 2)
        await rig.idle()
