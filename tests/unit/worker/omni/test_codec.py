"""The codec engine: what is decoded together, in turns, and where chunks end; and Qwen3-Omni's decoder behind it."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni_common.errors import OmniError
from omni_common.frames import Codes
from omni_common.params import Voiced
from omni_worker.engine import Failure, Job, Output, Piece
from omni_worker.engines.codec import Codec
from unit.worker.omni import fake_sound
from unit.worker.omni.driving import NOBODY, context
from unit.worker.omni.fake_sound import BAD_CODE, NO_NUMBER, RATE, ends, sound

SLOTS = 8


class Driver:
    """A codec engine, and what came out by request."""

    def __init__(self, engine: Codec) -> None:
        self.engine = engine
        self.outputs: dict[str, list[Output]] = {}
        self.failures: dict[str, Failure] = {}
        self._positions: dict[str, int] = {}

    def add(self, name: str, **params: Any) -> None:
        self.engine.add(Job(name, 1, Voiced(**params), ("talker",), ("client",)))
        self._positions[name] = 0

    def push(self, name: str, frames: list[Any], last: bool = False) -> None:
        start = self._positions[name]
        self._positions[name] = start + len(frames)
        groups = [frame if isinstance(frame, list) else [frame] for frame in frames]
        self.engine.push(name, Piece("talker", start, start + len(frames), last, Codes(groups) if frames else None))

    def ask(self, name: str, frames: list[Any]) -> None:
        self.add(name)
        self.push(name, frames, last=True)

    def step(self, blocked: frozenset[str] = NOBODY) -> list[str]:
        """Names of who has got something."""
        results = self.engine.step(blocked)
        for result in results:
            name = result.request_id
            assert name not in blocked and name not in self.failures
            if isinstance(result, Failure):
                self.failures[name] = result
                continue
            kept = self.outputs.setdefault(name, [])
            assert not (kept and kept[-1].last)
            assert result.start == (kept[-1].end if kept else 0)
            assert result.end - result.start == len(result.arrays["samples"])
            assert result.body.rate == RATE  # type: ignore[union-attr]
            kept.append(result)
        return [result.request_id for result in results]

    def run(self, blocked: frozenset[str] = NOBODY) -> None:
        for _ in range(2000):
            if not self.engine.busy:
                return
            self.step(blocked)
        raise AssertionError("the engine is busy with nothing")

    def samples(self, name: str) -> list[float]:
        return [float(sample) for output in self.outputs[name] for sample in output.arrays["samples"]]

    def chunks(self, name: str) -> list[int]:
        """Where they end, in samples."""
        return [output.end for output in self.outputs[name] if len(output.arrays["samples"])]


@pytest.fixture(scope="module")
def make_driver() -> Iterator[Any]:
    def make(**options: Any) -> Driver:
        engine = Codec()
        engine.load(context(SLOTS, **({"part": fake_sound.PART} | options)))
        return Driver(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, f"omni_worker.models.{fake_sound.PART}", fake_sound.module())
        yield make


@pytest.fixture
def driver(make_driver: Any) -> Iterator[Driver]:
    made = make_driver(batch=3)
    yield made
    for name in list(made._positions):
        made.engine.cancel(name)
    assert not made.engine.busy and not made.engine._jobs
    made.engine.close()


def frames(number: int, count: int) -> list[int]:
    return [(number * 37 + at * 11) % 800 + 1 for at in range(count)]


@settings(max_examples=150)
@given(
    count=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    steps=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    end_apart=st.booleans(),
)
def test_chunks_end_by_position_however_the_frames_come(
    make_driver: Any, count: Any, cuts: Any, steps: Any, end_apart: Any
) -> None:
    driver, codes = make_driver(), frames(1, count)
    driver.add("a")
    bounds = sorted({min(cut, count) for cut in cuts} | {0, count})
    pieces = [codes[start:end] for start, end in pairwise(bounds)]
    for number, piece in enumerate(pieces):
        driver.push("a", piece, last=number == len(pieces) - 1 and not end_apart)
        for _ in range(steps[number]):
            driver.step()
    if end_apart or not pieces:
        driver.push("a", [], last=True)
    driver.run()
    assert driver.samples("a") == sound(codes, 0, count)
    assert driver.chunks("a") == [2 * end for end in ends(count)]
    assert [output.last for output in driver.outputs["a"]].count(True) == 1
    assert driver.outputs["a"][-1].last
    assert not driver.engine._jobs


def test_an_empty_speech_says_its_end(driver: Any) -> None:
    driver.ask("a", [])
    assert driver.engine.busy
    assert driver.step() == ["a"]
    (output,) = driver.outputs["a"]
    assert (output.start, output.end, output.last, len(output.arrays["samples"])) == (0, 0, True, 0)
    assert not driver.engine.busy


def test_an_end_that_comes_alone(driver: Any) -> None:
    driver.add("a")
    driver.push("a", frames(1, 5))
    driver.run()
    assert not driver.outputs["a"][-1].last
    assert not driver.engine.busy
    driver.push("a", [], last=True)
    assert driver.engine.busy
    driver.run()
    assert (driver.outputs["a"][-1].last, len(driver.outputs["a"][-1].arrays["samples"])) == (True, 0)


def test_fewer_frames_than_a_chunk(driver: Any) -> None:
    driver.add("a")
    driver.push("a", [5])
    assert not driver.engine.busy
    assert driver.step() == []
    driver.push("a", [], last=True)
    driver.run()
    assert driver.samples("a") == sound([5], 0, 1)


def test_a_step_takes_a_batch_and_turns_are_fair(driver: Any) -> None:
    """No one waits longer than the others need for a turn each, however much one has to say."""
    names = [str(number) for number in range(7)]
    driver.ask("0", frames(0, 200))
    driver.step()
    for name in names[1:]:
        driver.ask(name, frames(int(name), 40))
    turns = [name for _ in range(10) for name in driver.step()]
    for at in range(0, 28 - 7, 7):
        assert sorted(turns[at : at + 7]) == names
    assert all(len(batch) <= 3 for batch in driver.engine._model.batches)
    driver.run()
    for name in names:
        count = 200 if name == "0" else 40
        assert driver.samples(name) == sound(frames(int(name), count), 0, count)


def test_blocked_ones_hold_only_themselves(driver: Any) -> None:
    for name in "abcd":
        driver.ask(name, frames(ord(name), 20))
    blocked = frozenset("abc")
    for _ in range(20):
        driver.step(blocked)
    assert driver.samples("d") == sound(frames(ord("d"), 20), 0, 20)
    assert set(driver.outputs) == {"d"}
    batches = len(driver.engine._model.batches)
    assert driver.step(blocked) == []
    assert len(driver.engine._model.batches) == batches
    driver.run()
    for name in "abc":
        assert driver.samples(name) == sound(frames(ord(name), 20), 0, 20)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_cancelled_at_any_time(driver: Any, after: Any) -> None:
    driver.ask("a", frames(1, 20))
    driver.ask("b", frames(2, 20))
    for _ in range(after):
        driver.step()
    driver.engine.cancel("a")
    driver.engine.cancel("a")
    driver.engine.cancel("never")
    mark = len(driver.outputs.get("a", []))
    driver.run()
    assert len(driver.outputs.get("a", [])) == mark
    assert driver.samples("b") == sound(frames(2, 20), 0, 20)


@pytest.mark.parametrize(("bad", "code"), [(BAD_CODE, "engine_error"), (NO_NUMBER, "numerical_error")])
@pytest.mark.parametrize("at", [0, 7])
def test_one_that_breaks_fails_alone(driver: Any, bad: Any, code: Any, at: Any) -> None:
    codes = frames(1, 20)
    codes[at] = bad
    driver.ask("good", frames(2, 20))
    driver.ask("bad", codes)
    driver.ask("other", frames(3, 20))
    driver.run()
    assert driver.failures["bad"].code == code
    assert set(driver.failures) == {"bad"}
    assert driver.samples("good") == sound(frames(2, 20), 0, 20)
    assert driver.samples("other") == sound(frames(3, 20), 0, 20)
    assert bool(driver.outputs.get("bad")) == (at > 0)


def test_busy_exactly_while_there_is_work(driver: Any) -> None:
    assert not driver.engine.busy
    driver.add("a")
    assert not driver.engine.busy
    driver.push("a", [1])
    assert not driver.engine.busy
    driver.push("a", [2])
    assert driver.engine.busy
    driver.step()
    assert not driver.engine.busy
    driver.push("a", frames(1, 3))
    driver.engine.cancel("a")
    assert not driver.engine.busy


def test_what_cannot_be_served(driver: Any, make_driver: Any) -> None:
    with pytest.raises(OmniError, match="voice"):
        driver.add("a", voice="nobody")
    with pytest.raises(ValueError, match="part"):
        make_driver(part="os.path")


# ----------------------------------------------------------------------------------------- Qwen3-Omni's decoder

GROUPS, CODES = 4, 64


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Any:
    """The library's decoder."""
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny / "whole" / "qwen3_omni_tiny")
    # Weights that lie in the mapped file are not aligned, and then some kernels round differently.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval().code2wav


