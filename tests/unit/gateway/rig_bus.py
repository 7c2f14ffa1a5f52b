"""A rig in place of the bus: it plays a script of events to each request and counts what became of them.

No stage computes here. Everything that a test wants to happen at a certain moment hangs on an `asyncio.Event` or on
`until`, never on time.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import msgspec
import numpy as np

from omni_common.errors import OmniError
from omni_common.frames import Audio, Body, Fleet, Replica, Segment, StageStatus, Text, Transcript
from omni_common.pipeline import Pipeline
from omni_gateway.stream import Arrays, Ask, Event

RATE = 24_000
#: Samples of sound for each word of an answer: 0.1 s.
WORD_SAMPLES = 2_400
ANSWER = ("The ", "capital ", "is ", "Paris", ".")
PROMPT_TOKENS = 7
Script = Callable[[Ask], Iterable[Event]]


def rig_pipelines() -> dict[str, Pipeline]:
    """The graphs of `embedded` and `speech`, with the engines' real parameters."""
    embedded = {
        "name": "embedded",
        "aliases": ["omnibus", "gpt-4o-audio-preview", "whisper-1"],
        "stages": {
            "listener": {"engine": "recogniser", "params": {"language": "en"}},
            "thinker": {
                "engine": "llamacpp",
                "inputs": ["listener"],
                "params": {"temperature": 0.0, "max_tokens": 96, "repetition_penalty": 1.1},
            },
            "talker": {"engine": "onnx", "inputs": ["thinker"], "params": {"voice": "heart", "speed": 1.0}},
            "code2wav": {"engine": "onnx", "inputs": ["talker"]},
        },
        "tasks": {
            "chat": {
                "input": {"text": "thinker", "audio": "listener"},
                "output": {"text": "thinker", "audio": "code2wav"},
            },
            "transcription": {"input": {"audio": "listener"}, "output": {"text": "listener"}},
        },
        "audio_rate": RATE,
        "voices": [{"id": "heart", "name": "Heart", "aliases": ["alloy", "ash", "verse"]}, {"id": "michael"}],
        "limits": {"text_chars": 1000, "speech_chars": 400, "audio_s": 5, "audio_mib": 1},
    }
    speech = {
        **embedded,
        "name": "speech",
        "aliases": ["tts-1", "gpt-4o-mini-tts"],
        "stages": {
            "talker": {"engine": "onnx", "params": {"voice": "heart", "speed": 1.0}},
            "code2wav": {"engine": "onnx", "inputs": ["talker"]},
        },
        "tasks": {"speech": {"input": {"text": "talker"}, "output": {"audio": "code2wav"}}},
    }
    return {spec["name"]: msgspec.convert(spec, Pipeline) for spec in (embedded, speech)}


def rig_fleet(missing: dict[str, str] | None = None) -> Fleet:
    """A fleet with one replica a stage, except for those in `missing` (stage -> reason)."""
    fleet = Fleet(scheduler="rig", queued=3, running=2, admitted=10, completed=6)
    for stage in ("listener", "thinker", "talker", "code2wav"):
        reason = (missing or {}).get(stage, "")
        fleet.stages.append(StageStatus(stage, ready=0 if reason else 1, waiting=4 if reason else 0, missing=reason))
        if not reason:
            replica = Replica(f"{stage}-0", f"inc-{stage}", stage, "ready", running=2, arena_used=64, arena_total=1024)
            replica.sent = {"inline": 5, "arena": 700}
            replica.step_s = 1.5
            fleet.replicas.append(replica)
    return fleet


def tone(samples: int = WORD_SAMPLES, hz: float = 440.0, start: int = 0) -> np.ndarray:
    """Float32 [samples] at RATE, continuous over pieces that follow each other from `start` on."""
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(start, start + samples) / RATE)).astype(np.float32)


def answer(words: Iterable[str] = ANSWER, *, finish: str = "stop", sound: bool = True) -> Script:
    """For `chat`: one text event and, if audio is asked for, one of tone (0.1 s) a word."""

    def script(ask: Ask) -> Iterator[Event]:
        written = heard = 0
        for word in words:
            yield event("text", Text(word, ids=[written]), written, written + 1)
            written += 1
            if sound and "audio" in ask.outputs:
                yield sound_event(heard, word)
                heard += WORD_SAMPLES
        yield event("text", Text(finish=finish, prompt_tokens=PROMPT_TOKENS), written, written, last=True)
        if "audio" in ask.outputs:
            yield event("audio", None, heard, heard, last=True)

    return script


