"""The llama.cpp engine: text and sampling fields without the model, then SmolLM2-135M itself."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_common.errors import OmniError
from omni_common.frames import CLIENT, AudioPart, Body, Decision, Message, Prompt, Segment, Text, TextPart, Transcript
from omni_common.params import Recognition, Sampling
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.llamacpp import PREFILL, Llamacpp, common, content, sampling, token_seed
from omni_worker.engines.token_text import TokenText

MODELS = Path(os.environ.get("OMNI_MODELS", "~/.cache/omnibus/models")).expanduser()
PARALLEL = 4
CONTEXT = 512
PATIENCE_S = 60.0
QUESTIONS = [
    "What is the capital of Japan?",
    "What color is the sky?",
    "Name three fruits.",
    "Say hello in one sentence.",
    "What is the opposite of hot?",
    "What is gravity?",
]
STORY = "The old lighthouse stood at the end of the rocky point, and nobody had lived there for many years. " * 6

# ------------------------------------------------------------------------------------------------ without the model


def show(pieces: list[bytes], stop: list[str], *, min_tokens: int = 0) -> tuple[list[str], bool]:
    """What TokenText shows of tokens with these bytes, piece by piece, the flush at the end included."""

    def detokenize(ids: list[int]) -> str:
        return b"".join(pieces[token] for token in ids).decode(errors="replace")

    text, shown = TokenText(detokenize, stop), []
    for token, piece in enumerate(pieces):
        shown.append(text.push(token, piece.decode(errors="replace"), may_stop=token >= min_tokens))
        if text.stopped:
            return shown, True
    return [*shown, text.flush()], False


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])), st.integers(1, 5), st.randoms())
def test_any_cut_of_any_text_comes_out_whole(text: str, most: int, rng: random.Random) -> None:
    raw, pieces = text.encode(), []
    while raw:
        size = rng.randint(1, most)
        pieces.append(raw[:size])
        raw = raw[size:]
    shown, stopped = show(pieces, [])
    assert "".join(shown) == text and not stopped
    assert not any("\ufffd" in piece for piece in shown)


@given(st.text("abc", max_size=30), st.text("abc", min_size=1, max_size=4))
def test_nothing_of_a_stop_string_is_shown(text: str, stop: str) -> None:
    shown, stopped = show([character.encode() for character in text], [stop])
    assert stopped == (stop in text)
    assert "".join(shown) == text.split(stop)[0]


def test_held_text_is_as_short_as_can_be() -> None:
    assert show([b"one", b" two", b" th", b"ree"], ["two three", "\n"])[0] == ["one", " ", "", ""]
    assert show([b"a tw", b"ig"], ["two"])[0] == ["a ", "twig", ""]
    assert show([b"a tw"], ["two"])[0] == ["a ", "tw"]
    assert show([b"a.", b"b.", b"c"], ["."], min_tokens=1)[0] == ["a.", "b"]


def test_bytes_that_are_no_character_are_told_apart_from_a_cut_one() -> None:
    shown, _ = show([b"a", b"\xf0", b"x", b"\xff", b"b", b"c", b"d", b"e", b"\xe6\x97"], [])
    assert "".join(shown) == "a\ufffdx\ufffdbcde"
    shown, _ = show([b"\xff"] * 4 + [b"ok"], [])
    assert "".join(shown) == "\ufffd" * 4 + "ok" and shown[3] != ""
    # A real U+FFFD of the model's is one too.
    assert "".join(show([b"a", b"\xef\xbf\xbd", b"b"], [])[0]) == "a\ufffdb"


def test_common_start() -> None:
    pairs = [([], [1]), ([1], []), ([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([1, 9], [1, 2])]
    assert [common(held, ids) for held, ids in pairs] == [0, 0, 2, 2, 1]


def test_audio_parts_become_what_was_heard() -> None:
    message = Message("user", [TextPart("Answer:"), AudioPart(1), AudioPart(0), AudioPart(7)])
    assert content(message, {0: " Zero.", 1: " One. And more."}) == "Answer:\nOne. And more.\nZero.\n"


def test_every_parameter_reaches_llama_cpp() -> None:
    greedy = sampling(Sampling(), 7, 20, 3)
    assert greedy["temperature"] == 0.0 and greedy["top_k"] == 1 and not greedy["ignore_eos"]
    params = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        min_tokens=2,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        stop_token_ids=[5],
    )
    first, third = sampling(params, 7, 20, 0), sampling(params, 7, 22, 2)
    assert (first["top_k"], first["top_p"], first["min_p"], first["temperature"]) == (0, 0.9, 0.1, 0.7)
    assert (first["repeat_penalty"], first["frequency_penalty"], first["presence_penalty"]) == (1.1, 0.2, 0.3)
    assert first["ignore_eos"] and first["logit_bias"] == [[5, False]]
    assert not third["ignore_eos"] and "logit_bias" not in third
    # The penalty for repetition counts the prompt, the others the answer.
    assert first["repeat_last_n"] == 20 and sampling(Sampling(presence_penalty=1.0), 7, 20, 3)["repeat_last_n"] == 3
    # The job's seed, unless the request has one; another for every token.
    assert sampling(Sampling(), 7, 20, 3)["seed"] == greedy["seed"] == sampling(Sampling(seed=7), 8, 9, 3)["seed"]
    assert len({token_seed(seed, index) for seed in (0, 1, -1, 2**80) for index in range(50)}) == 200
    assert all(0 <= token_seed(seed, 0) < 2**31 for seed in range(200))


# --------------------------------------------------------------------------------------------------- with the model


class Rig:
    """An engine, and what came out of it by request."""

    def __init__(self, engine: Llamacpp, woken: threading.Event) -> None:
        self.engine = engine
        self._woken = woken
        self.out: dict[str, list[Output]] = {}
        self.failures: dict[str, Failure] = {}
        self.blocked: set[str] = set()

    def add(
        self,
        name: str,
        params: Any = None,
        sources: tuple[str, ...] = (CLIENT,),
        seed: int = 0,
        resume: tuple[Decision, ...] = (),
    ) -> None:
        self.out[name] = []
        self.engine.add(Job(name, seed, params or Sampling(max_tokens=24), sources, (CLIENT,), resume=resume))

    def push(self, name: str, body: Body | None, source: str = CLIENT, *, last: bool = True) -> None:
        self.engine.push(name, Piece(source, 0, 1, last, body))

    def ask(self, name: str, question: str, params: Any = None, **rest: Any) -> None:
        self.add(name, params, **rest)
        self.push(name, ask(question))

    def run(self, until: Callable[[], bool]) -> None:
        while True:
            for result in self.engine.step(self.blocked):
                if isinstance(result, Failure):
                    self.failures[result.request_id] = result
                else:
                    self.out[result.request_id].append(result)
            if until():
                return
            if not self.engine.busy:
                assert self._woken.wait(PATIENCE_S), "the engine has gone quiet"
            self._woken.clear()

    def finished(self, *names: str) -> Callable[[], bool]:
        return lambda: all(name in self.failures or (self.out[name] and self.out[name][-1].last) for name in names)

    def idle(self) -> bool:
        return not any(slot.taken for slot in self.engine._slots)

    def answer(self, name: str) -> Text:
        """The whole answer, checked for gaps, doubles and split characters."""
        outputs = self.out[name]
        ids: list[int] = []
        text = ""
        for output in outputs:
            assert isinstance(output.body, Text) and output.request_id == name
            assert (output.start, output.end) == (len(ids), len(ids) + len(output.body.ids))
            assert output.last == (output is outputs[-1]) == bool(output.body.finish)
            assert bool(output.body.prompt_tokens) == output.last and "\ufffd" not in output.body.text
            ids += output.body.ids
            text += output.body.text
        body = outputs[-1].body
        assert isinstance(body, Text)
        return Text(text, ids, body.finish, body.prompt_tokens)

    def solo(self, question: str, params: Any = None, **rest: Any) -> Text:
        self.ask("solo", question, params, **rest)
        self.run(self.finished("solo"))
        return self.answer("solo")


def ask(question: str) -> Prompt:
    return Prompt([Message("user", [TextPart(question)])])


def load(options: dict[str, Any], wake: Callable[[], None], models: Path = MODELS) -> Llamacpp:
    progress: list[float] = []
    engine = Llamacpp()
    engine.load(LoadContext("smollm2-135m", options, str(models), 8, 1, lambda what, done: progress.append(done), wake))
    assert progress == sorted(progress) and progress[-1] == 1.0
    return engine


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Llamacpp, threading.Event]]:
    woken = threading.Event()
    engine = load({"parallel": PARALLEL, "context": CONTEXT}, woken.set)
    yield engine, woken
    engine.close()


@pytest.fixture
def rig(loaded: tuple[Llamacpp, threading.Event]) -> Iterator[Rig]:
    rig = Rig(*loaded)
    yield rig
    for name in rig.out:
        rig.engine.cancel(name)
    rig.run(rig.idle)
    assert not rig.engine._jobs and not rig.engine.busy


@pytest.mark.embedded
def test_answers_a_question(rig: Rig) -> None:
    answer = rig.solo("What is the capital of Japan?")
    assert answer.text == "The capital of Japan is Tokyo." and answer.finish == "stop"
    # The template's own system prompt is counted; the token that ended the answer is one of the ids.
    assert answer.prompt_tokens == 37 and len(answer.ids) == 8
    assert rig.engine._server is not None and rig.engine._server.text(answer.ids[:-1]) == answer.text
    assert len(rig.out["solo"]) > 1


@pytest.mark.embedded
def test_a_system_message_replaces_the_default_one(rig: Rig) -> None:
    rig.add("a", Sampling(max_tokens=1))
    rig.push("a", Prompt([Message("system", [TextPart("Be brief.")]), Message("user", [TextPart("Hi")])]))
    rig.run(rig.finished("a"))
    assert rig.answer("a").prompt_tokens < 20


@pytest.mark.embedded
def test_max_tokens_cuts(rig: Rig) -> None:
    answer = rig.solo("What is gravity?", Sampling(max_tokens=5))
    assert answer.finish == "length" and len(answer.ids) == 5
    assert rig.solo("What is gravity?", Sampling(max_tokens=9)).ids[:5] == answer.ids


@pytest.mark.embedded
def test_stop_strings_and_tokens(rig: Rig) -> None:
    whole = rig.solo("What is the capital of Japan?")
    cut = rig.solo("What is the capital of Japan?", Sampling(stop=["zzz", "pan is T"]))
    assert cut.text == "The capital of Ja" and cut.finish == "stop"
    assert cut.ids == whole.ids[: len(cut.ids)] and len(cut.ids) == 6
    token = rig.solo("What is the capital of Japan?", Sampling(stop_token_ids=[whole.ids[3]]))
    assert token.text == "The capital of" and token.ids == whole.ids[:4] and token.finish == "stop"


@pytest.mark.embedded
def test_biases_change_what_is_said_and_ids_that_there_are_not_are_refused(rig: Rig) -> None:
    question = "What is the capital of Japan?"
    plain = rig.solo(question, Sampling(max_tokens=2))
    biased = rig.solo(question, Sampling(max_tokens=2, logit_bias=["1000:100", f"{plain.ids[1]}:0.5"]))
    assert biased.ids == [1000, 1000]
    assert rig.solo(question, Sampling(max_tokens=2, logit_bias=[f"{plain.ids[0]}:-100"])).ids[0] != plain.ids[0]
    assert rig.engine._server is not None and rig.engine._server.vocabulary == 49152
    with pytest.raises(OmniError) as caught:
        rig.add("a", Sampling(logit_bias=["49152:1"]))
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")


@pytest.mark.embedded
def test_the_end_can_be_kept_away(rig: Rig) -> None:
    params = Sampling(max_tokens=16, min_tokens=12)
    answer = rig.solo("What is the capital of Japan?", params)
    assert len(answer.ids) >= 12 and answer.text.startswith("The capital of Japan is Tokyo.")
    ignored = rig.solo("What is the capital of Japan?", Sampling(max_tokens=16, ignore_eos=True))
    assert len(ignored.ids) == 16 and ignored.finish == "length" and ignored.ids[:12] == answer.ids[:12]


@pytest.mark.embedded
def test_more_jobs_than_slots_each_get_the_answer_they_get_alone(rig: Rig) -> None:
    params = [Sampling(max_tokens=20, repetition_penalty=1.1), Sampling(max_tokens=20, temperature=0.8, top_p=0.9)]
    for number, question in enumerate(QUESTIONS):
        rig.ask(question, question, params[number % 2], seed=number)
    rig.run(rig.finished(*QUESTIONS))
    for number, question in reversed(list(enumerate(QUESTIONS))):
        assert rig.solo(question, params[number % 2], seed=number) == rig.answer(question), question


@pytest.mark.embedded
def test_a_seed_decides_what_is_sampled(rig: Rig) -> None:
    hot = Sampling(max_tokens=12, temperature=1.5)
    one, again, other = (rig.solo("Tell me a story.", hot, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    asked = Sampling(max_tokens=12, temperature=1.5, seed=2)
    assert rig.solo("Tell me a story.", asked, seed=1) == other


@pytest.mark.embedded
def test_prefill_and_decoding_give_the_same(rig: Rig) -> None:
    """What going on after a restart rests on: an answer's first half, as part of the prompt, has the second half."""
    server, slot = rig.engine._server, rig.engine._slots[0]
    assert server is not None
    whole = server.render([{"role": "user", "content": STORY}])
    assert len(whole) > 2 * PREFILL
    decoded = list(whole)
    for _ in range(16):
        decoded.append(server.next_token(0, decoded, {"temperature": 0.0}).id)
    for known in (4, 12):
        server.next_token(0, [1], {})
        ids = decoded[: len(whole) + known]
        for _ in range(16 - known):
            ids.append(server.next_token(0, ids, {"temperature": 0.0}).id)
        assert ids == decoded
    slot.ids = []


