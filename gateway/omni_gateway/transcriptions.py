"""`POST /v1/audio/transcriptions`: an upload to text, whole, with times, as subtitles, or streamed as it is heard."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from omni_common.errors import invalid
from omni_common.frames import Params, Segment, Transcript
from omni_common.pipeline import Pipeline
from omni_gateway.audio_input import RATE, given_audio
from omni_gateway.context import BUS, SETTINGS
from omni_gateway.endpoint import build_params, find_pipeline, fresh_seed, run_stream, sse_response
from omni_gateway.errors import quoted
from omni_gateway.form import Form, read_form
from omni_gateway.media.decode import decode_audio
from omni_gateway.stream import Ask
from omni_gateway.subtitles import srt, vtt

_TASK = "transcription"
_FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
_STREAMED = ("json", "text")
_TIMED = ("verbose_json", "srt", "vtt")
_GRANULARITIES = ("segment",)


def add_routes(app: web.Application) -> None:
    app.router.add_post("/v1/audio/transcriptions", transcribe)
    app.router.add_post("/v1/audio/translations", translate)


async def transcribe(request: web.Request) -> web.StreamResponse:
    bus, settings = request.app[BUS], request.app[SETTINGS]
    find_pipeline(bus, None, _TASK, settings.default_pipeline)
    # The model may come after the file, so its own limit holds only afterwards.
    largest = max(p.limits.audio_mib for p in bus.pipelines.values() if _TASK in p.tasks)
    form = await read_form(request, "file", largest << 20)
    pipeline = find_pipeline(bus, form.text("model"), _TASK, settings.default_pipeline)
    job = await build_job(form, pipeline)
    return await (_streamed(request, job) if job.stream else _whole(request, job))


async def translate(_request: web.Request) -> web.Response:
    raise invalid(
        "No model here translates speech; /v1/audio/transcriptions writes down what is said.",
        code="unsupported_endpoint",
    )


@dataclass(frozen=True, slots=True)
class TranscriptionJob:
    """A validated request."""

    ask: Ask
    format: str
    stream: bool
    seconds: float
    temperature: float


async def build_job(form: Form, pipeline: Pipeline) -> TranscriptionJob:
    """Check the fields, then decode the file. Raises OmniError 400 (413) with the field."""
    fmt = form.text("response_format") or _FORMATS[0]
    if fmt not in _FORMATS:
        raise invalid(f"response_format: {quoted(fmt)} is not one of {', '.join(_FORMATS)}", "response_format")
    stream = _boolean(form, "stream")
    if stream and fmt not in _STREAMED:
        raise invalid(f"stream works with response_format {' and '.join(_STREAMED)}, not {fmt}", "stream")
    for granularity in form.texts.get("timestamp_granularities", []):
        if granularity not in _GRANULARITIES:
            text = f"timestamp_granularities: {quoted(granularity)} is not supported; there are times by segment"
            raise invalid(text, "timestamp_granularities", code="unsupported_parameter")
    if form.text("include"):
        text = f"include: {quoted(form.text('include') or '')} is not supported here"
        raise invalid(text, "include", code="unsupported_parameter")

    task = pipeline.tasks[_TASK]
    listener = task.input["audio"]
    overrides: Params = {"timestamps": fmt in _TIMED}
    if (language := form.text("language")) is not None:
        overrides["language"] = _language(language, pipeline)
    if (prompt := form.text("prompt")) is not None:
        overrides["prompt"] = prompt
    if (temperature := form.text("temperature")) is not None:
        overrides["temperature"] = _number(temperature, "temperature")
    params = build_params(pipeline, pipeline.plan(_TASK, ["audio"], ["text"]).stages, {listener: overrides})

    if form.file is None:
        raise invalid("file is missing", "file", code="missing_required_parameter")
    limits = pipeline.limits
    samples = await decode_audio(
        form.file, max_seconds=limits.audio_s, max_bytes=limits.audio_mib << 20, rate=RATE, param="file"
    )
    ask = Ask(
        pipeline=pipeline,
        task=_TASK,
        outputs=["text"],
        given=given_audio([samples]),
        seed=fresh_seed(),
        params=params,
    )
    return TranscriptionJob(ask, fmt, stream, len(samples) / RATE, float(overrides.get("temperature", 0.0)))  # type: ignore[arg-type]


def _language(name: str, pipeline: Pipeline) -> str:
    code = name.lower().replace("_", "-").split("-")[0]
    if code not in pipeline.languages:
        known = ", ".join(pipeline.languages)
        raise invalid(f"language: {pipeline.name} understands {known} (ISO 639-1), not {quoted(name)}", "language")
    return code


def _boolean(form: Form, field: str) -> bool:
    value = (form.text(field) or "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"{field}: {quoted(value)} is neither true nor false", field, code="invalid_type")
    return value in ("true", "1")


def _number(text: str, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid(f"{field}: {quoted(text)} is not a number", field, code="invalid_type")
    return value


# ------------------------------------------------------------------------------------------------------ the answers


class _Words:
    """What has been recognised so far. Segments keep their leading space, so they join as they are."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.language = ""
        self.text = ""
        self._raw = ""

    def add(self, body: Transcript) -> str:
        """Returns what is new in `text`; all that was returned, joined, is `text`."""
        self.segments += body.segments
        self.language = body.language or self.language
        self._raw += "".join(segment.text for segment in body.segments)
        before, self.text = self.text, self._raw.strip()
        return self.text[len(before) :]


