"""Speech to text: Whisper through CTranslate2, in int8, without torch.

One step recognises one window of one job, jobs in turn. Windows of several jobs are not batched: in int8 the results
would be the same, but on one core a batch of four spares at most a fifth of the time (and with longer windows none),
while every window waits for all four.

Whisper was trained on 30 s of audio, padded; most of that is padding for a short question, and the encoder's time
grows faster than its length. Shorter windows serve as well (10 s: 30 ms, 15 s: 55 ms, 20 s: 75 ms, 30 s: 230 ms on the
same core), with one trap: with too little padding, or below 10 s, the decoder may say a sentence again and again. Hence
the lengths in `_WINDOWS`, and a decoding that looks like a loop is done again with the window of 30 s.
"""

import json
import zlib
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import tokenizers

from omni_common.errors import OmniError, invalid
from omni_common.frames import Audio, Segment, Transcript
from omni_common.params import Recognition
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.mel import RATE, Floats, log_mel
from omni_worker.engines.windows import Splitter, Window, sounding

_FILES = ("model.bin", "config.json", "tokenizer.json")
#: Up to how many seconds of sound, which window (frames of 10 ms). The figures come from counting loops.
_WINDOWS = ((4.0, 1000), (12.0, 1500), (19.0, 2000))
_FULL_WINDOW = 3000
_LIMIT = int(_WINDOWS[-1][0] * RATE)
#: Positions of the decoder, for prompt and text together; tokens of context that a prompt may take.
_CONTEXT = 448
_PROMPT_TOKENS = 224
#: More tokens than anyone says: a loop.
_TOKENS_A_SECOND = 10
_TOKENS_MORE = 32
#: zlib's gain on a text that repeats itself; plain sentences of 20 s stay below 1.8.
_REPETITIVE = 2.0
#: Whisper's rule for "nobody speaks"; its own figures are 0.6 and -1, which let noise with a prompt through.
_NO_SPEECH = 0.5
_UNLIKELY = -0.8
#: Seconds a time stamp token.
_TICK_S = 0.02


@dataclass(slots=True)
class _Listening:
    """A job: what is still to be recognised, and where its output stands."""

    params: Recognition
    seed: int
    #: Token ids of the caller's prompt, ready to go before the start of the transcript.
    context: list[int]
    splitter: Splitter = field(default_factory=lambda: Splitter(_LIMIT))
    windows: deque[Window] = field(default_factory=deque)
    #: Samples over all audios that the output covers.
    position: int = 0
    #: Of the request, as soon as it is known.
    language: str = ""


@dataclass(frozen=True, slots=True)
class _Decoded:
    """One decoding of one window; `ids` include time stamps."""

    ids: list[int]
    text: str
    avg_logprob: float
    no_speech_prob: float
    #: The decoder came to an end before its limit.
    ended: bool

    @property
    def silent(self) -> bool:
        return self.no_speech_prob > _NO_SPEECH and self.avg_logprob < _UNLIKELY

    @property
    def loops(self) -> bool:
        plain = self.text.encode()
        return not self.ended or len(plain) > _REPETITIVE * len(zlib.compress(plain))


