"""The `vllm` engine against the library's `generate` and against the `transformers` engine, which is equal to it.

Tiny random models on the CPU in float32, greedy: ids are equal for every kind of prompt, alone, together, and when the
stage starts over; what a talker hears differs by less than 1e-4, and its codes are equal. Needs vLLM, which is not part
of what CI installs.
"""

import importlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from omni_common.frames import Codes, Decision, Features
from omni_common.params import Generation, NoParams
from omni_worker.engine import Engine, Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.autoregressive import Autoregressive
from omni_worker.engines.processor import Processor
from parity.conftest import FAMILIES
from parity.library import ASKED

with warnings.catch_warnings():
    # Its own, of what it imports.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    vllm_engine = importlib.import_module("omni_worker.engines.vllm_engine")

# Keeps a lock and a thread from its first use on.
tqdm.tqdm(disable=True).close()

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENS, FRAMES = 12, 24
#: Of tensors, of their largest value.
TOLERANCE = 1e-4


def load(engine: Engine, models: Path, name: str, **options: Any) -> Engine:
    engine.load(LoadContext(name, options, str(models), 8, 1, lambda *_: None, lambda: None))
    return engine


def run(engine: Engine, jobs: Iterable[tuple[Job, list[Piece]]]) -> dict[str, list[Output]]:
    """All at a time."""
    outputs: dict[str, list[Output]] = {}
    for job, pieces in jobs:
        engine.add(job)
        for piece in pieces:
            engine.push(job.request_id, piece)
    while engine.busy:
        for output in engine.step(frozenset()):
            assert isinstance(output, Output), output
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def of(outputs: list[Output], sink: str) -> list[Output]:
    return [output for output in outputs if output.sinks is None or sink in output.sinks]


def ids_of(outputs: list[Output]) -> list[int]:
    return [token for output in of(outputs, "client") for token in output.body.ids]


# ------------------------------------------------------------------------------------------------------ plain text


@pytest.fixture(scope="module")
def text_model(checkpoints: Path) -> tuple[Path, Qwen2ForCausalLM]:
    """A tiny Qwen2 with the tokenizer of the omni models."""
    folder = checkpoints / "models" / "qwen2_tiny"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoints / "qwen3_omni_tiny")
    torch.manual_seed(0)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = Qwen2Config(
        vocab_size=352,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=end,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.3 if "layers" in name else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="class")
def plain(text_model: tuple[Path, Any]) -> Iterator[Engine]:
    folder, _ = text_model
    engine = load(vllm_engine.Vllm(), folder.parent, folder.name, context=256, kv_cache_mib=64)
    yield engine
    engine.close()


def prompt(number: int) -> list[int]:
    chance = np.random.default_rng(number)
    ids: list[int] = chance.integers(3, 250, 5 + 11 * number).tolist()
    return ids


def ask(name: str, ids: list[int], seed: int = 7, resume: tuple[Decision, ...] = (), **params: Any) -> Any:
    job = Job(name, seed, Generation(**{"max_tokens": 24, **params}), ("client",), ("client",), resume=resume)
    return job, [Piece("client", 0, 1, True, Features(), {"ids": np.array(ids, np.int64)})]


def generate(model: Any, ids: list[int], tokens: int = 24) -> list[int]:
    said = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    found: list[int] = said[0, len(ids) :].tolist()
    return found


def advance(engine: Engine, steps: int) -> list[Output | Failure]:
    return [output for _ in range(steps) for output in engine.step(frozenset())]


def decisions(outputs: list[Output], count: int) -> tuple[Decision, ...]:
    return tuple(Decision(o.start, o.end, o.last, o.body) for o in of(outputs, "client")[:count])


