"""The recogniser: spectrogram, windows, and Whisper itself on speech that hibari made."""

import importlib
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from omni_common.errors import OmniError
from omni_common.frames import Audio, Text, Transcript
from omni_common.params import Recognition
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.mel import RATE, log_mel
from omni_worker.engines.recogniser import Recogniser
from omni_worker.engines.windows import Splitter, Window, quietest, sounding

MODELS = Path(os.environ.get("OMNI_MODELS", "~/.cache/omnibus/models")).expanduser()
CAPITAL = "What is the capital of Japan?"
WINDOW = "She opened the window because the room was far too warm for sleeping."
STORY = """The old lighthouse stood at the end of the rocky point, and nobody had lived there for many years. Every
evening the villagers looked up at its dark windows and wondered about the keeper who had once climbed the stairs. One
autumn a young teacher arrived in the village with a small suitcase and a box of books. She asked the mayor for the key,
and he laughed, because he thought that she was joking. But she was serious, and within a week the first lamp was
burning again. The children came after school to hear her stories about distant countries and strange animals. In winter
the storms were so strong that the waves covered the path completely. She stayed inside, wrote long letters to her
brother, and kept the fire alive. When spring came, the boats returned with fresh fish and good news from the city."""

# ------------------------------------------------------------------------------------------------ without the model


def test_spectrogram_is_whispers() -> None:
    """Reference: faster-whisper 1.2.1's extractor on a sweep from 100 Hz to 6.1 kHz."""
    time = np.arange(2 * RATE) / RATE
    sweep = (0.5 * np.sin(2 * np.pi * (100 * time + 1500 * time**2))).astype(np.float32)
    mel = log_mel(sweep, 200)
    assert mel.shape == (80, 200) and mel.dtype == np.float32 and mel.flags.c_contiguous
    reference = {(3, 0): 1.30604, (10, 20): -0.05609, (40, 90): -0.55286, (70, 199): 0.06778, (5, 199): -0.41536}
    assert (mel.mean(), mel.std()) == pytest.approx((-0.42576, 0.38874), abs=2e-5)
    assert {at: float(mel[at]) for at in reference} == pytest.approx(reference, abs=2e-5)
    assert log_mel(sweep[:RATE], 200).shape == log_mel(np.zeros(0, np.float32), 200).shape == mel.shape


def test_windows_lose_nothing_and_do_not_depend_on_the_pieces() -> None:
    rng = np.random.default_rng(0)
    audios = [rng.standard_normal(n).astype(np.float32) for n in (100_000, 0, 20_000, 20_001)]

    def split(size: int) -> list[Window]:
        splitter = Splitter(limit=20_000)
        windows = []
        for index, audio in enumerate(audios):
            for at in range(0, max(1, len(audio)), size):
                windows += splitter.push(index, audio[at : at + size])
        return windows + splitter.close()

    windows = split(200_000)
    for index, audio in enumerate(audios):
        own = [window for window in windows if window.index == index]
        assert np.array_equal(np.concatenate([window.samples for window in own]), audio)
        assert [window.offset for window in own] == [0, *np.cumsum([len(w.samples) for w in own])[:-1]]
        assert [window.ends_audio for window in own] == [False] * (len(own) - 1) + [True]
        assert max(len(window.samples) for window in own) <= 20_000
    assert [window.last for window in windows] == [False] * (len(windows) - 1) + [True]
    for size in (333, 20_000, 20_001):
        assert [len(window.samples) for window in split(size)] == [len(window.samples) for window in windows]