class Recogniser:
    """`audio` pieces from the client in, `transcript` pieces out; see `omni_worker.engine.Engine`.

    Audio of up to 19 s is one window and one piece; longer audio is cut at its quietest places, and a piece leaves as
    soon as its window is recognised. Texts keep Whisper's leading space: they join without a separator. `duration_s` is
    set on the last piece of an audio. Output depends on the audio and the parameters alone, with a temperature also on
    the job's seed.
    """

    in_flight = False
    #: Windows are cut by the samples alone, so after a death the same ones are decoded again.
    resumes = False
    rebuilds = False

    def __init__(self) -> None:
        self.busy = False
        self._jobs: dict[str, _Listening] = {}
        self._failures: list[Failure] = []
        self._model: Any = None

    def load(self, context: LoadContext) -> None:
        """Raises OmniError `model_missing` when the prepared files are not there."""
        folder = Path(context.models) / context.model
        for name in _FILES:
            if not (folder / name).is_file():
                message = f"{folder / name} is missing: run `omni prepare embedded`"
                raise OmniError(message, status=503, code="model_missing")
        context.progress("tokenizer", 0.0)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        context.progress("weights", 0.3)
        self._open = partial(
            ctranslate2.models.Whisper, str(folder), device="cpu", compute_type="int8", intra_threads=context.threads
        )
        self._model = self._open()
        self._languages = {"en"}
        if self._model.is_multilingual:
            ids = json.loads((folder / "config.json").read_text())["lang_ids"]
            self._languages = {str(self._tokenizer.id_to_token(i)).strip("<|>") for i in ids}
        self._first_stamp = self._token("notimestamps") + 1
        context.progress("warm-up", 0.8)
        silence = np.zeros(RATE, np.float32)
        self._decode(silence, _WINDOWS[0][1], _Listening(Recognition(), 0, [], language="en"))
        context.progress("ready", 1.0)

    def add(self, job: Job) -> None:
        """Raises OmniError 400 `unsupported_language`."""
        params = job.params
        assert isinstance(params, Recognition)
        if params.language and params.language not in self._languages:
            known = ", ".join(sorted(self._languages))
            message = f"language {params.language!r} is not one that this model knows: {known}"
            raise invalid(message, "language", code="unsupported_language")
        context: list[int] = []
        if params.prompt.strip():
            ids = self._tokenizer.encode(" " + params.prompt.strip(), add_special_tokens=False).ids
            # Control tokens that someone wrote out are not words.
            words = [token for token in ids if token < self._token("endoftext")]
            context = [self._token("startofprev"), *words[-_PROMPT_TOKENS:]]
        language = params.language if self._model.is_multilingual else "en"
        self._jobs[job.request_id] = _Listening(params, job.seed, context, language=language)

    def push(self, request_id: str, piece: Piece) -> None:
        listening = self._jobs.get(request_id)
        if listening is None:  # its failure waits for the next step
            return
        try:
            if piece.body is not None:
                listening.windows += listening.splitter.push(*_sound(piece))
            if piece.last:
                listening.windows += listening.splitter.close()
        except ValueError as error:
            del self._jobs[request_id]
            self._failures.append(Failure(request_id, str(error), code="invalid_audio", status=400))
        self._settle()

    def cancel(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)
        self._failures = [failure for failure in self._failures if failure.request_id != request_id]
        self._settle()

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        """Recognise one window of the job whose turn it is."""
        done: list[Output | Failure] = [*self._failures]
        self._failures = []
        for request_id, listening in self._jobs.items():
            if listening.windows and request_id not in blocked:
                done.append(self._advance(request_id, listening))
                break
        self._settle()
        return done

    def close(self) -> None:
        self._jobs.clear()
        self._failures.clear()
        self._model = None
        self._settle()

    def _settle(self) -> None:
        self.busy = bool(self._failures) or any(job.windows for job in self._jobs.values())

    def _advance(self, request_id: str, listening: _Listening) -> Output:
        window = listening.windows.popleft()
        segments = self._recognise(window, listening)
        # The job goes behind the others; a finished one is forgotten.
        del self._jobs[request_id]
        if not window.last:
            self._jobs[request_id] = listening
        start = listening.position
        listening.position += len(window.samples)
        duration = (window.offset + len(window.samples)) / RATE if window.ends_audio else 0.0
        body = Transcript(window.index, segments, listening.language, duration, window.ends_audio)
        return Output(request_id, start, listening.position, last=window.last, body=body)

    def _recognise(self, window: Window, listening: _Listening) -> list[Segment]:
        begin, end = sounding(window.samples)
        if begin == end:
            return []
        samples = window.samples[begin:end]
        short = next(frames for seconds, frames in _WINDOWS if len(samples) <= seconds * RATE)
        decoded = self._decode(samples, short, listening)
        if decoded.loops and not decoded.silent:
            decoded = self._decode(samples, _FULL_WINDOW, listening)
        if not decoded.ended and not decoded.silent:
            decoded = self._decode(samples, _FULL_WINDOW, listening, no_repeat=4)
        if decoded.silent:
            return []
        return self._segments(decoded, (window.offset + begin) / RATE, (window.offset + end) / RATE)

    def _decode(self, samples: Floats, frames: int, listening: _Listening, no_repeat: int = 0) -> _Decoded:
        """Encode and decode `samples` (float32 [n], n <= `frames` * 160) greedily, or sampled with a temperature.

        `no_repeat`: no run of so many tokens comes twice (0: they may).
        """
        encoded = self._model.encode(
            ctranslate2.StorageView.from_array(log_mel(samples, frames, self._model.n_mels)[None])
        )
        if not listening.language:
            listening.language = self._model.detect_language(encoded)[0][0][0].strip("<|>")
        start = [self._token("startoftranscript")]
        if self._model.is_multilingual:
            start += [self._token(listening.language), self._token("transcribe")]
        if not listening.params.timestamps:
            start.append(self._token("notimestamps"))
        prompt = listening.context + start
        limit = min(_TOKENS_MORE + int(len(samples) / RATE * _TOKENS_A_SECOND), _CONTEXT // 2, _CONTEXT - len(prompt))
        temperature = listening.params.temperature
        if temperature:
            # CTranslate2 takes its seed once, when a model samples first: only a new model is reproducible (0.2 s).
            ctranslate2.set_random_seed(zlib.crc32(f"{listening.seed} {listening.position} {frames}".encode()) | 1)
        model = self._open() if temperature else self._model
        result = model.generate(
            encoded,
            [prompt],
            beam_size=1,
            # CTranslate2 generates at most half of `max_length`, and with the prompt at most `max_length` tokens.
            max_length=max(2 * limit, len(prompt) + limit),
            no_repeat_ngram_size=no_repeat,
            sampling_topk=0 if temperature else 1,
            sampling_temperature=temperature or 1.0,
            return_scores=True,
            return_no_speech_prob=True,
        )[0]
        ids = result.sequences_ids[0]
        return _Decoded(ids, self._text(ids), result.scores[0], result.no_speech_prob, ended=len(ids) < limit)

    def _segments(self, decoded: _Decoded, begin_s: float, end_s: float) -> list[Segment]:
        """Cut at the time stamps, if there are any; times stay within [begin_s, end_s] and in order."""
        segments: list[Segment] = []
        start_s = last_s = begin_s
        ids: list[int] = []

        def finish(at_s: float) -> None:
            text = self._text(ids)
            if text.strip():
                segments.append(Segment(start_s, at_s, text, ids, decoded.avg_logprob, decoded.no_speech_prob))

        for token in decoded.ids:
            if token < self._first_stamp:
                ids.append(token)
                continue
            last_s = min(max(begin_s + (token - self._first_stamp) * _TICK_S, last_s), end_s)
            finish(last_s)
            start_s, ids = last_s, []
        finish(end_s)
        return segments

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode([token for token in ids if token < self._first_stamp])
        return text

    def _token(self, name: str) -> int:
        token = self._tokenizer.token_to_id(f"<|{name}|>")
        assert token is not None, name
        return int(token)


def _sound(piece: Piece) -> tuple[int, Floats]:
    """The piece's audio number and a copy of its samples: shared memory is wanted back before they are recognised.

    Raises ValueError when they are not what the recogniser takes.
    """
    samples = piece.arrays.get("samples")
    if not isinstance(piece.body, Audio) or samples is None:
        raise ValueError("the recogniser takes audio")
    if piece.body.rate != RATE:
        raise ValueError(f"the recogniser takes audio at {RATE} Hz, not {piece.body.rate}")
    if samples.dtype != np.float32 or samples.ndim != 1:
        raise ValueError(f"the recogniser takes float32 [n], not {samples.dtype} {list(samples.shape)}")
    if not np.isfinite(samples).all():
        raise ValueError("the audio holds values that are not finite")
    return piece.body.index, samples.copy()