@pytest.mark.embedded
def test_characters_are_never_split(rig: Rig) -> None:
    emoji = "🦊🐢🍕 日本語 ñandú 🧑‍🚀\n"
    rig.add("a", Sampling(max_tokens=40, ignore_eos=True))
    rig.push("a", Prompt([Message("user", [TextPart("Repeat this:\n" + emoji * 6)])]))
    rig.run(rig.finished("a"))
    answer = rig.answer("a")
    assert any(len(character.encode()) == 4 for character in answer.text)
    # Some ids had no text of their own.
    assert any(not output.body.text for output in rig.out["a"] if isinstance(output.body, Text))


@pytest.mark.embedded
def test_words_take_the_place_of_audio(rig: Rig) -> None:
    typed = rig.solo("Please answer.\nWhat is the capital of Japan?")
    rig.add("a", sources=(CLIENT, "listener"))
    rig.push("a", Transcript(0, [Segment(0.0, 1.0, " What is the")]), "listener", last=False)
    rig.push("a", Prompt([Message("user", [TextPart("Please answer."), AudioPart(0)])]))
    rig.run(rig.idle)
    assert rig.out["a"] == []
    rig.push("a", Transcript(0, [Segment(1.0, 2.0, " capital of Japan?")], end_of_audio=True), "listener", last=False)
    rig.push("a", None, "listener")
    rig.run(rig.finished("a"))
    assert rig.answer("a") == typed
    # Without a prompt, the words are the question.
    rig.add("b", sources=("listener",))
    rig.push("b", Transcript(0, [Segment(0.0, 2.0, " Please answer.")], end_of_audio=True), "listener", last=False)
    rig.push("b", Transcript(1, [Segment(0.0, 2.0, QUESTIONS[0])], end_of_audio=True), "listener")
    rig.run(rig.finished("b"))
    assert rig.answer("b") == typed


