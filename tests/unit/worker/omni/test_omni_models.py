"""Thinker, talker and code predictor of Qwen3-Omni in the engine, on a tiny random checkpoint.

Token ids and codes are equal alone, together, resumed and behind a prefix that is held; what a talker hears is equal to
1e-5, which is what the order of adding makes of float32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni_common.frames import CLIENT, Decision, Features
from omni_common.params import Generation
from omni_worker.engine import Arrays, Failure, Job, Output, Piece
from omni_worker.engines.autoregressive import Autoregressive
from omni_worker.models.omni_thinker import content_keys, starts
from omni_worker.models.qwen3_omni_predictor import Predictor
from unit.worker.omni.driving import NOBODY, context

TOLERANCE = 1e-5
SLOTS = 8
#: Ids of words in the tiny vocabulary.
WORDS = range(3, 250)


class Stage:
    """An engine, and what came out by request."""

    def __init__(self, tiny: Path, part: str, **options: Any) -> None:
        self.engine = Autoregressive()
        self.engine.load(context(SLOTS, "qwen3_omni_tiny", str(tiny), part=part, context=512, **options))
        self.outputs: dict[str, list[Output]] = {}
        self.failures: dict[str, Failure] = {}

    @property
    def model(self) -> Any:
        return self.engine._model

    def step(self) -> None:
        for result in self.engine.step(NOBODY):
            if isinstance(result, Failure):
                self.failures[result.request_id] = result
            else:
                self.outputs.setdefault(result.request_id, []).append(result)

    def run(self) -> None:
        for _ in range(3000):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError("the engine is busy with nothing")

    def forget(self) -> None:
        """Everything of everybody."""
        for name in list(self.engine._sequences):
            self.engine.cancel(name)
        self.outputs.clear()
        self.failures.clear()
        for slot in self.engine._slots:
            assert not slot.taken
            slot.held = []
        self.engine.hits = 0

    def of(self, name: str, sink: str) -> list[Output]:
        return [o for o in self.outputs.get(name, []) if o.sinks is None or sink in o.sinks]


# ------------------------------------------------------------------------------------------------------ the thinker


@pytest.fixture(scope="module")
def thinking(tiny: Path) -> Stage:
    return Stage(tiny, "qwen3_omni_thinker", prefill=32)


@pytest.fixture
def thinker(thinking: Stage) -> Iterator[Stage]:
    thinking.forget()
    yield thinking
    thinking.forget()


def words(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).choice(np.array(WORDS), count).tolist()
    return found


def think(
    stage: Stage,
    name: str,
    ids: list[int],
    *,
    heard: bool = True,
    resume: tuple[Decision, ...] = (),
    media: Arrays | None = None,
    digests: tuple[str, ...] = (),
    **params: Any,
) -> None:
    sinks = (CLIENT, "talker") if heard else (CLIENT,)
    job = Job(name, 5, Generation(**({"max_tokens": 10} | params)), ("preprocessor",), sinks, resume=resume)
    stage.engine.add(job)
    arrays = {"ids": np.array(ids, np.int64)} | (media or {})
    stage.engine.push(name, Piece("preprocessor", 0, 1, True, Features(list(digests)), arrays))


def thought(stage: Stage, name: str) -> list[int]:
    return [token for output in stage.of(name, CLIENT) for token in output.body.ids]  # type: ignore[union-attr]


def decisions(outputs: list[Output], count: int) -> tuple[Decision, ...]:
    return tuple(Decision(o.start, o.end, o.last, o.body) for o in outputs[:count])


def assert_heard_alike(found: list[Output], expected: list[Output]) -> None:
    assert [(o.start, o.end, o.last, o.body) for o in found] == [(o.start, o.end, o.last, o.body) for o in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        for key, array in one.arrays.items():
            assert array.shape == other.arrays[key].shape
            np.testing.assert_allclose(array, other.arrays[key], rtol=0, atol=TOLERANCE, err_msg=key)


def picture(seed: int) -> Arrays:
    """Of 4 x 6 patches: 6 positions of the prompt."""
    chance = np.random.default_rng(seed)
    pixels = chance.standard_normal((24, 3 * 2 * 16 * 16)).astype(np.float32)
    return {"pixel_values": pixels, "image_grid_thw": np.array([[1, 4, 6]])}


def with_picture(stage: Stage, seed: int, count: int) -> list[int]:
    config = stage.model.config
    ids = words(seed, count)
    ids[5:13] = [config.vision_start_token_id, *[config.image_token_id] * 6, config.vision_end_token_id]
    return ids


SAMPLED = {"temperature": 1.2, "top_p": 0.9, "seed": 3}


@pytest.mark.parametrize("params", [{}, SAMPLED, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}])
def test_eight_together_are_as_each_alone(thinker: Any, params: Any) -> None:
    alone = {}
    for number in range(8):
        think(thinker, str(number), words(number, 5 + 9 * number), **params)
        thinker.run()
        alone[str(number)] = thinker.outputs[str(number)]
    assert len({tuple(thought(thinker, name)) for name in alone}) >= 6
    thinker.forget()
    for number in reversed(range(8)):
        think(thinker, str(number), words(number, 5 + 9 * number), **params)
        thinker.step()
    thinker.run()
    for name, outputs in alone.items():
        assert_heard_alike(thinker.of(name, "talker"), [o for o in outputs if "talker" in o.sinks])
        assert thought(thinker, name) == [t for o in outputs if CLIENT in o.sinks for t in o.body.ids]


def test_resumed_after_every_token(thinker: Any) -> None:
    ids = with_picture(thinker, 2, 40)
    think(thinker, "whole", ids, media=picture(1), digests=("one",), **SAMPLED)
    thinker.run()
    said, heard = thinker.of("whole", CLIENT), thinker.of("whole", "talker")
    for at in range(len(said) + 1):
        thinker.forget()
        think(thinker, "again", ids, media=picture(1), digests=("one",), resume=decisions(said, at), **SAMPLED)
        thinker.run()
        assert_heard_alike(thinker.of("again", CLIENT), said)
        assert_heard_alike(thinker.of("again", "talker"), heard)


@pytest.mark.parametrize("first_heard", [True, False])
@pytest.mark.parametrize("media", [True, False])
def test_a_prefix_that_is_held_says_what_it_says_computed_anew(thinker: Any, media: Any, first_heard: Any) -> None:
    """A second turn; also behind a first that no talker heard, which leaves nothing of what talkers hear."""
    first = with_picture(thinker, 6, 45) if media else words(4, 45)
    beside: dict[str, Any] = {"media": picture(1), "digests": ("one",)} if media else {}
    # Somebody else's states lie in the slot before.
    think(thinker, "stranger", words(99, 80))
    thinker.run()
    think(thinker, "first", first, heard=first_heard, **beside)
    thinker.run()
    config = thinker.model.config
    assert not {config.image_token_id, config.video_token_id} & set(thought(thinker, "first"))
    second = first + thought(thinker, "first") + words(5, 12)
    think(thinker, "second", second, **beside)
    thinker.run()
    assert thinker.engine.hits == first_heard
    held = thinker.outputs["second"]
    thinker.forget()
    think(thinker, "second", second, **beside)
    thinker.run()
    assert thinker.engine.hits == 0
    assert_heard_alike(held, thinker.outputs["second"])


def test_other_pictures_share_nothing_behind_them(thinker: Any) -> None:
    """The same ids and the same shape: only what they show differs."""
    ids = with_picture(thinker, 4, 60)
    think(thinker, "one", ids, media=picture(1), digests=("one",))
    thinker.run()
    think(thinker, "other", ids, media=picture(2), digests=("two",))
    thinker.run()
    assert thinker.engine.hits == 0
    held = thinker.outputs["other"]
    think(thinker, "one again", ids, media=picture(1), digests=("one",))
    thinker.run()
    assert thinker.engine.hits == 1
    assert thought(thinker, "one again") == thought(thinker, "one")
    thinker.forget()
    think(thinker, "other", ids, media=picture(2), digests=("two",))
    thinker.run()
    assert_heard_alike(held, thinker.outputs["other"])


def test_keys_tell_apart_content_and_place_within_it() -> None:
    ids = torch.tensor([1, 7, 7, 2, 7, 7, 3])
    media = ids == 7
    at = starts(media)
    assert at == [1, 4]
    keys = content_keys(ids, media, ["one", "two"], at)
    assert [keys[place] for place in (0, 3, 6)] == [1, 2, 3]
    assert len(set(keys)) == 7 and all(key < 0 for key in np.array(keys)[media.numpy()])
    assert content_keys(ids, media, ["one", "three"], at)[:4] == keys[:4]
    assert content_keys(ids, media, ["one", "three"], at)[4] != keys[4]
    # Runs that are not one an item: all of them hang on all items.
    several = content_keys(ids, media, ["one"], at)
    assert not set(several) & set(keys) - {1, 2, 3}
    assert len(set(several)) == 7


def test_bad_prompts_and_parameters_fail_alone(thinker: Any) -> None:
    think(thinker, "good", words(1, 20))
    thinker.run()
    expected = thought(thinker, "good")
    thinker.forget()
    think(thinker, "good", words(1, 20))
    think(thinker, "long", words(2, 513))
    think(thinker, "no word", [*words(3, 9), 10**6])
    think(
        thinker,
        "no picture",
        with_picture(thinker, 4, 40),
        media=picture(1) | {"image_grid_thw": np.array([[1, 2, 2]])},
    )
    think(thinker, "empty", [])
    # Ids that there are not, where they would be looked up in the scores.
    think(thinker, "no id", words(1, 20), min_tokens=5, stop_token_ids=[10**6, 2**31 - 1])
    thinker.run()
    assert thinker.failures.keys() == {"long", "no word", "no picture", "empty"}
    assert (thinker.failures["long"].code, thinker.failures["long"].status) == ("context_length_exceeded", 400)
    assert thought(thinker, "good") == thought(thinker, "no id") == expected


def test_states_that_are_no_numbers_fail_alone_and_leave_nothing(thinker: Any) -> None:
    """A picture of no numbers: the encoder hands them to the decoder, and keys and values are none."""
    broken = picture(1)
    broken["pixel_values"][3] = np.nan
    ids = with_picture(thinker, 4, 60)
    think(thinker, "good", words(1, 20))
    think(thinker, "bad", ids, media=broken, digests=("one",))
    thinker.run()
    assert {name: failure.code for name, failure in thinker.failures.items()} == {"bad": "numerical_error"}
    good = thought(thinker, "good")
    for number in range(8):
        think(thinker, str(number), words(1, 20 - number))
    thinker.run()
    assert thinker.failures.keys() == {"bad"}
    assert thought(thinker, "0") == good


def test_a_prompt_at_the_end_of_the_context(thinker: Any) -> None:
    think(thinker, "all", words(1, 512), max_tokens=50)
    think(thinker, "nearly", words(2, 509), max_tokens=50)
    thinker.run()
    assert (len(thought(thinker, "all")), len(thought(thinker, "nearly"))) == (1, 4)
    for name in ("all", "nearly"):
        assert thinker.of(name, CLIENT)[-1].body.finish == "length"
        assert [output.last for output in thinker.of(name, "talker")][-1]


# ------------------------------------------------------------------------------------------------------- the talker


@pytest.fixture(scope="module")
def speaking(tiny: Path) -> Stage:
    return Stage(tiny, "qwen3_omni_talker", prefill=32)


@pytest.fixture
def talker(speaking: Stage) -> Iterator[Stage]:
    speaking.forget()
    yield speaking
    speaking.forget()


FRAMES = 24
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.9, "top_k": 50}


@pytest.fixture(scope="module")
def texts(thinking: Stage) -> list[list[Piece]]:
    """What the thinker says to a talker of eight answers."""
    thinking.forget()
    found = []
    for number in range(8):
        ids = _conversation(thinking.model, number)
        think(thinking, str(number), ids, max_tokens=4 + number, ignore_eos=True)
        thinking.run()
        found.append(
            [Piece("thinker", o.start, o.end, o.last, o.body, o.arrays) for o in thinking.of(str(number), "talker")]
        )
    thinking.forget()
    return found


def _conversation(model: Any, number: int) -> list[int]:
    """A user's turn, and the beginning of the answer."""
    tokens = model._tokenizer
    text = "<|im_start|>user\n" + "Tell me a story. " * (number + 1) + "<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokens.encode(text, add_special_tokens=False).ids
    return ids