async def _whole(request: web.Request, job: TranscriptionJob) -> web.Response:
    words = _Words()
    async with run_stream(request, job.ask) as run:
        async for event in run:
            if isinstance(event.body, Transcript):
                words.add(event.body)
    if job.format == "json":
        return _json({"text": words.text, "usage": _usage(job)})
    if job.format == "verbose_json":
        return _json(_verbose(job, words))
    render: dict[str, tuple[str, Callable[[_Words], str]]] = {
        "text": ("text/plain", lambda w: w.text + "\n"),
        "srt": ("application/x-subrip", lambda w: srt(w.segments)),
        "vtt": ("text/vtt", lambda w: vtt(w.segments)),
    }
    content_type, text = render[job.format]
    return web.Response(text=text(words), content_type=content_type, charset="utf-8")


async def _streamed(request: web.Request, job: TranscriptionJob) -> web.StreamResponse:
    words = _Words()
    patience_s = request.app[SETTINGS].keep_alive_s
    async with run_stream(request, job.ask, patience_s=patience_s) as run, sse_response(request) as sse:
        async for event in run:
            if isinstance(event.body, Transcript) and (delta := words.add(event.body)):
                await sse.send(_frame({"type": "transcript.text.delta", "delta": delta}))
        await sse.send(_frame({"type": "transcript.text.done", "text": words.text, "usage": _usage(job)}))
    return sse.response


def _verbose(job: TranscriptionJob, words: _Words) -> dict[str, Any]:
    return {
        "task": "transcribe",
        "language": words.language,
        "duration": round(job.seconds, 3),
        "text": words.text,
        "segments": [_segment(i, segment, job.temperature) for i, segment in enumerate(words.segments)],
        "usage": _usage(job),
    }


def _segment(number: int, segment: Segment, temperature: float) -> dict[str, Any]:
    """`compression_ratio` as in Whisper: UTF-8 bytes of the text over their zlib size; a high one means repetition."""
    plain = segment.text.encode()
    return {
        "id": number,
        # In Whisper's frames of 10 ms.
        "seek": round(segment.start_s * 100),
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": segment.ids,
        "temperature": temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": len(plain) / len(zlib.compress(plain)) if plain else 0.0,
        "no_speech_prob": segment.no_speech_prob,
    }


def _usage(job: TranscriptionJob) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(job.seconds)}


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _frame(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