@pytest.mark.embedded
def test_what_stands_before_the_audio_is_computed_ahead(rig: Rig) -> None:
    rig.add("a", sources=(CLIENT, "listener"))
    text = f"Listen. {STORY}"
    assert rig.engine._server is not None
    ids = rig.engine._server.render([{"role": "user", "content": text}])

    def held() -> int:
        return max(common(slot.ids, ids) for slot in rig.engine._slots)

    assert held() < 40
    rig.push("a", Prompt([Message("user", [TextPart(text), AudioPart(0)])]))
    rig.run(rig.idle)
    assert held() > 2 * PREFILL
    rig.push("a", Transcript(0, [Segment(0.0, 1.0, " Who?")], end_of_audio=True), "listener")
    rig.run(rig.finished("a"))
    assert rig.answer("a") == rig.solo(f"{text}\nWho?")


@pytest.mark.embedded
def test_a_prompt_that_does_not_fit_is_refused(rig: Rig) -> None:
    rig.ask("a", "word " * 600)
    rig.run(rig.finished("a"))
    failure = rig.failures["a"]
    assert (failure.status, failure.code, failure.param) == (400, "context_length_exceeded", "messages")
    assert "631 tokens" in failure.message and f"{CONTEXT} tokens" in failure.message
    rig.push("a", None)  # A late piece is no harm.