def spoken_text(ask: Ask) -> Iterator[Event]:
    """For `speech`: 0.1 s of tone for each word of the text that was given."""
    heard = 0
    for given in ask.given:
        for word in given.body.text.split():
            yield sound_event(heard, word)
            heard += WORD_SAMPLES
    yield event("audio", None, heard, heard, last=True)


def transcript(segments: Iterable[Segment] = (Segment(0.0, 1.0, " Hello there.", [1, 2]),)) -> Script:
    """For `transcription`: one event a segment."""

    def script(ask: Ask) -> Iterator[Event]:
        end = ask.given[-1].end
        seconds = end / 16_000
        *early, final = segments
        for segment in early:
            at = min(end, int(segment.end_s * 16_000))
            yield event("text", Transcript(0, [segment], "en", seconds), 0, at)
        yield event("text", Transcript(0, [final], "en", seconds, end_of_audio=True), 0, end, last=True)

    return script


def by_task(ask: Ask) -> Iterable[Event]:
    return {"chat": answer(), "speech": spoken_text, "transcription": transcript()}[ask.task](ask)


def event(
    modality: str, body: Body | None, start: int, end: int, *, last: bool = False, arrays: Arrays | None = None
) -> Event:
    return Event(modality, body, arrays or {}, start, end, last)


def sound_event(start: int, text: str = "") -> Event:
    end = start + WORD_SAMPLES
    return event("audio", Audio(RATE, text=text), start, end, arrays={"samples": tone(start=start)})


class RigBus:
    """Implements `stream.Bus`. Fields may be set before a request; they hold for all that are submitted afterwards."""

    def __init__(self) -> None:
        self.pipelines = rig_pipelines()
        self.fleet: Fleet | None = rig_fleet()
        self.script: Script = by_task
        #: Raised by `submit`.
        self.refusal: OmniError | None = None
        #: `submit` waits for it, as a request in the queue does. `None`: at once.
        self.admit: asyncio.Event | None = None
        #: Before its event of this number (from 0) a stream waits for the `asyncio.Event`.
        self.gates: dict[int, asyncio.Event] = {}
        #: Event number -> what is raised in its place.
        self.failures: dict[int, Exception] = {}
        self.asks: list[Ask] = []
        #: Left while they waited in `submit`.
        self.left_queue = 0
        self.completed = 0
        self.failed = 0
        #: Closed before their end.
        self.cancelled = 0
        self.events_given = 0
        self.open: set[str] = set()
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()

    async def submit(self, ask: Ask) -> "RigStream":
        self.asks.append(ask)
        self.tell()
        if self.refusal is not None:
            raise self.refusal
        if self.admit is not None:
            try:
                await self.admit.wait()
            except asyncio.CancelledError:
                self.left_queue += 1
                self.tell()
                raise
        stream = RigStream(self, f"run{next(self._numbers)}", ask)
        self.open.add(stream.request_id)
        return stream

    def tell(self) -> None:
        self._news.set()

    async def until(self, condition: Callable[["RigBus"], bool], timeout_s: float = 5.0) -> None:
        """Return once `condition(self)` holds; it is looked at again whenever something happens on the bus."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._news.clear()
                await self._news.wait()


class RigStream:
    """Implements `stream.Stream`."""

    ready = False

    def __init__(self, bus: RigBus, request_id: str, ask: Ask) -> None:
        self.request_id = request_id
        self._bus = bus
        self._script = iter(bus.script(ask))
        self._gates = dict(bus.gates)
        self._failures = dict(bus.failures)

    async def __aiter__(self) -> AsyncIterator[Event]:
        for number in itertools.count():
            if number in self._gates:
                await self._gates[number].wait()
            if number in self._failures:
                self._bus.failed += 1
                self._end()
                raise self._failures[number]
            # So that an endless script leaves the loop to others.
            await asyncio.sleep(0)
            piece = next(self._script, None)
            if piece is None:
                break
            self._bus.events_given += 1
            self._bus.tell()
            yield piece
        self._bus.completed += 1
        self._end()

    async def aclose(self) -> None:
        if self.request_id in self._bus.open:
            self._bus.cancelled += 1
            self._end()

    def _end(self) -> None:
        self._bus.open.discard(self.request_id)
        self._bus.tell()
