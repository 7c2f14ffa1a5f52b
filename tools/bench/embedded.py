"""`embedded`: the embedded pipeline over HTTP, against the same engines called in a row in one process.

All processes of a side on one core, and on all cores. The wall time of a spoken answer runs from the request to the end
of the stream; in a row it is the sum of the engines' times, without HTTP, media decoding or encoding.
"""

import asyncio
import base64
import contextlib
import io
import os
import re
import subprocess
import tempfile
import time
import wave
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from tools.bench.in_a_row import HEARD_RATE, OTHERS, Answer, Question
from tools.bench.processes import answers, command, end, free_port, until
from tools.bench.report import Effort, Goal, Result, about, ratios

from omni_common.errors import OmniError
from omni_gateway.media.decode import decode_audio

SHORT = "What is the capital of Japan?"
#: Answered with three sentences of three to six words, and with four of fifteen and more.
THREE = "Give me three tips for better sleep."
LONG = "Tell me about the sky."
MAX_TOKENS = 96
WALL = Goal("<=", 1.05)
FIRST_AUDIO = Goal("<=", 0.4)
#: By voice on one core, in seconds: embedded_models.md, "Checked afterwards".
HEARD_S, FIRST_TEXT_S, FIRST_AUDIO_S = Goal("<=", 0.2), Goal("<=", 0.4), Goal("<=", 0.6)
#: -40 dBFS in 16-bit samples.
AUDIBLE = 328
RATE = 24_000


@dataclass(slots=True)
class Spoken:
    """A spoken answer over HTTP; times in seconds from the request."""

    first_text_s: float = 0.0
    #: The first samples that can be heard.
    first_audio_s: float = 0.0
    total_s: float = 0.0
    text: str = ""
    samples: int = 0


@dataclass(slots=True)
class Case:
    """One way to ask, and what was measured, a value a round."""

    name: str
    question: Question
    #: What the client sends as the user's message.
    content: str | list[Mapping[str, Any]]
    served: list[Spoken] = field(default_factory=list)
    in_a_row: list[Answer] = field(default_factory=list)


async def measure(effort: Effort) -> Result:
    result = Result(about(__doc__))
    for where, cores in (("one core", "0"), ("all cores", "")):
        with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
            async with _row(cores) as row, _server(cores) as url, aiohttp.ClientSession(url) as session:
                with _elsewhere(cores):
                    await _compare(result, effort, where, Path(folder), row, session)
    result.notes = [
        f"short: {SHORT!r}; three short sentences: {THREE!r}; long: {LONG!r}; by voice: spoken by the speech stage",
        "first audio: the first samples above -40 dBFS have arrived; the answer is streamed as pcm16",
        "before each question four others pass through the thinker, so that its cache holds the chat template only",
        "both sides gave the same text and as many samples in every round",
        "one core: all processes of the side on core 0, the client elsewhere",
    ]
    return result


async def _compare(
    result: Result, effort: Effort, where: str, folder: Path, row: "RowProcess", session: aiohttp.ClientSession
) -> None:
    sound = await _question_sound(row, folder)
    cases = [
        Case("short, by text", Question(SHORT), SHORT),
        Case("three short sentences, by text", Question(THREE, max_tokens=effort.times(MAX_TOKENS)), THREE),
        Case("long, by text", Question(LONG, max_tokens=effort.times(MAX_TOKENS)), LONG),
        Case("short, by voice", Question(heard=str(folder / "heard.npy")), [_input_audio(sound)]),
    ]
    heard: list[float] = []
    for turn in range(1 + effort.rounds):
        for case in cases:
            await asyncio.gather(*(_ask(session, text, spoken=False, max_tokens=1) for text in OTHERS))
            served = await _ask(session, case.content, spoken=True, max_tokens=case.question.max_tokens)
            answer = await row.ask(case.question)
            if (served.text, served.samples) != (answer.text, answer.samples):
                raise OmniError(f"{case.name}: {served.text!r} over HTTP, in a row {answer.text!r}")
            # The first round warms up.
            if turn:
                case.served.append(served)
                case.in_a_row.append(answer)
        took = await _transcribe(session, sound)
        if turn:
            heard.append(took)
    _report(result, where, cases, heard)


