"""The continuous batcher on a fake decoder with exact arithmetic: on any schedule each says what it says alone."""

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_common.errors import OmniError
from unit.worker.omni.driving import Driver
from unit.worker.omni.fake_decoder import (
    BAD_CHOICE,
    BAD_INPUT,
    BAD_PROMPT,
    BAD_STATE,
    NO_NUMBER,
    NO_SCORE,
    answer,
)


def prompt(number: int, length: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(1, 80) for _ in range(length)]


# -------------------------------------------------------------------------------------------------- joining, leaving


def test_an_answer_alone(drive: Any) -> None:
    driver = drive()
    driver.ask("a", prompt(1, 11), max_tokens=6)
    driver.run()
    assert driver.said("a") == answer(prompt(1, 11), 6)
    assert driver.finish("a") == "length"


def test_a_prompt_of_one_position(drive: Any) -> None:
    driver = drive()
    driver.ask("a", [7], max_tokens=3)
    driver.run()
    assert driver.said("a") == answer([7], 3)


def test_a_prompt_goes_in_pieces_that_end_at_multiples(drive: Any) -> None:
    driver = drive(prefill=8)
    driver.ask("a", prompt(1, 21), max_tokens=1)
    driver.run()
    assert driver.model.forwards == [(1, 8), (1, 8), (1, 5)]


def test_requests_join_and_leave_between_steps(drive: Any) -> None:
    driver = drive(slots=3)
    driver.ask("a", prompt(1, 5), max_tokens=9)
    driver.step()
    driver.step()
    driver.ask("b", prompt(2, 19), max_tokens=2)
    driver.step()
    driver.ask("c", prompt(3, 3), max_tokens=4)
    driver.run()
    for name, ids, count in (("a", prompt(1, 5), 9), ("b", prompt(2, 19), 2), ("c", prompt(3, 3), 4)):
        assert driver.said(name) == answer(ids, count), name


def test_stop_ids_end_an_answer(drive: Any) -> None:
    driver = drive()
    expected = answer(prompt(4, 9), 8)
    driver.ask("a", prompt(4, 9), max_tokens=8, stop_token_ids=[expected[3]])
    driver.run()
    assert driver.said("a") == expected[: expected.index(expected[3]) + 1]
    assert driver.finish("a") == "stop"


def test_a_long_prompt_and_answers_go_on_beside_each_other(drive: Any) -> None:
    """A step has one piece of one prompt, and a token of every answer: nobody starves."""
    driver = drive(slots=3, prefill=4)
    driver.ask("a", prompt(1, 3), max_tokens=30)
    driver.ask("b", prompt(2, 4), max_tokens=30)
    driver.step()
    driver.step()
    driver.ask("long", prompt(3, 31), max_tokens=3)
    for piece in range(8):
        before = len(driver.said("a")), len(driver.said("b"))
        mark = len(driver.model.forwards)
        driver.step()
        assert (len(driver.said("a")), len(driver.said("b"))) == (before[0] + 1, before[1] + 1)
        prompts = [forward for forward in driver.model.forwards[mark:] if forward[1] > 1]
        assert prompts == [(1, 4 if piece < 7 else 3)]
    assert len(driver.said("long")) == 1
    driver.run()
    assert driver.said("long") == answer(prompt(3, 31), 3)


def test_prompts_are_taken_in_the_order_in_which_they_came(drive: Any) -> None:
    driver = drive(slots=4, prefill=4)
    for number in range(4):
        driver.ask(str(number), prompt(number, 12), max_tokens=2)
    first: list[str] = []
    while driver.engine.busy:
        first += [result.request_id for result in driver.step() if result.start == 0]
    assert first == ["0", "1", "2", "3"]


def test_more_requests_than_slots(drive: Any) -> None:
    driver = drive(slots=2)
    for number in range(7):
        driver.ask(str(number), prompt(number, 3 + 5 * number), max_tokens=5)
    driver.run()
    for number in range(7):
        assert driver.said(str(number)) == answer(prompt(number, 3 + 5 * number), 5)