class TestText:
    """vLLM has one engine a process, so it lives as long as the class."""

    def test_greedy_ids_are_those_of_the_library(self, plain: Engine, text_model: tuple[Path, Any]) -> None:
        expected = {str(number): generate(text_model[1], prompt(number)) for number in range(8)}
        for name, ids in expected.items():
            assert ids_of(run(plain, [ask(name, prompt(int(name)))])[name]) == ids
        found = run(plain, [ask(name, prompt(int(name))) for name in expected])
        assert {name: ids_of(outputs) for name, outputs in found.items()} == expected
        assert {outputs[-1].body.finish for outputs in found.values()} <= {"stop", "length"}

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 1.3, "top_k": 5, "min_p": 0.05},
            {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
            {"repetition_penalty": 1.5, "presence_penalty": 1.0},
            {"temperature": 1.5, "min_tokens": 24, "ignore_eos": True},
        ],
    )
    def test_sampling_depends_on_the_request_alone(self, plain: Engine, params: dict[str, Any]) -> None:
        alone = [run(plain, [ask("a", prompt(number), number, **params)])["a"] for number in range(4)]
        mixed = [ask(str(number), prompt(number), number, **params) for number in range(4)]
        mixed += [ask("greedy", prompt(5)), ask("other", prompt(6), temperature=2.0)]
        together = run(plain, mixed)
        for number, outputs in enumerate(alone):
            ids = ids_of(outputs)
            assert ids_of(together[str(number)]) == ids
            for count in {0, 1, len(ids) // 2, len(ids) - 1}:
                again = ask("b", prompt(number), number, decisions(outputs, count), **params)
                resumed = run(plain, [again])["b"]
                assert [output.body for output in resumed] == [output.body for output in outputs]
        seeded = run(plain, [ask("a", prompt(1), 99, **params)])["a"]
        assert (ids_of(seeded) == ids_of(alone[1])) == ("temperature" not in params)

    def test_a_seed_of_the_parameters_comes_before_that_of_the_job(self, plain: Engine) -> None:
        found = []
        for seed, own in ((1, 9), (2, 9), (9, None)):
            params = Generation(max_tokens=24, temperature=1.0, seed=own)
            job, pieces = ask("a", prompt(1))
            found.append(ids_of(run(plain, [(replace(job, seed=seed, params=params), pieces)])["a"]))
        assert found[0] == found[1] == found[2]

    def test_positions_have_no_gaps_and_the_end_is_said_once(self, plain: Engine) -> None:
        outputs = run(plain, [ask("a", prompt(2), max_tokens=9)])["a"]
        assert [(output.start, output.end) for output in outputs] == [(n, n + 1) for n in range(len(outputs))]
        assert [output.last for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].body.prompt_tokens == len(prompt(2))

    def test_an_answer_ends_with_a_stop_string_or_token(self, plain: Engine) -> None:
        free = run(plain, [ask("a", prompt(3), ignore_eos=True)])["a"]
        said = "".join(output.body.text for output in free)
        assert len(said) > 8
        stop = said[4:7]
        ended = run(plain, [ask("a", prompt(3), ignore_eos=True, stop=[stop])])["a"]
        assert "".join(output.body.text for output in ended) == said[: said.index(stop)]
        assert ended[-1].body.finish == "stop"
        token = ids_of(free)[5]
        ended = run(plain, [ask("a", prompt(3), ignore_eos=True, stop_token_ids=[token])])["a"]
        assert ids_of(ended) == ids_of(free)[: ids_of(free).index(token) + 1]
        ended = run(plain, [ask("a", prompt(3), ignore_eos=True, stop_token_ids=[token], min_tokens=12)])["a"]
        assert len(ended) >= 12

    def test_what_ended_before_is_not_computed_again(self, plain: Engine) -> None:
        outputs = run(plain, [ask("a", prompt(4))])["a"]
        again = run(plain, [ask("b", prompt(4), resume=decisions(outputs, len(outputs)))])["b"]
        assert [output.body for output in again] == [output.body for output in outputs]

    def test_a_cancelled_job_says_no_more_and_the_others_go_on(self, plain: Engine) -> None:
        expected = ids_of(run(plain, [ask("kept", prompt(1), ignore_eos=True)])["kept"])
        for name, number in (("kept", 1), ("gone", 2), ("never", 3)):
            job, pieces = ask(name, prompt(number), ignore_eos=True)
            plain.add(job)
            for piece in pieces:
                plain.push(name, piece)
        plain.cancel("never")
        begun = advance(plain, 5)
        plain.cancel("gone")
        plain.cancel("gone")
        plain.cancel("unknown")
        outputs = begun + advance(plain, 40)
        of_job = {name: [o for o in outputs if o.request_id == name] for name in ("kept", "gone", "never")}
        assert ids_of(of_job["kept"]) == expected
        assert len(of_job["gone"]) == len(begun) // 2 > 0
        assert not of_job["never"]
        assert not plain.busy

    def test_a_blocked_job_keeps_what_it_says(self, plain: Engine) -> None:
        expected = ids_of(run(plain, [ask("a", prompt(1))])["a"])
        job, (piece,) = ask("a", prompt(1))
        plain.add(job)
        assert not plain.busy
        plain.push("a", piece)
        assert plain.busy
        assert [output for _ in range(40) for output in plain.step(frozenset({"a"}))] == []
        assert plain.busy
        assert ids_of(advance(plain, 1)) == expected
        assert not plain.busy

    def test_a_prompt_that_does_not_fit_fails_alone(self, plain: Engine) -> None:
        outputs: list[Output | Failure] = []
        for name, ids in (("long", [5] * 256), ("strange", [5, 100_000]), ("good", prompt(1))):
            job, (piece,) = ask(name, ids)
            plain.add(job)
            plain.push(name, piece)
        while plain.busy:
            outputs += plain.step(frozenset())
        failures = {output.request_id: output for output in outputs if isinstance(output, Failure)}
        assert failures.keys() == {"long", "strange"}
        assert (failures["long"].status, failures["long"].code) == (400, "context_length_exceeded")
        assert failures["strange"].status == 400
        assert any(output.request_id == "good" and output.last for output in outputs if isinstance(output, Output))

    def test_an_answer_ends_with_the_context(self, plain: Engine) -> None:
        outputs = run(plain, [ask("a", [5] * 250, max_tokens=100, ignore_eos=True)])["a"]
        assert len(outputs) == 6
        assert outputs[-1].body.finish == "length"


# ------------------------------------------------------------------------------------------------------ the thinkers


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def prepared(checkpoints: Path) -> Path:
    return checkpoints / "models"


@pytest.fixture(scope="module")
def features(family: str, prepared: Path) -> dict[str, Piece]:
    """What the preprocessor makes of each conversation."""
    engine = load(Processor(), prepared, f"{family}_tiny")
    found = {}
    for name, asked in ASKED.items():
        job = Job(name, 1, NoParams(), ("client",), ("thinker",))
        pieces = [Piece("client", g.start, g.end, g.last, g.body, g.arrays) for g in asked.given()]
        (output,) = run(engine, [(job, pieces)])[name]
        found[name] = Piece("preprocessor", 0, 1, True, output.body, output.arrays)
    engine.close()
    return found


@pytest.fixture(scope="class")
def thinker(family: str, prepared: Path) -> Iterator[Engine]:
    engine = load(vllm_engine.Vllm(), prepared, f"{family}_tiny", feeds_talker=True, kv_cache_mib=64)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def talker(family: str, prepared: Path) -> Iterator[Engine]:
    engine = load(Autoregressive(), prepared, f"{family}_tiny", part=f"{family}_talker")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(family: str, prepared: Path, features: dict[str, Piece]) -> dict[str, list[Output]]:
    """By the `transformers` engine."""
    engine = load(Autoregressive(), prepared, f"{family}_tiny", part=f"{family}_thinker", prefix_cache=False)
    found = {name: run(engine, [think(name, piece)])[name] for name, piece in features.items()}
    engine.close()
    return found


def think(name: str, piece: Piece, resume: tuple[Decision, ...] = (), **params: Any) -> tuple[Job, list[Piece]]:
    wanted = Generation(**{"max_tokens": TOKENS, **params})
    return Job(name, 7, wanted, ("preprocessor",), ("client", "talker"), resume=resume), [piece]


def talk(name: str, thought: list[Output]) -> tuple[Job, list[Piece]]:
    params = Generation(max_tokens=FRAMES, voice="ethan", repetition_penalty=1.05)
    pieces = [Piece("thinker", o.start, o.end, o.last, o.body, o.arrays) for o in of(thought, "talker")]
    return Job(name, 7, params, ("thinker",), ("code2wav",)), pieces


def codes_of(outputs: list[Output]) -> list[list[int]]:
    return [frame for output in outputs if isinstance(output.body, Codes) for frame in output.body.frames]


def assert_equal(found: list[Output], expected: list[Output], name: str) -> None:
    """The same for every sink, in whatever order between them; tensors within the tolerance."""
    for sink in ("client", "talker"):
        ours, theirs = of(found, sink), of(expected, sink)
        assert [output.body for output in ours] == [output.body for output in theirs], name
        for one, other in zip(ours, theirs, strict=True):
            assert (one.start, one.end, one.last) == (other.start, other.end, other.last), name
            assert one.arrays.keys() == other.arrays.keys(), name
            for key, array in one.arrays.items():
                assert (array.dtype, array.shape) == (other.arrays[key].dtype, other.arrays[key].shape), (name, key)
                most = TOLERANCE * max(1.0, np.abs(array).max(initial=0.0))
                np.testing.assert_allclose(array, other.arrays[key], rtol=0, atol=most, err_msg=f"{name} {key}")


class TestThinkers:
    """One family after the other, each as long as it is asked."""

    def test_what_is_said_and_heard_is_as_in_the_library(
        self,
        family: str,
        thinker: Engine,
        talker: Engine,
        features: dict[str, Piece],
        expected: dict[str, list[Output]],
    ) -> None:
        for name, piece in features.items():
            found = run(thinker, [think(name, piece)])[name]
            assert_equal(found, expected[name], name)
            spoken = run(talker, [talk("ours", found), talk("theirs", expected[name])])
            assert codes_of(spoken["ours"]) == codes_of(spoken["theirs"]), name

    def test_together(self, thinker: Engine, features: dict[str, Piece], expected: dict[str, list[Output]]) -> None:
        found = run(thinker, [think(name, piece) for name, piece in features.items()])
        for name, outputs in found.items():
            assert_equal(outputs, expected[name], name)

    def test_a_thinker_that_starts_over(
        self, thinker: Engine, features: dict[str, Piece], expected: dict[str, list[Output]]
    ) -> None:
        for name in ("text", "several"):
            whole = of(expected[name], "client")
            for count in (1, len(whole) // 2, len(whole) - 1, len(whole)):
                resume = tuple(Decision(o.start, o.end, o.last, o.body) for o in whole[:count])
                found = run(thinker, [think(name, features[name], resume)])[name]
                assert_equal(found, expected[name], f"{name} after {count}")

    def test_a_cancelled_prompt_with_media(
        self, thinker: Engine, features: dict[str, Piece], expected: dict[str, list[Output]]
    ) -> None:
        for steps in range(4):
            job, pieces = think("gone", features["video"])
            thinker.add(job)
            thinker.push("gone", pieces[0])
            for _ in range(steps):
                thinker.step(frozenset())
            thinker.cancel("gone")
            assert not thinker.busy
        assert_equal(run(thinker, [think("a", features["video"])])["a"], expected["video"], "video")


class TestLittleMemory:
    @pytest.fixture(scope="class")
    def thinker(self, family: str, prepared: Path) -> Iterator[Any]:
        """Of 640 positions a job, with room for three such jobs at most."""
        engine = load(vllm_engine.Vllm(), prepared, f"{family}_tiny", context=640, kv_cache_mib=1)
        yield engine
        engine.close()

    def test_what_is_thrown_out_and_computed_again_is_the_same(
        self,
        thinker: Any,
        prepared: Path,
        family: str,
        features: dict[str, Piece],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        reference = load(Autoregressive(), prepared, f"{family}_tiny", part=f"{family}_thinker", context=640)
        (expected,) = run(reference, [think("a", features["long"], max_tokens=150, ignore_eos=True)]).values()
        reference.close()
        scheduler = thinker._vllm.engine_core.engine_core.scheduler
        preempt = Mock(wraps=scheduler._preempt_request)
        monkeypatch.setattr(scheduler, "_preempt_request", preempt)
        jobs = [think(str(number), features["long"], max_tokens=150, ignore_eos=True) for number in range(6)]
        found = run(thinker, jobs)
        assert preempt.called
        for outputs in found.values():
            assert_equal(outputs, expected, "long")