def codec(tiny: Path, **options: Any) -> Driver:
    engine = Codec()
    engine.load(context(SLOTS, "qwen3_omni_tiny", str(tiny), part="qwen3_omni_code2wav", **options))
    return Driver(engine)


@pytest.fixture(scope="module")
def ramp(tiny: Path) -> Driver:
    return codec(tiny, chunk_frames=[3, 5, 7])


def speech(seed: int, count: int) -> list[list[int]]:
    drawn: list[list[int]] = np.random.default_rng(seed).integers(0, CODES, (count, GROUPS)).tolist()
    return drawn


def decoded(whole: Any, codes: list[list[int]]) -> np.ndarray:
    with torch.inference_mode():
        wave: np.ndarray = whole(torch.tensor(codes).T[None]).reshape(-1).numpy()
    return wave


def joined(driver: Driver, name: str) -> np.ndarray:
    return np.concatenate([output.arrays["samples"] for output in driver.outputs[name]])


@settings(max_examples=15)
@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    data=st.integers(0, 99),
)
def test_chunks_joined_are_the_whole_decode(ramp: Any, whole: Any, counts: Any, order: Any, data: Any) -> None:
    """Several at a time, their frames in pieces that come in any order: length to the sample, values to 1e-5."""
    speeches = {f"{data}-{number}": speech(data + number, count) for number, count in enumerate(counts)}
    left = {name: list(codes) for name, codes in speeches.items()}
    for name in speeches:
        ramp.outputs.pop(name, None)
        ramp.add(name)
    while left:
        name = order.choice(sorted(left))
        count = order.randint(1, 9)
        ramp.push(name, left[name][:count], last=count >= len(left[name]))
        left[name] = left[name][count:]
        if not left[name]:
            del left[name]
        for _ in range(order.randint(0, 2)):
            ramp.step()
    ramp.run()
    for name, codes in speeches.items():
        expected, found = decoded(whole, codes), joined(ramp, name)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= 1e-5


def test_longer_than_all_that_a_frame_can_see(ramp: Any, whole: Any) -> None:
    codes = speech(7, 330)
    ramp.ask("long", codes)
    ramp.run()
    expected = decoded(whole, codes)
    assert np.abs(joined(ramp, "long") - expected).max() <= 1e-5


def test_not_streamed_is_the_whole_decode_bit_for_bit(tiny: Any, whole: Any) -> None:
    driver = codec(tiny, stream=False)
    for name, count in (("a", 1), ("b", 23), ("c", 70)):
        driver.add(name)
        driver.push(name, speech(count, count))
        assert not driver.engine.busy
        driver.push(name, [], last=True)
        driver.run()
        assert np.array_equal(joined(driver, name), decoded(whole, speech(count, count)))


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_chunks_of_no_frames(tiny: Any, sizes: Any) -> None:
    with pytest.raises(ValueError, match="chunk_frames"):
        codec(tiny, chunk_frames=sizes)