def speak(stage: Stage, name: str, resume: tuple[Decision, ...] = (), **params: Any) -> None:
    settings = {"max_tokens": FRAMES, "repetition_penalty": 1.05, "voice": "ethan"} | params
    stage.engine.add(Job(name, 5, Generation(**settings), ("thinker",), ("code2wav",), resume=resume))


def hear(stage: Stage, name: str, pieces: list[Piece]) -> None:
    """What of it comes before the end."""
    for piece in pieces:
        if name in stage.engine._sequences:
            stage.engine.push(name, piece)


def spoken(stage: Stage, name: str) -> tuple[list[list[int]], str]:
    outputs = stage.outputs[name]
    assert [output.last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return [frame for o in outputs for frame in o.body.frames], outputs[-1].body.finish  # type: ignore[union-attr]


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_eight_speak_together_as_each_alone(talker: Any, texts: Any, params: Any) -> None:
    alone = []
    for number, pieces in enumerate(texts):
        speak(talker, str(number), **params)
        hear(talker, str(number), pieces)
        talker.run()
        alone.append(spoken(talker, str(number)))
    assert sum(len(frames) > 10 for frames, _ in alone) >= 4
    talker.forget()
    # The text comes in turns, a word each, with steps between.
    for number in range(8):
        speak(talker, str(number), **params)
    for at in range(max(map(len, texts))):
        for number, pieces in enumerate(texts):
            hear(talker, str(number), pieces[at : at + 1])
        if at % 3:
            talker.step()
    talker.run()
    assert [spoken(talker, str(number)) for number in range(8)] == alone


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_a_speech_resumed_after_every_frame(talker: Any, texts: Any, params: Any) -> None:
    pieces = texts[5]
    speak(talker, "whole", **params)
    hear(talker, "whole", pieces)
    talker.run()
    expected, outputs = spoken(talker, "whole"), talker.outputs["whole"]
    assert len(expected[0]) > 10
    for at in range(len(outputs) + 1):
        talker.forget()
        speak(talker, "again", decisions(outputs, at), **params)
        # Of the text only what must be there for the frames that are known; then the rest.
        hear(talker, "again", pieces[: 1 + at // 4])
        talker.run()
        hear(talker, "again", pieces[1 + at // 4 :])
        talker.run()
        assert spoken(talker, "again") == expected, at


def test_a_talker_waits_for_each_word(talker: Any, texts: Any) -> None:
    pieces = texts[5]
    speak(talker, "a", **GREEDY)
    assert not talker.engine.busy
    for at, piece in enumerate(pieces[:-1]):
        talker.engine.push("a", piece)
        assert talker.engine.busy
        talker.run()
        # With word n the frame that stands beside it is an input, and the next is drawn.
        assert len(talker.outputs["a"]) == at + 1
    talker.engine.push("a", pieces[-1])
    talker.run()
    assert spoken(talker, "a")[1]


def test_an_answer_without_words_is_silence(talker: Any, texts: Any) -> None:
    speak(talker, "a", **GREEDY)
    first = texts[0][0]
    talker.engine.push(
        "a", Piece("thinker", 0, 1, True, first.body, {k: v for k, v in first.arrays.items() if k != "state"})
    )
    talker.run()
    assert spoken(talker, "a") == ([], "stop")


def test_a_predictor_that_fails_for_one_fails_for_one(talker: Any, texts: Any, monkeypatch: Any) -> None:
    """Drawn anew one by one: nobody's frame is drawn twice or left out."""
    for number in range(4):
        speak(talker, str(number), **DRAWN)
        hear(talker, str(number), texts[number])
    talker.run()
    expected = [spoken(talker, str(number)) for number in range(4)]
    talker.forget()
    complete, bad = talker.model.predictor.complete, talker.engine

    def breaking(hidden: Any, firsts: Any, numbers: Any, greedy: Any) -> Any:
        sequence = bad._sequences.get("2")
        if sequence is not None and len(sequence.drawn) == 4 and sequence.slot >= 0 and broken(hidden):
            raise RuntimeError("out of memory")
        return complete(hidden, firsts, numbers, greedy)

    def broken(hidden: Any) -> bool:
        """Whether the speech is among these: those that are drawn have one more than frames."""
        sequence = bad._sequences["2"]
        return len(sequence.drawn) > len(sequence._frames)

    monkeypatch.setattr(talker.model.predictor, "complete", breaking)
    for number in range(4):
        speak(talker, str(number), **DRAWN)
        hear(talker, str(number), texts[number])
    talker.run()
    assert talker.failures.keys() == {"2"}
    assert [spoken(talker, str(number)) for number in (0, 1, 3)] == [expected[number] for number in (0, 1, 3)]


# ---------------------------------------------------------------------------------------------------- the predictor


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Any:
    """The library's talker."""
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny / "whole" / "qwen3_omni_tiny").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.talker


@pytest.fixture(scope="module")
def predictor(whole: Any) -> Predictor:
    groups = whole.config.num_code_groups
    return Predictor(whole.code_predictor, whole.get_input_embeddings(), groups, SLOTS, torch.device("cpu"), False)


def frames_of(whole: Any, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [count, width], firsts [count], numbers [count, groups - 1]."""
    chance = torch.Generator().manual_seed(3)
    hidden = torch.randn(count, whole.config.text_config.hidden_size, generator=chance) * 3
    firsts = torch.randint(0, 64, (count,), generator=chance)
    return hidden, firsts, torch.rand(count, whole.config.num_code_groups - 1, generator=chance)


@torch.inference_mode()
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_predictor_completes_together_what_it_completes_alone(predictor: Any, whole: Any, count: Any) -> None:
    hidden, firsts, numbers = frames_of(whole, count)
    greedy = torch.arange(count) % 3 == 0
    codes, embeds = predictor.complete(hidden, firsts, numbers, greedy)
    assert len({tuple(frame) for frame in codes.tolist()}) == count
    for row in range(count):
        at = slice(row, row + 1)
        alone, adds = predictor.complete(hidden[at], firsts[at], numbers[at], greedy[at])
        assert alone.tolist() == codes[at].tolist()
        torch.testing.assert_close(adds, embeds[at], rtol=0, atol=TOLERANCE)
        # Drawn with other numbers it says something else, unless it does not draw.
        others, _ = predictor.complete(hidden[at], firsts[at], 1 - numbers[at], greedy[at])
        assert greedy[row] == (others.tolist() == alone.tolist()) or not greedy[row]


@torch.inference_mode()
def test_the_predictor_is_the_librarys_nested_generate(predictor: Any, whole: Any) -> None:
    hidden, firsts, numbers = frames_of(whole, 16)
    codes, embeds = predictor.complete(hidden, firsts, numbers, torch.ones(16, dtype=torch.bool))
    for row in range(16):
        first = whole.get_input_embeddings()(firsts[row : row + 1])[None]
        result = whole.code_predictor.generate(
            inputs_embeds=torch.cat([hidden[row : row + 1][None], first], 1),
            max_new_tokens=whole.config.num_code_groups - 1,
            do_sample=False,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        assert codes[row].tolist() == [int(firsts[row]), *result.sequences[0].tolist()]
        # As the library adds them up for the next input.
        parts = [first[0], *(states[0][0, -1:] for states in result.hidden_states[1:])]
        parts.append(whole.code_predictor.get_input_embeddings()[-1](result.sequences[:, -1]))
        torch.testing.assert_close(embeds[row : row + 1], sum(parts), rtol=0, atol=TOLERANCE)
    # The end of a speech is no code of a frame.
    assert int(codes.max()) < 64