@pytest.mark.embedded
def test_the_context_ends_an_answer(rig: Rig) -> None:
    words = CONTEXT - 40
    rig.ask("a", "word " * words, Sampling(max_tokens=500, ignore_eos=True))
    rig.run(rig.finished("a"))
    answer = rig.answer("a")
    assert answer.finish == "length" and answer.prompt_tokens + len(answer.ids) == CONTEXT
    assert 0 < len(answer.ids) < 40


@pytest.mark.embedded
@pytest.mark.parametrize(
    "params",
    [
        Sampling(max_tokens=24),
        Sampling(max_tokens=24, temperature=1.0, seed=3),
        Sampling(max_tokens=24, stop=[" and", "e s"]),
        Sampling(max_tokens=24, repetition_penalty=1.2, min_tokens=10),
    ],
)
@pytest.mark.parametrize("survived", [1, 5, 11])
def test_another_process_goes_on_as_an_undisturbed_one(rig: Rig, params: Sampling, survived: int) -> None:
    question = "Tell me about the sea \N{FOX FACE}."
    whole = rig.solo(question, params, seed=7)
    decisions = [Decision(out.start, out.end, out.last, out.body) for out in rig.out["solo"]]
    kept = tuple(decision for decision in decisions[:survived] if not decision.last)
    rig.ask("again", question, params, seed=7, resume=kept)
    rig.run(rig.finished("again"))
    bodies = [decision.body for decision in kept] + [out.body for out in rig.out["again"]]
    assert "".join(body.text for body in bodies) == whole.text
    assert [token for body in bodies for token in body.ids] == whole.ids
    assert rig.out["again"][0].start == kept[-1].end
    assert bodies[-1].finish == whole.finish and bodies[-1].prompt_tokens == whole.prompt_tokens


