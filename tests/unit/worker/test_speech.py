"""Text to sound through the talker and code2wav, against the package that the models come from."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hibari import Hibari, dsp
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_common.errors import OmniError
from omni_common.frames import Audio, Latent, Text
from omni_common.params import Speech, split_speed
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.onnx import Onnx
from omni_worker.models import hibari_code2wav, hibari_graph, hibari_synth
from omni_worker.models.hibari_text import GROUP

pytestmark = pytest.mark.embedded

PARIS = "The capital of France is Paris."
STORY = (
    "Well, the sea is a vast and mysterious realm, teeming with life. On the 3rd of March, 1,250 people paid $9.99! "
    "Dr. Smith asked: is pi 3.14? 😄 ... It is."
)
#: Against the whole rendering of the same float32 graph; measured 6e-8, at a peak of 0.35.
TOLERANCE = 1e-5


def context(model: str) -> LoadContext:
    return LoadContext(model, {}, "", 16, 1, lambda what, fraction: None, lambda: None)


@pytest.fixture(scope="module")
def talker() -> Onnx:
    engine = Onnx()
    engine.load(context("hibari_talker"))
    return engine


@pytest.fixture(scope="module")
def code2wav() -> Onnx:
    engine = Onnx()
    engine.load(context("hibari_code2wav"))
    return engine


@pytest.fixture(scope="module")
def library() -> Hibari:
    return Hibari()


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"talker", "code2wav"} & set(request.fixturenames):
        engine = request.getfixturevalue(name)
        assert not engine.busy and not engine._tasks


def job(name: str = "r", seed: int = 7, **params: Any) -> Job:
    return Job(name, seed, Speech(**params), ("thinker",), ("client",))


def run(engine: Onnx, name: str = "r") -> list[Output]:
    """Step until idle; every output must be of `name`."""
    outputs = []
    while engine.busy:
        for output in engine.step(frozenset()):
            assert isinstance(output, Output), output
            assert output.request_id == name
            outputs.append(output)
    return outputs


def text_pieces(chunks: Sequence[str]) -> Iterator[Piece]:
    for index, chunk in enumerate(chunks):
        yield Piece("thinker", index, index + 1, index == len(chunks) - 1, Text(text=chunk))


def as_piece(output: Output) -> Piece:
    return Piece("talker", output.start, output.end, output.last, output.body, output.arrays)


def talk(engine: Onnx, *chunks: str, **params: Any) -> list[Output]:
    engine.add(job(**params))
    outputs = []
    for piece in text_pieces(chunks):
        engine.push("r", piece)
        outputs += run(engine)
    check_edge(outputs)
    return outputs


def decode(engine: Onnx, latents: Iterable[Output], seed: int = 7) -> list[Output]:
    engine.add(job(seed=seed))
    for latent in latents:
        engine.push("r", as_piece(latent))
    outputs = run(engine)
    check_edge(outputs)
    return outputs


def check_edge(outputs: list[Output]) -> None:
    """Positions without gaps, and one last output at the end."""
    assert [o.start for o in outputs] == [0, *(o.end for o in outputs[:-1])]
    assert [o.last for o in outputs] == [False] * (len(outputs) - 1) + [True]


def sound(outputs: list[Output]) -> np.ndarray[Any, Any]:
    parts = [o.arrays["samples"] for o in outputs if o.arrays]
    assert all(part.dtype == np.float32 and part.ndim == 1 for part in parts)
    return np.concatenate([np.zeros(0, np.float32), *parts])


def units(latents: list[Output]) -> list[Output]:
    return [o for o in latents if o.arrays]


class Noise:
    """The product's noise of one unit, in the place of the generator that the package draws from."""

    def __init__(self, seed: int, unit: int) -> None:
        self._key = seed, unit

    def standard_normal(self, shape: tuple[int, int], dtype: type) -> np.ndarray[Any, Any]:
        z = hibari_synth.noise(*self._key, 0, shape[1] // 2)
        return np.ascontiguousarray(z.T).view(np.float32)


def whole(spectra: Sequence[np.ndarray[Any, Any]], f0: np.ndarray[Any, Any], unit: int) -> np.ndarray[Any, Any]:
    """The package's own synthesis of a whole utterance."""
    samples: np.ndarray[Any, Any] = dsp.synth(*spectra, f0, Noise(7, unit))
    return samples


def heard(unit: Output, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    begin, end = unit.arrays["heard"]
    return samples[begin * 300 : end * 300]


# ------------------------------------------------------------------------------------------------------------ fidelity


def test_equals_the_package(talker: Onnx, code2wav: Onnx, library: Hibari) -> None:
    """The package multiplies the decoder in int8, we in float32: 28 dB and more apart, which is not audible."""
    latents = talk(talker, PARIS)
    ids = np.array([library.ids(library.phonemize(PARIS)[0])])
    *spectra, f0 = (o[0] for o in library.sess.run(None, {"ids": ids, "speed": np.ones(1, np.float32)}))
    (unit,) = units(latents)
    assert np.array_equal(unit.arrays["f0"], f0)
    expected = heard(unit, whole(spectra, f0, 0))
    error = sound(decode(code2wav, latents)) - expected
    assert 10 * np.log10((expected**2).sum() / (error**2).sum()) >= 25
    # What is not heard is silence.
    quiet = whole(spectra, f0, 0)
    begin, end = unit.arrays["heard"]
    assert max(abs(quiet[: begin * 300]).max(), abs(quiet[end * 300 :]).max()) < 2e-3


def test_every_join_equals_the_whole_rendering(talker: Onnx, code2wav: Onnx, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of 1, 13, 25 or random frames, and the product's own, against one decode of the whole unit."""
    session = hibari_graph.session(hibari_graph.cut()[1], 1)
    latents = talk(talker, PARIS, " She sells sea shells by the sea shore, sir.")
    expected = []
    for index, unit in enumerate(units(latents)):
        spectra = [part[0] for part in session.run(None, {"z": unit.arrays["z"][None]})]
        expected.append(heard(unit, whole(spectra, unit.arrays["f0"], index)))
    reference = np.concatenate(expected)
    random = np.random.default_rng(3)
    ramps: list[Any] = [hibari_code2wav.stretch, lambda p, left: 1, lambda p, left: min(13, left)]
    ramps += [lambda p, left: min(25, left), lambda p, left: min(int(random.integers(1, 90)), left)]
    for ramp in ramps:
        monkeypatch.setattr(hibari_code2wav, "stretch", ramp)
        outputs = decode(code2wav, latents)
        samples = sound(outputs)
        assert abs(samples - reference).max() < TOLERANCE
        joins = [o.start for o in outputs[1:-1]]
        jump = abs((samples - reference)[joins] - (samples - reference)[np.array(joins) - 1])
        assert jump.max() < TOLERANCE


@pytest.mark.parametrize("total", [1, 2, 3, 5, 60])
def test_short_units_and_edges(total: int) -> None:
    random = np.random.default_rng(total)
    spectra = [random.standard_normal((601, total), dtype=np.float32) for _ in range(5)]
    f0 = random.uniform(0, 300, total).astype(np.float32)
    source, reference = hibari_synth.Source(f0), whole(spectra, f0, 0)
    for start in range(0, total, 7):
        end = min(start + 7, total)
        first, stop = hibari_synth.frames_for(start, end, total)
        parts = [part[:, first:stop] for part in spectra]
        noise = hibari_synth.noise(7, 0, first, stop)
        samples = hibari_synth.render(parts, source.spectrum(first, stop), noise, start, end, total)
        assert np.allclose(samples, reference[start * 300 : end * 300], atol=1e-5 * abs(reference).max())


def test_noise_is_normal_and_addressed() -> None:
    z = hibari_synth.noise(-5, 3, 0, 400)
    assert np.array_equal(z[100:103], hibari_synth.noise(-5, 3, 100, 103))
    for other in (hibari_synth.noise(-5, 4, 0, 400), hibari_synth.noise(5, 3, 0, 400), np.roll(z, 1, axis=0)):
        assert abs(np.vdot(z, other)) / z.size < 0.02
    parts = z.view(np.float32)
    assert abs(parts.mean()) < 0.01 and abs(parts.std() - 1) < 0.01
    assert abs((parts**4).mean() - 3) < 0.1 and 4 < abs(parts).max() < 7


# ------------------------------------------------------------------------------------------------- chunks, jobs, seeds


def test_one_character_at_a_time_equals_one_shot(talker: Onnx, code2wav: Onnx) -> None:
    one_shot = talk(talker, STORY)
    chunked = talk(talker, *STORY, "")
    assert len(units(one_shot)) == 5
    assert [(o.start, o.end, o.body) for o in units(one_shot)] == [(o.start, o.end, o.body) for o in units(chunked)]
    for a, b in zip(units(one_shot), units(chunked), strict=True):
        assert all(np.array_equal(a.arrays[name], b.arrays[name]) for name in ("z", "f0", "heard"))
    assert np.array_equal(sound(decode(code2wav, one_shot)), sound(decode(code2wav, chunked)))


def test_every_character_is_accounted_for(talker: Onnx, code2wav: Onnx) -> None:
    text = "😄 ... " + STORY + "\n```\n---\n👩‍👩‍👧"
    latents = talk(talker, text)
    position = 0
    for latent in latents:
        assert isinstance(latent.body, Latent)
        assert latent.body.characters == (position, position + len(latent.body.text))
        position = latent.body.characters[1]
    audio = decode(code2wav, latents)
    said = [o.body.text for o in audio if isinstance(o.body, Audio)]
    assert "".join(said) == text
    # A unit's text comes with its first samples.
    assert [o.body.text for o in latents if isinstance(o.body, Latent)] == [words for words in said if words]
    assert {o.body.rate for o in audio if isinstance(o.body, Audio)} == {24_000}
    assert audio[-1].end == len(sound(audio))


def test_the_first_sound_comes_before_the_text_ends(talker: Onnx, code2wav: Onnx) -> None:
    talker.add(job())
    talker.push("r", Piece("thinker", 0, 5, False, Text(text="Yes. I")))
    (latent,) = run(talker)
    code2wav.add(job())
    code2wav.push("r", as_piece(latent))
    first = code2wav.step(frozenset())[0]
    assert isinstance(first, Output) and abs(first.arrays["samples"]).max() > 0.01  # -40 dBFS
    talker.cancel("r")
    code2wav.cancel("r")


def test_interleaved_jobs_equal_solo(talker: Onnx, code2wav: Onnx) -> None:
    texts = {f"r{i}": f"{PARIS} Number {i}. " + "And so on. " * (i % 3) for i in range(8)}
    solo = {name: sound(decode(code2wav, talk(talker, text), seed=i)) for i, (name, text) in enumerate(texts.items())}
    together: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in texts}
    for i, (name, text) in enumerate(texts.items()):
        talker.add(job(name, seed=i))
        code2wav.add(job(name, seed=i))
        for piece in text_pieces([text[:9], text[9:]]):
            talker.push(name, piece)
    turns: list[str] = []
    while talker.busy or code2wav.busy:
        for output in talker.step(frozenset()):
            assert isinstance(output, Output)
            code2wav.push(output.request_id, as_piece(output))
        for output in code2wav.step(frozenset()):
            assert isinstance(output, Output)
            turns.append(output.request_id)
            together[output.request_id].extend(output.arrays.values())
    for name in texts:
        assert np.array_equal(np.concatenate(together[name]), solo[name])
    # In turn: everyone has been heard before anyone is done.
    assert len(set(turns[: turns.index("r0", turns.index("r7"))])) == 8


def test_the_seed_decides_the_noise(talker: Onnx, code2wav: Onnx) -> None:
    latents = talk(talker, PARIS)
    first, again, other = (sound(decode(code2wav, latents, seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert first.shape == other.shape and not np.array_equal(first, other)


def test_blocked_jobs_wait_and_others_go_on(talker: Onnx, code2wav: Onnx) -> None:
    latents = talk(talker, PARIS)
    for name in ("a", "b"):
        code2wav.add(job(name))
        for latent in latents:
            code2wav.push(name, as_piece(latent))
    assert code2wav.step({"a", "b"}) == [] and code2wav.busy
    seen: set[str] = set()
    while outputs := code2wav.step({"a"}):
        seen.update(output.request_id for output in outputs)
    assert seen == {"b"}
    assert len(run(code2wav, "a")) > 1


def test_cancel_leaves_nothing(talker: Onnx, code2wav: Onnx) -> None:
    latents = talk(talker, PARIS)
    code2wav.add(job())
    code2wav.push("r", as_piece(latents[0]))
    assert code2wav.step(frozenset())
    code2wav.cancel("r")
    assert not code2wav.busy and code2wav.step(frozenset()) == []
    code2wav.cancel("r")
    code2wav.cancel("never known")
    assert len(decode(code2wav, latents)) > 1


# --------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "😄", "...", "—", "！？", "\u200b", "```", "世界", "👩‍👩‍👧", "\u202e\ufeff", "नमस्ते"]
)
def test_nothing_to_say_ends_without_frames(talker: Onnx, code2wav: Onnx, text: str) -> None:
    latents = talk(talker, text)
    assert [(o.start, o.end, o.last) for o in latents] == [(0, 0, True)]
    audio = decode(code2wav, latents)
    assert [(o.start, o.end, o.last) for o in audio] == [(0, 0, True)]
    assert (audio[0].body.text if isinstance(audio[0].body, Audio) else "") == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "n,.",
            "<b></b>",
            "Hello 世界 مرحبا 123",
            "**bold** [x](http://y) `code` # h1",
            "a\u0000b",
            "x²①⑵ 1₂",
            "1" * 500,
        ),
        *("1,234," * 60, "Zalgo" + "\u0301" * 1000, "1次", "a" * 200, "ha" * 500, "٣٤٥", "½", "Fa.", "# How to\ngo"),
    ],
)
def test_odd_text_is_spoken(talker: Onnx, code2wav: Onnx, text: str) -> None:
    samples = sound(decode(code2wav, talk(talker, text)))
    assert 0.2 * 24_000 < len(samples) < (2 + 0.5 * len(text)) * 24_000
    assert 0.01 < abs(samples).max() < 1


def test_composed_and_decomposed_letters_sound_the_same(talker: Onnx) -> None:
    composed, decomposed = (units(talk(talker, text))[0] for text in ("Caf\u00e9 ol\u00e9.", "Cafe\u0301 ole\u0301."))
    assert np.array_equal(composed.arrays["z"], decomposed.arrays["z"])


def test_a_heading_mark_is_not_read(talker: Onnx) -> None:
    with_mark, without = (units(talk(talker, text))[0] for text in ("## Go on", "Go on"))
    assert np.array_equal(with_mark.arrays["z"], without.arrays["z"])


def test_long_text_is_cut_into_groups(talker: Onnx) -> None:
    for text in ("1234567890 " * 20, "word " * 300, "alpha, " * 200, "Mississippi" * 100):
        groups = talker._model.phonemize(text)
        assert all(3 <= len(ids) <= GROUP + 2 for ids in groups)
        assert len(groups) == 1 or min(map(len, groups[:-1])) > GROUP / 4
    latents = units(talk(talker, "1234567890 " * 20))
    assert len(latents) > 3
    # The text comes with the first group.
    assert [bool(o.body.text) for o in latents if isinstance(o.body, Latent)] == [True] + [False] * (len(latents) - 1)


def test_ten_thousand_characters(talker: Onnx) -> None:
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 135
    latents = talk(talker, text)
    assert len(units(latents)) == 135
    assert 400 < latents[-1].end / 80 < 1500  # seconds of the whole latent


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_any_text_can_be_read(talker: Onnx, text: str) -> None:
    for ids in talker._model.phonemize(text):
        assert ids[0] == ids[-1] == 0 and len(ids) > 2


# -------------------------------------------------------------------------------------------------- parameters, pauses


def test_speed_changes_the_duration(talker: Onnx, code2wav: Onnx) -> None:
    seconds = {
        speed: len(sound(decode(code2wav, talk(talker, PARIS, speed=speed)))) / 24_000
        for speed in (0.25, 0.5, 1.0, 2.0, 4.0)
    }
    assert seconds[0.25] == seconds[0.5] > 1.6 * seconds[1.0]
    assert seconds[1.0] > 1.6 * seconds[2.0] == 1.6 * seconds[4.0]


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.9, 1.0, 2.0, 3.0, 4.0])
def test_split_speed(speed: float) -> None:
    native, rest = split_speed(speed)
    assert 0.5 <= native <= 2.0 and native * rest == pytest.approx(speed)
    assert rest == 1.0 or not 0.5 <= speed <= 2.0