def test_who_waits_for_a_slot_is_not_work(drive: Any) -> None:
    """Every slot belongs to one that waits for input: the engine must sleep, and wake with the input."""
    driver = drive(slots=2)
    for name in ("a", "b"):
        driver.ask(name, prompt(1, 4), paced=True, max_tokens=3)
    driver.run()
    driver.ask("c", prompt(2, 4), max_tokens=2)
    driver.run()
    assert not driver.said("c")
    for number in range(3):
        driver.pace("b", number)
    driver.run()
    assert driver.said("b") == answer(prompt(1, 4), 3)
    assert driver.said("c") == answer(prompt(2, 4), 2)
    assert driver.said("a") == answer(prompt(1, 4), 1)


def test_one_that_waits_for_input_holds_only_itself(drive: Any) -> None:
    driver = drive()
    driver.ask("a", prompt(1, 4), paced=True, max_tokens=5)
    driver.ask("b", prompt(2, 9), max_tokens=5)
    driver.run()
    assert not driver.engine.busy
    assert driver.said("a") == answer(prompt(1, 4), 1)
    assert driver.said("b") == answer(prompt(2, 9), 5)
    for number in range(4):
        driver.pace("a", number)
        assert driver.engine.busy
        driver.run()
    assert driver.said("a") == answer(prompt(1, 4), 5)


# ------------------------------------------------------------------------------------------------------- blocked


def test_blocked_requests_hold_only_themselves(drive: Any) -> None:
    driver = drive(slots=3)
    for number, name in enumerate(("a", "b", "c")):
        driver.ask(name, prompt(number, 10), max_tokens=6)
    for _ in range(30):
        driver.step(frozenset(["b"]))
    assert driver.said("a") == answer(prompt(0, 10), 6)
    assert driver.said("c") == answer(prompt(2, 10), 6)
    assert not driver.said("b")
    assert driver.model.prepared == ["a", "c"]
    driver.run()
    assert driver.said("b") == answer(prompt(1, 10), 6)


def test_a_step_with_all_blocked_computes_nothing(drive: Any) -> None:
    driver = drive(slots=3)
    names = frozenset("abcde")
    for name in sorted(names):
        driver.ask(name, prompt(1, 10), max_tokens=6)
    driver.step()
    driver.step()
    before = len(driver.model.forwards), list(driver.model.prepared)
    started = time.thread_time()
    for _ in range(100):
        assert driver.step(names) == []
    # Of the processor's time, which other processes do not take: a forward alone is more than that.
    assert time.thread_time() - started < 1.0
    assert (len(driver.model.forwards), driver.model.prepared) == before
    # Work is left for whoever is let go.
    assert driver.engine.busy
    driver.run()
    assert driver.said("e") == answer(prompt(1, 10), 6)


def test_blocked_in_the_middle_others_write_past_it(drive: Any) -> None:
    """A row between others is computed along: nothing of that may be seen by it later."""
    driver = drive(slots=3, prefix_cache=False)
    for number, name in enumerate(("a", "b", "c")):
        driver.ask(name, prompt(number, 6), max_tokens=20)
    for _ in range(6):
        driver.step()
    middle = frozenset(["b"])
    for _ in range(5):
        driver.step(middle)
    driver.run()
    for number, name in enumerate(("a", "b", "c")):
        assert driver.said(name) == answer(prompt(number, 6), 20)


# ------------------------------------------------------------------------------------------------------- leaving


STAGES = {
    "without its input": 0,
    "not prepared": 0,
    "waiting for a slot": 3,
    "in the middle of its prompt": 2,
    "answering": 6,
}


@pytest.mark.parametrize("stage", STAGES)
def test_cancelled_at_any_stage(drive: Any, stage: Any) -> None:
    driver = drive(slots=1 if stage == "waiting for a slot" else 2, prefill=4)
    driver.ask("other", prompt(9, 7), max_tokens=25)
    driver.step()
    if stage == "without its input":
        driver.add("a")
    else:
        driver.ask("a", prompt(1, 14), max_tokens=9)
    for _ in range(STAGES[stage]):
        driver.step()
    sequence = driver.engine._sequences["a"]
    assert (sequence.slot >= 0) == (stage in ("in the middle of its prompt", "answering"))
    assert (0 < sequence.length < 14) == (stage == "in the middle of its prompt")
    assert bool(driver.said("a")) == (stage == "answering")
    driver.cancel("a")
    assert driver.free == (0 if stage == "waiting for a slot" else 1)
    driver.ask("next", prompt(2, 11), max_tokens=5)
    driver.run()
    assert driver.said("other") == answer(prompt(9, 7), 25)
    assert driver.said("next") == answer(prompt(2, 11), 5)