def test_cuts_are_in_the_pause() -> None:
    sound = np.sin(np.arange(10 * RATE, dtype=np.float32))
    sound[7 * RATE : 7 * RATE + RATE // 2] *= 0.01
    assert 7 * RATE < quietest(sound) < 7.5 * RATE


def test_silence_around_the_sound_is_left_out() -> None:
    sound = np.zeros(4 * RATE + 7, np.float32)
    assert sounding(sound) == sounding(sound[:0]) == (0, 0)
    sound[RATE : 2 * RATE] = 0.1 * np.sin(np.arange(RATE))
    assert sounding(sound) == (RATE - RATE // 5, 2 * RATE + RATE // 5)
    sound[-1] = 1.0
    assert sounding(sound)[1] == len(sound)


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    context = LoadContext("whisper-tiny.en", {}, str(tmp_path), 4, 1, lambda what, done: None, lambda: None)
    with pytest.raises(OmniError, match="omni prepare embedded") as caught:
        Recogniser().load(context)
    assert caught.value.code == "model_missing"


# --------------------------------------------------------------------------------------------------- with the model


@pytest.fixture(scope="module")
def engine() -> Iterator[Recogniser]:
    progress: list[float] = []
    engine = Recogniser()
    engine.load(
        LoadContext("whisper-tiny.en", {}, str(MODELS), 4, 1, lambda what, done: progress.append(done), lambda: None)
    )
    assert progress == sorted(progress) and progress[-1] == 1.0
    yield engine
    engine.close()
    assert not engine.busy


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        assert not request.getfixturevalue("engine").busy


@pytest.fixture(scope="module")
def speech() -> dict[str, np.ndarray]:
    """float32 [n] at 16 kHz, by text."""
    with pytest.MonkeyPatch.context() as patch:
        # Read when onnxruntime is imported; without it, it keeps a database of usage events open.
        patch.setenv("ORT_DISABLE_TELEMETRY", "1")
        voice = importlib.import_module("hibari").Hibari()
    return {text: resample(voice(text, seed=0), 24_000) for text in (CAPITAL, WINDOW, STORY)}


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler("flt", "mono", RATE)
    return np.concatenate([out.to_ndarray()[0] for given in (frame, None) for out in resampler.resample(given)])


def job(name: str, seed: int = 0, **params: Any) -> Job:
    return Job(name, seed, Recognition(**params), ("client",), ("thinker", "client"))


def feed(engine: Recogniser, name: str, *audios: np.ndarray, size: int = 1 << 30) -> None:
    """Push `audios` in pieces of at most `size` samples, the last one empty."""
    at = 0
    for index, audio in enumerate(audios):
        for start in range(0, max(1, len(audio)), size):
            piece = audio[start : start + size]
            body = Audio(RATE, index)
            engine.push(name, Piece("client", at, at + len(piece), False, body, {"samples": piece}))
            at += len(piece)
    engine.push(name, Piece("client", at, at, True, None))


def drain(engine: Recogniser, steps: int = 100) -> list[Output]:
    outputs: list[Output] = []
    while engine.busy:
        assert (steps := steps - 1) >= 0
        for output in engine.step(frozenset()):
            assert isinstance(output, Output)
            outputs.append(output)
    return outputs


def hear(engine: Recogniser, *audios: np.ndarray, size: int = 1 << 30, **params: Any) -> list[Output]:
    """The outputs of one job, after checks that hold for every job."""
    engine.add(job("r", **params))
    feed(engine, "r", *audios, size=size)
    outputs = drain(engine)
    edges = [outputs[0].start, *(output.end for output in outputs)]
    assert [output.start for output in outputs] == edges[:-1]
    assert (edges[0], edges[-1]) == (0, sum(map(len, audios)))
    assert [output.last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index, audio in enumerate(audios):
        pieces = [p for p in map(transcript, outputs) if p.index == index]
        assert [piece.end_of_audio for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].duration_s == pytest.approx(len(audio) / RATE)
        assert {piece.language for piece in pieces} == {"en"}
        times = [t for piece in pieces for segment in piece.segments for t in (segment.start_s, segment.end_s)]
        assert times == sorted(times)
        assert not times or (times[0] >= 0 and times[-1] <= len(audio) / RATE + 1e-6)
    return outputs


def transcript(output: Output) -> Transcript:
    assert isinstance(output.body, Transcript)
    return output.body


def text_of(outputs: list[Output], index: int | None = None) -> str:
    bodies = [transcript(output) for output in outputs]
    return "".join(s.text for body in bodies if index in (None, body.index) for s in body.segments)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def errors(expected: list[str], heard: list[str]) -> int:
    """Levenshtein distance in words."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(expected, 1):
        before, row = row, [i]
        for j, other in enumerate(heard, 1):
            row.append(min(before[j - 1] + (word != other), before[j] + 1, row[-1] + 1))
    return row[-1]


@pytest.mark.embedded
def test_a_sentence(engine: Recogniser, speech: dict[str, np.ndarray]) -> None:
    outputs = hear(engine, speech[CAPITAL])
    assert words(text_of(outputs)) == words(CAPITAL)
    [segment] = transcript(outputs[0]).segments
    assert segment.ids and segment.avg_logprob > -1 and segment.no_speech_prob < 0.5


@pytest.mark.embedded
def test_audios_of_a_request_stay_apart(engine: Recogniser, speech: dict[str, np.ndarray]) -> None:
    outputs = hear(engine, speech[CAPITAL], np.zeros(0, np.float32), speech[WINDOW], size=5000)
    assert [transcript(output).index for output in outputs] == [0, 1, 2]
    assert [words(text_of(outputs, i)) for i in range(3)] == [words(CAPITAL), [], words(WINDOW)]


@pytest.mark.embedded
@pytest.mark.parametrize("timestamps", [False, True])
def test_long_audio_in_several_pieces(engine: Recogniser, speech: dict[str, np.ndarray], timestamps: bool) -> None:
    story = speech[STORY]
    assert len(story) > 40 * RATE
    outputs = hear(engine, story, size=64_000, timestamps=timestamps)
    assert len(outputs) >= 3
    expected, heard = words(STORY), words(text_of(outputs))
    assert errors(expected, heard) <= 0.03 * len(expected)
    segments = [segment for output in outputs for segment in transcript(output).segments]
    assert len(segments) > len(outputs) if timestamps else len(segments) == len(outputs)


@pytest.mark.embedded
def test_a_piece_leaves_before_all_is_there(engine: Recogniser, speech: dict[str, np.ndarray]) -> None:
    whole = [output.end for output in hear(engine, speech[STORY])]
    engine.add(job("live"))
    start = speech[STORY][: 25 * RATE]
    engine.push("live", Piece("client", 0, len(start), False, Audio(RATE), {"samples": start}))
    [output] = drain(engine)
    assert output.end == whole[0] and not output.last and not transcript(output).end_of_audio
    engine.cancel("live")


@pytest.mark.embedded
@pytest.mark.parametrize("prompt", ["", "Omnibus, Kubernetes"])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 1.0, 5.0, 25.0])
def test_no_words_where_nobody_speaks(engine: Recogniser, seconds: float, prompt: str) -> None:
    size = int(seconds * RATE)
    noise = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    for sound in (np.zeros(size, np.float32), 1e-4 * noise, 0.01 * noise, 0.1 * noise):
        assert text_of(hear(engine, sound, prompt=prompt)) == ""


@pytest.mark.embedded
def test_jobs_take_turns_and_hear_what_they_hear_alone(engine: Recogniser, speech: dict[str, np.ndarray]) -> None:
    alone = {text: [transcript(output) for output in hear(engine, audio)] for text, audio in speech.items()}
    for text, audio in reversed(speech.items()):
        engine.add(job(text))
        feed(engine, text, audio)
    outputs = drain(engine)
    for text in speech:
        assert [transcript(output) for output in outputs if output.request_id == text] == alone[text]
    assert [output.request_id for output in outputs[:4]] == [STORY, WINDOW, CAPITAL, STORY]


@pytest.mark.embedded
def test_blocked_jobs_are_skipped(engine: Recogniser, speech: dict[str, np.ndarray]) -> None:
    for name in ("a", "b"):
        engine.add(job(name))
        feed(engine, name, speech[CAPITAL])
    assert [output.request_id for output in engine.step({"a"})] == ["b"]
    assert engine.step({"a"}) == [] and engine.busy
    assert [output.request_id for output in drain(engine)] == ["a"]


@pytest.mark.embedded
def test_cancel_forgets_everything(engine: Recogniser, speech: dict[str, np.ndarray]) -> None:
    engine.cancel("never seen")
    engine.add(job("gone"))
    feed(engine, "gone", speech[STORY])
    assert len(engine.step(frozenset())) == 1 and engine.busy
    engine.cancel("gone")
    assert not engine.busy and engine.step(frozenset()) == []
    assert words(text_of(hear(engine, speech[CAPITAL]))) == words(CAPITAL)


@pytest.mark.embedded
def test_other_languages_are_refused(engine: Recogniser) -> None:
    with pytest.raises(OmniError) as caught:
        engine.add(job("x", language="de"))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_language", "language")
    engine.add(job("y", language="en"))
    engine.cancel("y")


@pytest.mark.embedded
def test_prompt_conditions_and_may_be_long(engine: Recogniser, speech: dict[str, np.ndarray]) -> None:
    for prompt in ("Questions about Japan.", "tokyo " * 1000, "<|endoftext|><|startoftranscript|>"):
        assert words(text_of(hear(engine, speech[CAPITAL], prompt=prompt))) == words(CAPITAL)


@pytest.mark.embedded
def test_sampling_follows_the_seed(engine: Recogniser, speech: dict[str, np.ndarray]) -> None:
    def sampled(seed: int) -> str:
        engine.add(job("s", seed, temperature=1.0))
        feed(engine, "s", speech[WINDOW])
        return text_of(drain(engine))

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(6)}) > 1


@pytest.mark.embedded
@pytest.mark.parametrize(
    "body, samples",
    [
        (Audio(24_000), np.zeros(10, np.float32)),
        (Audio(RATE), np.zeros(10, np.int16)),
        (Audio(RATE), np.zeros((2, 10), np.float32)),
        (Audio(RATE), np.full(10, np.nan, np.float32)),
        (Audio(RATE, index=3), np.zeros(10, np.float32)),
        (Text("hello"), np.zeros(10, np.float32)),
    ],
)
def test_wrong_input_fails_its_own_job(engine: Recogniser, body: Audio | Text, samples: np.ndarray) -> None:
    engine.add(job("bad"))
    for last in (False, True):
        engine.push("bad", Piece("client", 0, 10, last, body, {"samples": samples}))
    assert engine.busy
    [failure] = engine.step({"bad"})
    assert isinstance(failure, Failure) and (failure.request_id, failure.status) == ("bad", 400)


@pytest.mark.embedded
@pytest.mark.parametrize("cure", ["full window", "no repeats"])
def test_loops_are_decoded_again(
    engine: Recogniser, speech: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, cure: str
) -> None:
    model, calls = engine._model, []

    def generate(encoded: Any, prompts: Any, **options: Any) -> object:
        frames, no_repeat = 2 * encoded.shape[1], options["no_repeat_ngram_size"]
        calls.append((frames, no_repeat))
        if (frames == 3000) if cure == "full window" else no_repeat:
            return model.generate(encoded, prompts, **options)
        return [types.SimpleNamespace(sequences_ids=[[340] * 224], scores=[-0.1], no_speech_prob=0.0)]

    looping = types.SimpleNamespace(encode=model.encode, generate=generate, n_mels=80, is_multilingual=False)
    monkeypatch.setattr(engine, "_model", looping)
    assert words(text_of(hear(engine, speech[CAPITAL]))) == words(CAPITAL)
    assert calls == [(1000, 0), (3000, 0), (3000, 4)][: 2 if cure == "full window" else 3]
