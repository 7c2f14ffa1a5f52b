"""Deaths on the real embedded pipeline: whisper is left out, the words and the sound are the real models'."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from omni_common.frames import Message, Prompt, TextPart
from omni_gateway.stream import Ask, Event, Given
from support.rig import Rig, running, until

pytestmark = [pytest.mark.embedded, pytest.mark.slow]

STAGES = ("thinker", "talker", "code2wav")
QUESTIONS = (
    "Tell me a short story about a fox and a river.",
    "What is the capital of Japan, and what can one see there?",
    "Describe how bread is made.",
    "Why is the sky blue?",
)
#: Who dies together, in turn.
VICTIMS = (
    ("thinker",),
    ("talker",),
    ("code2wav",),
    ("talker", "code2wav"),
    ("thinker", "talker"),
    STAGES,
)


@dataclass(slots=True)
class Answer:
    events: list[Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(event.body.text for event in self.events if event.modality == "text" and event.body)

    @property
    def sound(self) -> np.ndarray:
        return np.concatenate([event.arrays["samples"] for event in self.events if "samples" in event.arrays])

    def check(self) -> None:
        """Nothing is missing or doubled, and every position is where the one before it ended."""
        for modality in ("text", "audio"):
            mine = [event for event in self.events if event.modality == modality]
            assert mine[0].start == 0 and mine[-1].last
            assert all(a.end == b.start for a, b in itertools.pairwise(mine))
        assert len(self.sound) == mine[-1].end
        assert " ".join(spoken(self.events).split()) == " ".join(self.text.split())


def spoken(events: list[Event]) -> str:
    """What the sound says."""
    return "".join(event.body.text for event in events if event.modality == "audio" and event.body)


def ask(rig: Rig, question: str) -> Ask:
    given = Given("text", Prompt([Message("user", [TextPart(question)])]), 0, 1, last=True)
    params = {"thinker": {"temperature": 0.0, "max_tokens": 96}}
    return Ask(rig.pipeline, "chat", ["text", "audio"], [given], 1, params)


async def answer(rig: Rig, question: str) -> Answer:
    return Answer(await rig.answer(ask(rig, question)))


async def read(rig: Rig, question: str, into: Answer) -> None:
    async with contextlib.aclosing(await rig.link.submit(ask(rig, question))) as stream:
        async for event in stream:
            into.events.append(event)


async def interrupted(rig: Rig, question: str, victims: tuple[str, ...], after: int) -> tuple[Answer, int]:
    """An answer in whose course, after so many events, the victims die; and how many deaths there were."""
    got, deaths = Answer(), 0
    async with contextlib.aclosing(await rig.link.submit(ask(rig, question))) as stream:
        async for event in stream:
            got.events.append(event)
            if len(got.events) == after:
                deaths = await kill(rig, victims)
    return got, deaths


async def kill(rig: Rig, victims: tuple[str, ...]) -> int:
    for name in victims:
        rig.kill(name)
    for name in victims:
        await rig.wait(name)
    for name in victims:
        rig.worker(name)
    return len(victims)


@pytest.fixture(scope="module")
def seeded() -> random.Random:
    return random.Random(3)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running("embedded", "limits.recover_s=60", stages=STAGES) as rig:
        yield rig


async def test_thirty_deaths_under_one_stream_change_no_sample(rig: Rig, seeded: random.Random) -> None:
    whole = {question: await answer(rig, question) for question in QUESTIONS[:2]}
    for undisturbed in whole.values():
        undisturbed.check()
    deaths = 0
    differing: list[str] = []
    for number in itertools.count():
        if deaths >= 30:
            break
        question, victims = QUESTIONS[number % 2], VICTIMS[number % len(VICTIMS)]
        expected = whole[question]
        got, died = await interrupted(rig, question, victims, seeded.randrange(1, len(expected.events) * 2 // 3))
        got.check()
        deaths += died
        if got.text != expected.text or not np.array_equal(got.sound, expected.sound):
            differing.append(f"{'+'.join(victims)} after {len(got.events)}: {got.text!r} for {expected.text!r}")
    print(f"{deaths} deaths in {number} answers, {len(differing)} differ")
    assert not differing, differing
    await rig.idle()


async def test_four_at_once_are_not_contradicted(rig: Rig, seeded: random.Random) -> None:
    """In a batch tokens may turn out otherwise than alone; what was sent stays."""
    whole = {question: (await answer(rig, question)).text for question in QUESTIONS}
    changed = 0
    for victims in VICTIMS:
        answers = [Answer() for _ in QUESTIONS]
        reading = [asyncio.create_task(read(rig, *pair)) for pair in zip(QUESTIONS, answers, strict=True)]
        await until(lambda answers=answers: all(answer.events for answer in answers), 60)
        await until(lambda answers=answers: any(spoken(answer.events) for answer in answers), 60)
        await kill(rig, victims)
        await asyncio.gather(*reading)
        for question, got in zip(QUESTIONS, answers, strict=True):
            got.check()
            changed += got.text != whole[question]
    print(f"{changed} of {len(VICTIMS) * len(QUESTIONS)} texts differ from those alone and undisturbed")
    assert rig.link.fleet.failed == 0
    await rig.idle()