def test_cancel_of_what_is_not_there(drive: Any) -> None:
    driver = drive()
    driver.ask("a", prompt(1, 4), max_tokens=2)
    driver.run()
    driver.cancel("a")
    driver.cancel("a")
    driver.cancel("never")
    assert driver.free == 3


def test_what_a_cancelled_one_had_computed_is_a_prefix_for_others(drive: Any) -> None:
    driver = drive(slots=1, prefill=10)
    driver.ask("a", prompt(1, 40), max_tokens=9)
    driver.step()
    driver.step()
    driver.cancel("a")
    driver.ask("b", prompt(1, 40), max_tokens=9)
    driver.run()
    assert driver.engine.hits == 1
    assert driver.model.forwards[2] == (1, 10)
    assert driver.said("b") == answer(prompt(1, 40), 9)


def test_two_hundred_requests_leave_nothing(drive: Any) -> None:
    driver = drive(slots=4)
    taken = driver.engine._cache.nbytes
    chance = random.Random(5)
    for number in range(200):
        driver.ask(str(number), prompt(number % 17, chance.randrange(1, 50)), max_tokens=chance.randrange(1, 12))
        if number % 9 == 0:
            driver.cancel(str(number))
        for _ in range(chance.randrange(3)):
            driver.step()
    driver.run()
    assert driver.engine._cache.nbytes == taken
    assert driver.free == 4
    assert not driver.engine._sequences
    assert all(len(slot.held) <= 64 for slot in driver.engine._slots)


# ------------------------------------------------------------------------------------------------------ prefixes


def test_the_next_turn_takes_over_the_last(drive: Any) -> None:
    driver = drive(slots=2, prefill=64)
    first = prompt(1, 20)
    driver.ask("a", first, max_tokens=5)
    driver.run()
    said = driver.said("a")
    # The last token was never an input.
    second = first + said + prompt(2, 6)
    mark = len(driver.model.forwards)
    driver.ask("b", second, max_tokens=5)
    driver.run()
    assert driver.engine.hits == 1
    assert driver.model.forwards[mark] == (1, len(second) - len(first) - 4)
    assert driver.said("b") == answer(second, 5)


def test_the_whole_prompt_again_computes_its_last_position(drive: Any) -> None:
    driver = drive(slots=1, prefill=64)
    for name in ("a", "b"):
        driver.ask(name, prompt(1, 30), max_tokens=4)
        driver.run()
        assert driver.said(name) == answer(prompt(1, 30), 4)
    assert driver.engine.hits == 1
    assert driver.model.forwards == [(1, 30), (1, 1), (1, 1), (1, 1)] + [(1, 1)] * 4


@pytest.mark.parametrize("at", [0, 3, 15, 16, 17, 29])
def test_only_equal_positions_are_taken_over(drive: Any, at: Any) -> None:
    driver = drive(slots=1, prefill=64)
    other = prompt(1, 30)
    other[at] += 1
    driver.ask("a", prompt(1, 30), max_tokens=4)
    driver.run()
    driver.ask("b", other, max_tokens=4)
    driver.run()
    assert driver.said("b") == answer(other, 4)
    assert driver.engine.hits == (at >= 16)


def test_a_running_one_keeps_its_slot(drive: Any) -> None:
    driver = drive(slots=2)
    driver.ask("a", prompt(1, 20), max_tokens=9)
    for _ in range(5):
        driver.step()
    driver.ask("b", prompt(1, 20), max_tokens=9)
    driver.run()
    assert driver.engine.hits == 0
    assert driver.said("a") == driver.said("b") == answer(prompt(1, 20), 9)