@pytest.mark.embedded
def test_cancel_frees_the_slot(rig: Rig) -> None:
    names = [f"long {number}" for number in range(PARALLEL)]
    for name in names:
        rig.ask(name, f"{STORY} {name}", Sampling(max_tokens=900, ignore_eos=True))
    rig.run(lambda: all(rig.out[name] for name in names))
    rig.ask("next", QUESTIONS[0])
    rig.run(lambda: True)
    assert not rig.out["next"]
    before = {name: len(rig.out[name]) for name in names}
    rig.engine.cancel(names[1])
    rig.engine.cancel(names[1])
    rig.engine.cancel("never heard of")
    rig.run(rig.finished("next"))
    assert rig.answer("next").text == "The capital of Japan is Tokyo."
    assert len(rig.out[names[1]]) == before[names[1]] and not any(rig.out[name][-1].last for name in names)
    # The same id again, while the call of its former self may be under way.
    rig.engine.cancel(names[0])
    rig.ask(names[0], QUESTIONS[0])
    rig.run(rig.finished(names[0]))
    assert rig.answer(names[0]) == rig.answer("next")


@pytest.mark.embedded
def test_cancel_before_the_prompt_and_in_prefill(rig: Rig) -> None:
    rig.add("empty")
    rig.engine.cancel("empty")
    rig.add("early", sources=(CLIENT, "listener"))
    rig.push("early", Prompt([Message("user", [TextPart(STORY), AudioPart(0)])]))
    rig.ask("prefill", STORY + "Again.")
    rig.run(lambda: True)
    rig.engine.cancel("early")
    rig.engine.cancel("prefill")
    rig.run(rig.idle)
    assert not rig.out["early"] and not rig.out["prefill"] and not rig.failures