def test_unknown_voice_is_refused(talker: Onnx) -> None:
    with pytest.raises(OmniError, match="heart") as refused:
        talker.add(job(voice="emma"))
    assert (refused.value.status, refused.value.param) == (400, "voice")


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("Stop there. Top of it.", 0.18, 0.32),
        ("The sea is a vast and mysterious old realm, teeming with life.", 0.06, 0.18),
    ],
)
def test_pauses_between_pieces(talker: Onnx, code2wav: Onnx, text: str, low: float, high: float) -> None:
    latents = talk(talker, text)
    audio = decode(code2wav, latents)
    join = next(o.start for o in audio[1:] if isinstance(o.body, Audio) and o.body.text)
    samples = sound(audio)
    level = np.sqrt((samples[: len(samples) // 120 * 120].reshape(-1, 120) ** 2).mean(1))
    loud = np.flatnonzero(level > 2e-3)  # -54 dBFS
    pause = (loud[loud >= join // 120].min() - loud[loud < join // 120].max()) * 120 / 24_000
    assert low < pause < high


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_runaway_is_cut(talker: Onnx, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    endless = np.zeros((1, 130, 100_000), np.float32), np.zeros((1, 100_000), np.float32)
    monkeypatch.setattr(talker._model, "_session", SimpleNamespace(run=lambda names, feed: endless))
    latents = talk(talker, "1次")
    assert latents[-1].end == units(latents)[0].arrays["z"].shape[1] < 10 * 80
    assert "cut at" in caplog.text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_a_number_is_an_error(talker: Onnx, code2wav: Onnx, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    latents = talk(talker, PARIS)
    broken = [part.copy() for part in latents[0].arrays.values()]
    broken[0][:, 40] = value
    code2wav.add(job())
    code2wav.push(
        "r", Piece("talker", 0, 1, True, latents[0].body, dict(zip(("z", "f0", "heard"), broken, strict=True)))
    )
    code2wav.add(job("other"))
    for latent in latents:
        code2wav.push("other", as_piece(latent))
    results = []
    while code2wav.busy:
        results += code2wav.step(frozenset())
    failures = [result for result in results if isinstance(result, Failure)]
    assert [(f.request_id, f.code, f.status) for f in failures] == [("r", "numerical_error", 500)]
    assert results[-1].request_id == "other" and isinstance(results[-1], Output) and results[-1].last
    monkeypatch.setattr(
        talker._model, "_session", SimpleNamespace(run=lambda names, feed: [part[None] for part in broken[:2]])
    )
    talker.add(job())
    talker.push("r", Piece("thinker", 0, 1, True, Text(text=PARIS)))
    (failure,) = talker.step(frozenset())
    assert isinstance(failure, Failure) and failure.code == "numerical_error"


def test_wrong_input_is_refused(talker: Onnx, code2wav: Onnx) -> None:
    for engine, body in ((talker, Latent()), (code2wav, Text(text="x"))):
        engine.add(job())
        with pytest.raises(OmniError):
            engine.push("r", Piece("x", 0, 1, True, body))
        engine.cancel("r")


def test_an_error_in_a_model_fails_its_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        ready = True

        def __init__(self, job: Job) -> None:
            self.job = job

        def push(self, piece: Piece) -> None: ...

        def advance(self) -> Output | None:
            if self.job.seed:
                raise ZeroDivisionError("by zero")
            return Output(self.job.request_id, 0, 1, last=True)

    class Model:
        def load(self, context: LoadContext) -> None: ...

        def open(self, job: Job) -> Task:
            return Task(job)

    monkeypatch.setitem(sys.modules, "omni_worker.models.rig", SimpleNamespace(Model=Model))
    engine = Onnx()
    engine.load(context("rig"))
    for name, seed in (("bad", 1), ("good", 0)):
        engine.add(job(name, seed=seed))
        engine.push(name, Piece("x", 0, 1, True, None))
    bad, good = engine.step(frozenset())[0], engine.step(frozenset())[0]
    assert bad == Failure("bad", "ZeroDivisionError: by zero")
    assert good == Output("good", 0, 1, last=True)
    assert not engine.busy
    engine.close()


@pytest.mark.parametrize("model", ["", "hibari-talker", "../x", "os.path"])
def test_a_model_is_a_module_of_models(model: str) -> None:
    with pytest.raises(ValueError, match=r"omni_worker\.models"):
        Onnx().load(context(model))