def test_the_least_recently_used_prefix_is_given_up(drive: Any) -> None:
    driver = drive(slots=2)
    # d takes the place of b.
    for name, number, hits in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1), ("d", 3, 1), ("e", 1, 2), ("f", 2, 2)):
        driver.ask(name, prompt(number, 20), max_tokens=3)
        driver.run()
        assert driver.said(name) == answer(prompt(number, 20), 3)
        assert driver.engine.hits == hits, name


def test_without_a_prefix_cache_nothing_is_taken_over(drive: Any) -> None:
    driver = drive(slots=1, prefix_cache=False)
    for name in ("a", "b"):
        driver.ask(name, prompt(1, 20), max_tokens=3)
        driver.run()
    assert driver.engine.hits == 0


def test_notes_are_taken_over_only_from_those_who_made_them(drive: Any) -> None:
    """One who tells nobody leaves no notes beside keys and values: a listener must not get those of somebody else."""
    driver = drive(slots=1)
    driver.ask("stranger", prompt(7, 30), heard=True)
    driver.run()
    driver.ask("text only", prompt(1, 30))
    driver.run()
    driver.ask("heard", prompt(1, 30), heard=True)
    driver.run()
    assert driver.heard("heard") == prompt(1, 30)
    assert driver.engine.hits == 0
    longer = [*prompt(1, 30), 1, 2, 3]
    driver.ask("again", longer, heard=True)
    driver.run()
    assert driver.heard("again") == longer
    driver.ask("text again", [*longer, 4])
    driver.run()
    assert driver.engine.hits == 2
    # Of the first positions the notes are still there.
    driver.ask("and again", [*longer, 4, 5], heard=True)
    driver.run()
    assert driver.heard("and again") == [*longer, 4, 5]
    assert driver.engine.hits == 3


def test_what_lies_behind_a_sequence_is_not_seen(drive: Any) -> None:
    """Whatever an earlier request left in a slot."""
    driver = drive(slots=3, prefix_cache=False)
    for tensor in (*driver.engine._cache._keys, *driver.engine._cache._values):
        tensor.fill_(4321.0)
    for number, length in enumerate((3, 30, 11)):
        driver.ask(str(number), prompt(number, length), max_tokens=12)
    driver.run()
    for number, length in enumerate((3, 30, 11)):
        assert driver.said(str(number)) == answer(prompt(number, length), 12)


# ------------------------------------------------------------------------------------------------------- recovery


def test_resumed_after_every_token(drive: Any) -> None:
    driver = drive()
    expected = answer(prompt(1, 13), 9)
    for at in range(10):
        name = str(at)
        driver.ask(name, prompt(1, 13), resume=expected[:at], max_tokens=9)
        driver.run()
        assert driver.said(name) == expected, at
        assert driver.finish(name) == "length"


def test_what_was_decided_is_not_decided_again(drive: Any) -> None:
    """Even where it would be decided otherwise."""
    driver = drive()
    driver.ask("a", prompt(1, 13), resume=[1, 2, 3], max_tokens=6)
    driver.run()
    assert driver.said("a") == answer(prompt(1, 13), 6, {0: 1, 1: 2, 2: 3})


def test_resumed_beside_others(drive: Any) -> None:
    driver = drive(slots=3, prefill=4)
    driver.ask("a", prompt(1, 9), max_tokens=20)
    for _ in range(5):
        driver.step()
    expected = answer(prompt(2, 9), 15)
    driver.ask("b", prompt(2, 9), resume=expected[:11], max_tokens=15)
    driver.run()
    assert driver.said("a") == answer(prompt(1, 9), 20)
    assert driver.said("b") == expected


def test_a_resumed_listener_hears_all_again(drive: Any) -> None:
    driver = drive()
    expected = answer(prompt(2, 9), 6)
    driver.ask("a", prompt(2, 9), resume=expected[:4], heard=True, max_tokens=6)
    driver.run()
    assert driver.heard("a") == prompt(2, 9)
    assert driver.said("a") == expected


# ------------------------------------------------------------------------------------------------- ends and errors