def _report(result: Result, where: str, cases: list[Case], heard: list[float]) -> None:
    for case in cases:
        name = f"{where}: {case.name}"
        totals = [spoken.total_s for spoken in case.served]
        first_audio = [spoken.first_audio_s for spoken in case.served]
        by_voice = where == "one core" and bool(case.question.heard)
        result.add(f"{name}, wall time", "s", totals)
        result.add(f"{name}, wall time / in a row", "x", ratios(totals, [row.total_s for row in case.in_a_row]), WALL)
        if case.question.heard:
            result.add(f"{name}, recogniser alone", "s", [row.took_s["listener"] for row in case.in_a_row])
            result.add(f"{name}, transcription over HTTP", "s", heard, HEARD_S if by_voice else None)
        result.add(
            f"{name}, first text",
            "s",
            [spoken.first_text_s for spoken in case.served],
            FIRST_TEXT_S if by_voice else None,
        )
        result.add(f"{name}, first audio", "s", first_audio, FIRST_AUDIO_S if by_voice else None)
        # The numbers of a list are no sentences.
        sentences = len(re.findall(r"(?<!\d)[.!?](?:\s|$)", case.served[0].text))
        if case.question.text in (THREE, LONG):
            goal = FIRST_AUDIO if sentences >= 3 else None
            result.add(f"{name}, first audio / total", "x", ratios(first_audio, totals), goal)


# ------------------------------------------------------------------------------------------------------------ the sides


@dataclass(slots=True)
class RowProcess:
    process: asyncio.subprocess.Process

    async def ask(self, question: Question) -> Answer:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(question) + b"\n")
        return msgspec.json.decode(await self._line(), type=Answer)

    async def ready(self) -> None:
        await self._line()

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise OmniError("the engines in a row have ended")
        return line


@contextlib.asynccontextmanager
async def _row(cores: str) -> AsyncIterator[RowProcess]:
    process = await asyncio.create_subprocess_exec(
        *command("tools.bench.in_a_row", ["embedded"], cores), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        row = RowProcess(process)
        await row.ready()
        yield row
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def _popen(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL)


@contextlib.asynccontextmanager
async def _server(cores: str) -> AsyncIterator[str]:
    """`omni serve` of the embedded pipeline; its base URL once it is ready."""
    port = free_port()
    flags = ["serve", "--pipeline", "embedded", "--port", str(port), "--log-level", "warning"]
    process = _popen(command("omni_supervisor.cli", flags, cores))
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        if process.poll() is not None:
            raise OmniError(f"omni serve ended with status {process.returncode}")
        return answers(f"{url}/health/ready")

    try:
        await until(ready, "omni serve is not ready")
        yield url
    finally:
        await asyncio.to_thread(end, [process])


@contextlib.contextmanager
def _elsewhere(cores: str) -> Iterator[None]:
    """This process, the client, keeps off the core that both sides are measured on, where there is another."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mine - {int(core) for core in cores.split(",") if core} or mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


# ----------------------------------------------------------------------------------------------------------- the client


async def _question_sound(row: RowProcess, folder: Path) -> bytes:
    """The short question as a WAV file of 24 kHz; as the recogniser gets it, it is put into the folder."""
    spoken = folder / "spoken.npy"
    await row.ask(Question(SHORT, say=True, out=str(spoken)))
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, RATE, 0, "NONE", ""))
        writer.writeframes((np.load(spoken) * 32767).astype("<i2").tobytes())
    heard = await decode_audio(file.getvalue(), max_seconds=60, max_bytes=1 << 24, rate=HEARD_RATE)
    np.save(folder / "heard.npy", heard)
    return file.getvalue()


def _input_audio(sound: bytes) -> Mapping[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}


async def _ask(
    session: aiohttp.ClientSession, content: str | list[Mapping[str, Any]], *, spoken: bool, max_tokens: int
) -> Spoken:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"] if spoken else ["text"],
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if spoken:
        body["audio"] = {"voice": "heart", "format": "pcm16"}
    answer = Spoken()
    began = time.perf_counter()
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise OmniError(await response.text())
        buffer = b""
        async for data in response.content.iter_any():
            now = time.perf_counter() - began
            *events, buffer = (buffer + data).split(b"\n\n")
            for event in events:
                _take(answer, event.removeprefix(b"data: "), now)
    return answer


def _take(answer: Spoken, event: bytes, now: float) -> None:
    if event == b"[DONE]":
        answer.total_s = now
        return
    said = msgspec.json.decode(event)
    if "error" in said:
        raise OmniError(str(said["error"]))
    for choice in said["choices"]:
        audio = choice["delta"].get("audio", {})
        if words := audio.get("transcript"):
            answer.first_text_s = answer.first_text_s or now
            answer.text += words
        if data := audio.get("data"):
            samples = np.frombuffer(base64.b64decode(data), "<i2")
            answer.samples += len(samples)
            if not answer.first_audio_s and np.abs(samples.astype(np.int32)).max() > AUDIBLE:
                answer.first_audio_s = now


async def _transcribe(session: aiohttp.ClientSession, sound: bytes) -> float:
    """Seconds for the words of a file."""
    form = aiohttp.FormData()
    form.add_field("file", sound, filename="question.wav")
    form.add_field("model", "embedded")
    began = time.perf_counter()
    async with session.post("/v1/audio/transcriptions", data=form) as response:
        if response.status != 200:
            raise OmniError(await response.text())
        await response.read()
    return time.perf_counter() - began
