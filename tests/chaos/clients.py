"""Streams that ask without end and compare every answer with what it must be."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from chaos.report import Report
from omni_common.errors import OmniError
from omni_common.params import Sampling
from omni_gateway.stream import Event
from omni_worker.engine import Job, LoadContext, Piece
from omni_worker.engines.fake import FakeEngine
from support.rig import Rig

#: Longest silence of a stream: beyond it the request is lost without a word.
SILENCE_S = 60.0


@dataclass(slots=True)
class Asked:
    """One request as its client sees it."""

    number: int
    tokens: int
    #: submitting, placed, running, over.
    state: str = "submitting"
    request_id: str = ""
    events: list[Event] = field(default_factory=list)
    #: When each event came, monotonic seconds.
    times: list[float] = field(default_factory=list)

    def ended(self, modality: str) -> bool:
        return any(event.last for event in self.events if event.modality == modality)


def expected_sound(rig: Rig, words: list[Event]) -> tuple[list[str], np.ndarray]:
    """What talker and wave make of these words, computed here in one go."""
    pieces = [Piece("thinker", event.start, event.end, event.last, event.body) for event in words]
    for stage in ("talker", "wave"):
        settings = rig.pipeline.stages[stage]
        options = {key: value for key, value in settings.options.items() if key not in ("notes", "step_s")}
        engine = FakeEngine()
        engine.load(LoadContext(settings.model, options, "", 1, 1, lambda what, share: None, lambda: None))
        engine.add(Job("r", 1, Sampling(), (stage,), ("client",)))
        made = []
        for piece in pieces:
            engine.push("r", Piece(stage, piece.start, piece.end, piece.last, piece.body, piece.arrays))
            made += engine.step(frozenset())
        pieces = [Piece(stage, out.start, out.end, out.last, out.body, out.arrays) for out in made]
    return [piece.body.text for piece in pieces], np.concatenate([piece.arrays["samples"] for piece in pieces])


def fault(rig: Rig, asked: Asked, entropy: bool) -> str:
    """What is wrong with a whole answer; empty: nothing."""
    words = [event for event in asked.events if event.modality == "text"]
    sound = [event for event in asked.events if event.modality == "audio"]
    for kind, events in (("text", words), ("audio", sound)):
        if [event.start for event in events] != [0, *(event.end for event in events[:-1])]:
            return f"{kind} has gaps or doubles: {[(event.start, event.end) for event in events]}"
        if [event.last for event in events] != [False] * (len(events) - 1) + [True]:
            return f"{kind} does not end where it ends"
    texts = [event.body.text.strip() for event in words]
    if [text.split(".")[0] for text in texts] != [f"w{number}" for number in range(asked.tokens)]:
        return f"other words: {texts}"
    if not entropy and texts != [f"w{number}" for number in range(asked.tokens)]:
        return f"words differ from the undisturbed run's: {texts}"
    said, samples = expected_sound(rig, words)
    heard = [event.body.text for event in sound]
    if heard != said:
        differing = [(a, b) for a, b in zip(said, heard, strict=False) if a != b]
        return f"what is heard contradicts what is read: {differing[:3]}"
    if not np.array_equal(np.concatenate([event.arrays["samples"] for event in sound]), samples):
        return "other samples"
    return ""


class Clients:
    """`count` streams; every second one reads slowly."""

    def __init__(self, rig: Rig, report: Report, count: int = 8, tokens: int = 40, entropy: bool = True) -> None:
        self.rig, self.report, self.tokens, self.entropy = rig, report, tokens, entropy
        self.live: dict[int, Asked] = {}
        self.finished: deque[Asked] = deque(maxlen=64)
        self._numbers = iter(range(10**9))
        self._stopping = False
        self._tasks = [asyncio.create_task(self._run(slow=number % 2 == 1)) for number in range(count)]

    async def stop(self) -> None:
        """Let every stream end its request."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _run(self, slow: bool) -> None:
        while not self._stopping:
            asked = Asked(next(self._numbers), self.tokens)
            self.live[asked.number] = asked
            try:
                await self._one(asked, slow)
                problem = fault(self.rig, asked, self.entropy)
            except OmniError as error:
                if error.code == "stage_missing" and asked.state == "submitting":
                    # Every replica of a stage is dead: an honest refusal before anything was begun.
                    self.report.refused += 1
                    asked.state = "over"
                    del self.live[asked.number]
                    continue
                problem = f"{error.code}: {error.message}"
            except TimeoutError:
                problem = f"silent for {SILENCE_S:.0f} s after {len(asked.events)} events ({asked.state})"
            asked.state = "over"
            del self.live[asked.number]
            self.finished.append(asked)
            self.report.requests += 1
            if problem:
                self.report.lost.append(f"request {asked.number} {asked.request_id}: {problem}")

    async def _one(self, asked: Asked, slow: bool) -> None:
        params = {"thinker": {"max_tokens": asked.tokens}}
        async with asyncio.timeout(SILENCE_S) as silence:
            stream = await self.rig.link.submit(self.rig.ask(f"ask {asked.number}", ("text", "audio"), params))
            asked.state, asked.request_id = "placed", stream.request_id
            try:
                async for event in stream:
                    asked.state = "running"
                    asked.events.append(event)
                    asked.times.append(time.monotonic())
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
                    if slow:
                        await asyncio.sleep(0.01)
            finally:
                await stream.aclose()