def test_a_prompt_longer_than_the_context(drive: Any) -> None:
    driver = drive()
    driver.ask("a", prompt(1, 65))
    driver.ask("b", prompt(1, 64))
    driver.run()
    failed = driver.failures["a"]
    assert (failed.code, failed.status, failed.param) == ("context_length_exceeded", 400, "messages")
    # One token more than there are positions: the last is no input.
    assert driver.said("b") == answer(prompt(1, 64), 1)
    assert driver.finish("b") == "length"


def test_an_answer_ends_with_the_context(drive: Any) -> None:
    driver = drive(slots=2)
    driver.ask("a", prompt(1, 60), max_tokens=1000)
    driver.ask("b", prompt(2, 5), max_tokens=70)
    driver.run()
    assert driver.said("a") == answer(prompt(1, 60), 5)
    assert driver.finish("a") == driver.finish("b") == "length"
    assert driver.said("b") == answer(prompt(2, 5), 60)


def test_parameters_that_cannot_be_served(drive: Any) -> None:
    driver = drive()
    with pytest.raises(OmniError, match="voice"):
        driver.add("a", voice="nobody")
    driver.engine.cancel("a")
    assert not driver.engine._sequences


#: What the prompt has, how the failure reads.
BAD_PROMPTS = {
    BAD_PROMPT: ("invalid_value", 400),
    BAD_INPUT: ("engine_error", 500),
    BAD_STATE: ("engine_error", 500),
    NO_NUMBER: ("numerical_error", 500),
}


def assert_only_one_fails(driver: Driver, code: str, status: int) -> None:
    """`good` and `other` beside `bad`; then one more in its slot."""
    assert (driver.failures["bad"].code, driver.failures["bad"].status) == (code, status)
    assert set(driver.failures) == {"bad"}
    assert driver.said("good") == answer(prompt(1, 9), 20)
    assert driver.said("other") == answer(prompt(2, 13), 20)
    # The first takes the slot that holds nothing, and the last reaches far behind it.
    driver.ask("next", prompt(3, 3), max_tokens=9)
    driver.ask("beside", prompt(4, 4), max_tokens=9)
    driver.ask("third", prompt(5, 40), max_tokens=9)
    driver.run()
    for name, number, length in (("next", 3, 3), ("beside", 4, 4), ("third", 5, 40)):
        assert driver.said(name) == answer(prompt(number, length), 9)
    assert set(driver.failures) == {"bad"}


@pytest.mark.parametrize("bad", BAD_PROMPTS)
@pytest.mark.parametrize("at", [0, 5, 20])
def test_a_prompt_that_breaks_fails_alone(drive: Any, bad: Any, at: Any) -> None:
    driver = drive(slots=3, prefill=8)
    ids = prompt(6, 21)
    ids[at] = bad
    driver.ask("good", prompt(1, 9), max_tokens=20)
    driver.step()
    driver.ask("bad", ids, max_tokens=5)
    driver.ask("other", prompt(2, 13), max_tokens=20)
    driver.run()
    assert not driver.said("bad")
    assert_only_one_fails(driver, *BAD_PROMPTS[bad])


#: What is decided, how the failure reads, and whether that token is still said.
BAD_TOKENS = {
    BAD_CHOICE: ("engine_error", False),
    NO_SCORE: ("numerical_error", False),
    BAD_INPUT: ("engine_error", True),
    BAD_STATE: ("engine_error", True),
    NO_NUMBER: ("numerical_error", True),
}


@pytest.mark.parametrize("bad", BAD_TOKENS)
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_answer_that_breaks_fails_alone(drive: Any, bad: Any, at: Any, place: Any) -> None:
    driver = drive(slots=3, prefill=8)
    driver.model.forced["bad", at] = bad
    asked = [("good", 1, 9), ("other", 2, 13)]
    asked.insert(place, ("bad", 6, 11))
    for name, number, length in asked:
        driver.ask(name, prompt(number, length), max_tokens=20)
    driver.run()
    code, said = BAD_TOKENS[bad]
    assert driver.said("bad") == answer(prompt(6, 11), at) + [bad] * said
    assert_only_one_fails(driver, code, 500)


