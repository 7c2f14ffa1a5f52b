"""`POST /v1/chat/completions`: asked by text or voice, answered in text and speech, whole or streamed."""

import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import cast, get_args

import msgspec
import numpy as np
from aiohttp import web

from omni_common.errors import invalid
from omni_common.frames import Audio, PromptFacts, Text
from omni_gateway.audio_store import AudioStore
from omni_gateway.chat_ask import ChatJob, build_job
from omni_gateway.chat_schema import ChatRequest
from omni_gateway.chat_split import Called, Part, Said, Thought
from omni_gateway.chat_wire import (
    AnswerAudio,
    AnswerCall,
    AnswerChoice,
    AnswerMessage,
    Chunks,
    Completion,
    ContentChunks,
    Finish,
    Function,
    SpokenChunks,
    Usage,
    usage,
)
from omni_gateway.context import BUS, KEY_DIGEST, SETTINGS, AudioForm
from omni_gateway.endpoint import Samples, decode_body, find_pipeline, run_stream, samples_of, sse_response
from omni_gateway.errors import quoted
from omni_gateway.media.encode import Encoder, encode
from omni_gateway.stream import Event

AUDIO_STORE = web.AppKey("audio_store", AudioStore)
_FORM_HEADER = "x-omni-audio-form"
_HEARD_RATE = 16_000
#: An answer that cannot be spoken (emoji only) still gets a file that players open: this much silence.
_SILENCE_S = 0.1
#: Most bytes of several events in one write.
_WRITE_BYTES = 16 << 10


def add_routes(app: web.Application) -> None:
    app[AUDIO_STORE] = AudioStore()
    app.router.add_post("/v1/chat/completions", chat)


async def chat(request: web.Request) -> web.StreamResponse:
    body = await decode_body(request, ChatRequest)
    settings = request.app[SETTINGS]
    pipeline = find_pipeline(request.app[BUS], body.model, "chat", settings.default_pipeline)
    form = body.audio_form or _header_form(request) or settings.chat_audio_form
    job = await build_job(body, pipeline, form, request.app[AUDIO_STORE], request[KEY_DIGEST])
    return await (_streamed(request, job) if body.stream else _whole(request, job))


def _header_form(request: web.Request) -> AudioForm | None:
    value = request.headers.get(_FORM_HEADER)
    if value is not None and value not in get_args(AudioForm):
        raise invalid(f"{_FORM_HEADER} is {quoted(value)}; use {' or '.join(get_args(AudioForm))}", _FORM_HEADER)
    return cast(AudioForm | None, value)


async def _whole(request: web.Request, job: ChatJob) -> web.Response:
    async with run_stream(request, job.ask) as run, _answering(request, job, run.request_id, True) as answer:
        sound = b""
        async for event in run:
            answer.add(event)
            if job.audio and isinstance(event.body, Audio):
                sound += await answer.encoded(samples_of(event))
        answer.end()
        if job.audio:
            sound += await answer.encoded(answer.filler()) + await answer.rest()
    return web.Response(body=msgspec.json.encode(answer.completion(sound)), content_type="application/json")


async def _streamed(request: web.Request, job: ChatJob) -> web.StreamResponse:
    patience_s = request.app[SETTINGS].keep_alive_s
    async with run_stream(request, job.ask, patience_s=patience_s) as run, sse_response(request) as sse:
        async with _answering(request, job, run.request_id, False) as answer:
            chunks = answer.chunks()
            frames = chunks.start()
            async for event in run:
                for part in answer.add(event):
                    frames += answer.frame(chunks, part)
                if isinstance(event.body, Audio) and (data := await answer.encoded(samples_of(event))):
                    frames += chunks.sound(data)
                # Events that came together leave together.
                if frames and (not run.ready or len(frames) >= _WRITE_BYTES):
                    await sse.send(frames)
                    frames = b""
            for part in answer.end():
                frames += answer.frame(chunks, part)
            if job.audio:
                for data in (await answer.encoded(answer.filler()), await answer.rest()):
                    frames += chunks.sound(data) if data else b""
                frames += chunks.sounded(answer.expires_at)
        # Only now is the answer's audio id known to the next turn, which a client may ask as soon as it reads this.
        await sse.send(frames + chunks.end(answer.finish, answer.usage()))
    return sse.response