@pytest.mark.embedded
def test_a_blocked_job_says_nothing_and_then_everything(rig: Rig) -> None:
    alone = rig.solo(QUESTIONS[1])
    rig.blocked = {"a"}
    rig.ask("a", QUESTIONS[1])
    rig.run(lambda: bool(rig.engine._jobs["a"].finish))
    assert rig.out["a"] == [] and rig.idle() and not rig.engine.busy
    rig.blocked = set()
    rig.run(rig.finished("a"))
    assert len(rig.out["a"]) == 1 and rig.answer("a") == alone


@pytest.mark.embedded
def test_refused_parameters(rig: Rig) -> None:
    with pytest.raises(OmniError, match="empty") as caught:
        rig.add("a", Sampling(stop=["ok", ""]))
    assert caught.value.status == 400 and caught.value.param == "stop"
    with pytest.raises(OmniError, match="Recognition"):
        rig.add("a", Recognition())


@pytest.mark.embedded
def test_an_error_of_llama_cpp_fails_its_job_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.engine._server is not None
    real = rig.engine._server._server

    class Broken:
        def handle_completions(self, request: dict[str, Any]) -> dict[str, Any]:
            if request["frequency_penalty"]:
                return {"error": {"code": 500, "message": "out of luck"}}
            answer: dict[str, Any] = real.handle_completions(request)
            return answer

    monkeypatch.setattr(rig.engine._server, "_server", Broken())
    rig.ask("good", QUESTIONS[0])
    rig.ask("bad", QUESTIONS[0], Sampling(frequency_penalty=0.5))
    rig.run(rig.finished("good", "bad"))
    assert rig.answer("good").text == "The capital of Japan is Tokyo."
    assert rig.failures["bad"].status == 500 and "out of luck" in rig.failures["bad"].message


@pytest.mark.embedded
def test_the_stage_may_have_a_system_message() -> None:
    woken = threading.Event()
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face. You answer in English."
    engine = load({"parallel": 1, "context": 256, "system": system}, woken.set)
    try:
        rig = Rig(engine, woken)
        answer = rig.solo("What is the capital of France?", Sampling(max_tokens=24, repetition_penalty=1.1))
        assert "Paris" in answer.text and answer.prompt_tokens == 43
        given = Prompt([Message("system", [TextPart(system)]), *ask("What is the capital of France?").messages])
        rig.add("a", Sampling(max_tokens=24, repetition_penalty=1.1))
        rig.push("a", given)
        rig.run(rig.finished("a"))
        assert rig.answer("a") == answer
    finally:
        engine.close()


@pytest.mark.embedded
def test_closing_ends_running_jobs() -> None:
    engine = load({"parallel": 2, "context": 512}, lambda: None)
    for name in ("a", "b", "c"):
        engine.add(Job(name, 0, Sampling(max_tokens=400, ignore_eos=True), (CLIENT,), (CLIENT,)))
        engine.push(name, Piece(CLIENT, 0, 1, True, ask(STORY)))
    assert engine.step(set()) == []
    engine.close()
    assert not engine.busy


def test_a_missing_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OmniError, match="omni prepare embedded") as caught:
        load({}, lambda: None, tmp_path)
    assert caught.value.code == "model_missing"
    with pytest.raises(OmniError, match="paralel"):
        load({"paralel": 2}, lambda: None, tmp_path)


def test_a_broken_model_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "smollm2-135m" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(OmniError, match=r"cannot load .*model\.gguf") as caught:
        load({}, lambda: None, tmp_path)
    assert caught.value.code == "load_failed"


@pytest.mark.embedded
def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(OmniError, match="8192 tokens, not 16384"):
        load({"parallel": 1, "context": 16384}, lambda: None)