def test_all_of_a_batch_that_break_fail(drive: Any) -> None:
    driver = drive()
    for name in "abc":
        driver.model.forced[name, 2] = BAD_INPUT
        driver.ask(name, prompt(1, 5), max_tokens=9)
    driver.run()
    assert set(driver.failures) == set("abc")
    assert driver.free == 3


def test_what_a_failed_one_left_is_no_prefix(drive: Any) -> None:
    """Asked again, it must not be failed by the numbers of its former self."""
    driver = drive(slots=1)
    driver.model.forced["a", 2] = NO_NUMBER
    driver.ask("a", prompt(1, 30), max_tokens=9)
    driver.run()
    assert driver.failures["a"].code == "numerical_error"
    driver.ask("again", prompt(1, 30), max_tokens=9)
    driver.run()
    assert driver.engine.hits == 0
    assert driver.said("again") == answer(prompt(1, 30), 9)


def test_a_job_whose_input_never_comes_is_no_work(drive: Any) -> None:
    driver = drive()
    driver.add("lost")
    assert not driver.engine.busy
    driver.ask("a", prompt(1, 5), max_tokens=4)
    driver.run()
    assert driver.said("a") == answer(prompt(1, 5), 4)
    assert not driver.engine.busy
    assert driver.step() == []


def test_busy_exactly_while_there_is_work(drive: Any) -> None:
    driver = drive()
    assert not driver.engine.busy
    driver.add("a", max_tokens=2)
    assert not driver.engine.busy
    driver.give("a", prompt(1, 5))
    assert driver.engine.busy
    driver.step()
    assert driver.engine.busy
    driver.step()
    assert not driver.engine.busy
    driver.ask("b", prompt(1, 5))
    assert driver.engine.busy
    driver.cancel("b")
    assert not driver.engine.busy


@pytest.mark.parametrize(("option", "value"), [("prefill", 0), ("part", "os.path"), ("part", "")])
def test_options_that_cannot_be(drive: Any, option: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        drive(**{option: value})


# ---------------------------------------------------------------------------------------------------- any schedule


@st.composite
def schedules(draw: Any) -> Any:
    """What happens, in order: a request by number, steps with some blocked, a cancellation."""
    events = st.one_of(
        st.tuples(
            st.just("ask"),
            st.integers(0, 5),  # the family of its prompt: a beginning that is shared
            st.integers(1, 40),  # its length
            st.integers(1, 9),  # tokens
            st.integers(0, 4),  # of them resumed
        ),
        st.tuples(st.just("step"), st.sets(st.integers(0, 11), max_size=4)),
        st.tuples(st.just("cancel"), st.integers(0, 11)),
    )
    return draw(st.lists(events, max_size=40)), draw(st.integers(1, 4)), draw(st.integers(1, 20)), draw(st.booleans())


@settings(max_examples=60)
@given(schedule=schedules())
def test_any_schedule(schedule: Any, make_driver: Any) -> None:
    events, slots, prefill, sharing = schedule
    driver = make_driver(slots=slots, prefill=prefill, prefix_cache=sharing)
    asked: list[tuple[str, list[int], int]] = []
    cancelled: set[str] = set()
    heard: set[str] = set()
    for kind, *what in events:
        if kind == "ask":
            family, length, count, resumed = what
            name, ids = str(len(asked)), prompt(family, 64)[:length]
            decided = answer(ids, min(resumed, count - 1))
            driver.ask(name, ids, resume=decided, heard=family % 2 == 1, max_tokens=count)
            asked.append((name, ids, count))
            heard |= {name} if family % 2 else set()
        elif kind == "step":
            mark = len(driver.model.forwards)
            driver.step(frozenset(map(str, what[0])))
            assert sum(count > 1 for _, count in driver.model.forwards[mark:]) <= 1
        elif str(what[0]) in {name for name, _, _ in asked}:
            driver.cancel(str(what[0]))
            cancelled.add(str(what[0]))
    driver.run()
    for name, ids, count in asked:
        said = driver.said(name)
        if name not in cancelled:
            assert said == answer(ids, count)
            if name in heard:
                assert driver.heard(name) == ids
        else:
            assert said == answer(ids, count)[: len(said)]
    driver.assert_nothing_left()
    driver.engine.close()