class _Answer:
    """What has come so far of one answer."""

    def __init__(self, job: ChatJob, run_id: str, expires_at: int, whole: bool) -> None:
        self._job = job
        self._whole = whole
        #: Of the sound, as its stage says; the pipeline's is for an answer that has none.
        self._rate = job.ask.pipeline.audio_rate
        self._created = int(time.time())
        self._run_id = run_id
        self._samples = 0
        self._read = 0
        self._written = 0
        self._facts: PromptFacts | None = None
        self._splitter = job.splitter()
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        #: Of the written tokens.
        self._thought = 0
        self._calls: list[Called] = []
        self.audio_id = f"audio_{run_id}"
        self.expires_at = expires_at
        self._finish: Finish = "stop"
        #: Of one container for the whole answer, from its first sound on; `None` where each piece is a file of its own.
        self._encoder: Encoder | None = None

    @property
    def transcript(self) -> str:
        return "".join(self._pieces)

    @property
    def finish(self) -> Finish:
        return "tool_calls" if self._calls and self._finish == "stop" else self._finish

    def add(self, event: Event) -> list[Part]:
        """Take what has come; gives what of its text can be told."""
        body = event.body
        if isinstance(body, Text):
            self._written += len(body.ids)
            self._read = body.prompt_tokens or self._read
            self._finish = body.finish or self._finish
            if body.prompt is not None:
                self._facts = body.prompt
                if body.prompt.reasoning and self._splitter:
                    self._splitter.open()
            return self._split(body)
        if isinstance(body, Audio):
            self._rate = body.rate
            self._samples += len(samples_of(event))
        return []

    def _split(self, body: Text) -> list[Part]:
        if self._splitter is None:
            return self._keep([Said(body.text)] if body.text else [])
        before = self._splitter.thinking
        parts = self._splitter.push(body.text)
        if before or self._splitter.thinking:
            self._thought += len(body.ids)
        return self._keep(parts)

    def end(self) -> list[Part]:
        """The text is over: what of it was held back. Once."""
        return self._keep(self._splitter.end() if self._splitter else [])

    def _keep(self, parts: list[Part]) -> list[Part]:
        if not self._job.shows_reasoning:
            parts = [part for part in parts if not isinstance(part, Thought)]
        for part in parts:
            if isinstance(part, Said):
                self._pieces.append(part.text)
            elif isinstance(part, Thought):
                self._thoughts.append(part.text)
            else:
                self._calls.append(part)
        return parts

    def frame(self, chunks: Chunks, part: Part) -> bytes:
        """A part as it is streamed."""
        if isinstance(part, Said):
            return chunks.text(part.text)
        if isinstance(part, Thought):
            return chunks.thought(part.text)
        return chunks.called(self._call_id(part), part)

    def _call_id(self, call: Called) -> str:
        return f"call_{self._run_id}_{call.index}"

    def usage(self) -> Usage:
        heard_s, spoken_s = Fraction(self._job.audio_in, _HEARD_RATE), Fraction(self._samples, self._rate)
        return usage(self._read, self._facts, heard_s, self._written, self._thought, spoken_s)

    def filler(self) -> Samples:
        """Silence for an answer that had no sound, else nothing."""
        return np.zeros(0 if self._samples else int(_SILENCE_S * self._rate), np.float32)

    async def encoded(self, samples: Samples) -> bytes:
        """`samples` as the next piece of the container, or as a whole file in the `content` form."""
        assert self._job.audio
        if not len(samples):
            return b""
        if not self._whole and self._job.form == "content":
            return await encode(samples, self._job.audio, self._rate)
        if self._encoder is None:
            stage = self._job.ask.pipeline.tasks[self._job.ask.task].output["audio"]
            self._encoder = Encoder(self._job.audio, self._rate, whole=self._whole, stage=stage)
        return await self._encoder.feed(samples)

    async def rest(self) -> bytes:
        return await self._encoder.finish() if self._encoder is not None else b""

    async def close(self) -> None:
        if self._encoder is not None:
            await self._encoder.close()

    def chunks(self) -> Chunks:
        job = self._job
        head = (f"chatcmpl-{self._run_id}", self._created, job.model, job.include_usage)
        if not job.audio:
            return Chunks(*head)
        if job.form == "content":
            return ContentChunks(*head, with_text=job.text)
        return SpokenChunks(*head, audio_id=self.audio_id)

    def completion(self, sound: bytes) -> Completion:
        message = AnswerMessage(content=self.transcript)
        if not self.transcript and (self._calls or self._thoughts):
            message.content = None
        if self._thoughts:
            message.reasoning_content = message.reasoning = "".join(self._thoughts)
        if self._calls:
            message.tool_calls = [
                AnswerCall(self._call_id(call), Function(call.name, call.arguments)) for call in self._calls
            ]
        if self._job.audio:
            data = base64.b64encode(sound).decode()
            content = self.transcript if self._job.form == "content" and self._job.text else None
            message = AnswerMessage(content, AnswerAudio(self.audio_id, data, self.expires_at, self.transcript))
        return Completion(
            f"chatcmpl-{self._run_id}",
            self._created,
            self._job.model,
            [AnswerChoice(message, self.finish)],
            self.usage(),
        )


@asynccontextmanager
async def _answering(request: web.Request, job: ChatJob, run_id: str, whole: bool) -> AsyncIterator[_Answer]:
    """An `_Answer` whose encoder is freed, and whose words are remembered as far as they were said."""
    store = request.app[AUDIO_STORE]
    answer = _Answer(job, run_id, store.expiry(), whole)
    try:
        yield answer
    finally:
        if job.audio:
            store.put(request[KEY_DIGEST], answer.audio_id, answer.transcript, answer.expires_at)
        await answer.close()
