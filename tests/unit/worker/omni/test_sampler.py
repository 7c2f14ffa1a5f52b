"""The sampler against transformers' own processors of logits, and its random numbers."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni_common.frames import CLIENT
from omni_common.params import Generation, Sampling
from omni_worker.engine import Job
from omni_worker.engines.sampler import Draw, choose, sample, uniform
from omni_worker.models.omni_thinker import Answer

WIDTH = 40
END, STOP = 3, 7
#: How near to where one id ends and the next begins float32 and its order of adding may decide either way.
EDGE = 1e-5


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3


def at(scores: torch.Tensor, number: float) -> int | None:
    """The id at `number` of the distribution of the library's scores [vocabulary], by id; None at an edge."""
    reached = scores.double().softmax(-1).cumsum(-1)
    if (reached - number).abs().min() < EDGE or number < EDGE:
        return None
    return int((reached < number).sum())


def library(params: Sampling, seen: list[int] = (), suppress: list[int] = ()) -> LogitsProcessorList:  # type: ignore[assignment]
    """In the order in which `generate` has them."""
    found = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if suppress:
        found.append(SuppressTokensLogitsProcessor(list(suppress), device="cpu"))
    found.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(TopPLogitsWarper(max(params.top_p, 1e-9)))
    if params.min_p > 0.0:
        found.append(MinPLogitsWarper(params.min_p))
    return found


parameters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.6, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 39, 40, 1000, 2**31 - 1]),
    top_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 0.9)),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.05, 2.0]),
)


@given(
    rows=st.lists(st.tuples(parameters, st.lists(st.integers(0, WIDTH - 1), max_size=9)), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    suppress=st.lists(st.integers(0, WIDTH - 1), max_size=4),
)
def test_any_parameters_draw_from_the_librarys_distribution(rows: Any, seed: Any, suppress: Any) -> None:
    given_logits = logits(seed, len(rows))
    held = given_logits.clone()
    draws = [Draw(params, seed, index, seen, seen) for index, (params, seen) in enumerate(rows)]
    found = sample(given_logits, draws, "thinker", torch.tensor(suppress) if suppress else None).tolist()
    assert torch.equal(given_logits, held), "the model's own scores were written"
    for row, (params, seen) in enumerate(rows):
        ids = torch.tensor([seen], dtype=torch.long)
        scores = library(params, seen, suppress)(ids, given_logits[row : row + 1].clone())[0]
        expected = at(scores, float(uniform(seed, "thinker", row)[0]))
        assert expected is None or found[row] == expected


@given(params=parameters, seed=st.integers(0, 99))
def test_every_part_of_a_distribution_is_reached(params: Any, seed: Any) -> None:
    """One distribution at many numbers: each id as often as the library's chances say."""
    given_logits = logits(seed)
    scores = library(params)(torch.zeros(1, 0, dtype=torch.long), given_logits.clone())[0]
    if params.repetition_penalty != 1.0:
        return
    numbers = torch.linspace(0, 1, 501)[:-1]
    count = len(numbers)
    found = choose(
        given_logits.expand(count, -1),
        numbers,
        *(
            torch.full((count,), float(value))
            for value in (params.temperature, params.top_k, params.top_p, params.min_p)
        ),
    ).tolist()
    for number, token in zip(numbers.tolist(), found, strict=True):
        expected = at(scores, number)
        assert expected is None or token == expected


@given(seed=st.integers(0, 99), rows=st.lists(st.sampled_from([0.0, 0.8]), min_size=1, max_size=5))
def test_temperature_zero_is_the_largest(seed: Any, rows: Any) -> None:
    given_logits = logits(seed, len(rows))
    draws = [Draw(Sampling(temperature=temperature, top_k=3, top_p=0.5), seed, 0) for temperature in rows]
    found = sample(given_logits, draws, "thinker").tolist()
    for row, temperature in enumerate(rows):
        if temperature == 0.0:
            assert found[row] == int(given_logits[row].argmax())


def test_of_equals_the_smaller_id_alone_and_beside_one_that_draws() -> None:
    given_logits = torch.zeros(2, WIDTH)
    given_logits[:, [4, 9, 30]] = 5.0
    greedy = Draw(Sampling(), 1, 0)
    assert sample(given_logits[:1], [greedy], "thinker").tolist() == [4]
    assert sample(given_logits, [greedy, Draw(Sampling(temperature=1.0), 1, 0)], "thinker").tolist()[0] == 4


@given(
    seed=st.integers(0, 99),
    written=st.lists(st.integers(0, 9), max_size=20),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
)
def test_frequency_and_presence_penalties(seed: Any, written: Any, frequency: Any, presence: Any) -> None:
    """As OpenAI's documentation has them: per occurrence, and once."""
    given_logits = logits(seed)
    expected = given_logits[0].clone()
    for token in set(written):
        expected[token] -= written.count(token) * frequency + presence
    params = Sampling(frequency_penalty=frequency, presence_penalty=presence)
    found = sample(given_logits, [Draw(params, 1, 0, written, written)], "thinker")
    best = expected.max()
    assert expected[int(found)] >= best - 1e-4


# ---------------------------------------------------------------------------------------------------- what may come


def answering(**params: Any) -> Answer:
    model = SimpleNamespace(
        detokenize=lambda ids: "x" * len(ids),
        end_ids=frozenset([END]),
        context=4096,
        module=SimpleNamespace(lm_head=torch.nn.Linear(1, WIDTH)),
    )
    return Answer(Job("a", 1, Generation(**params), ("preprocessor",), (CLIENT,)), model)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", [0, 2, 3])
def test_min_tokens_forbids_every_end(written: Any) -> None:
    answer = answering(min_tokens=3, stop_token_ids=[STOP])
    answer.tokens = [1] * written
    given_logits = torch.zeros(1, WIDTH)
    given_logits[0, END], given_logits[0, STOP], given_logits[0, 11] = 9.0, 8.0, 1.0
    library = MinNewTokensLengthLogitsProcessor(0, 3, [END, STOP], device="cpu")
    expected = int(library(torch.zeros(1, written, dtype=torch.long), given_logits.clone()).argmax())
    assert sample(given_logits, [answer.draw()], "thinker").tolist() == [expected]


def test_ignore_eos_forbids_the_models_end_but_not_the_clients() -> None:
    given_logits = torch.zeros(1, WIDTH)
    given_logits[0, END], given_logits[0, STOP] = 9.0, 8.0
    assert sample(given_logits, [answering(ignore_eos=True, stop_token_ids=[STOP]).draw()], "thinker").tolist() == [
        STOP
    ]
    assert sample(given_logits, [answering(stop_token_ids=[STOP]).draw()], "thinker").tolist() == [END]


def test_ids_that_there_are_not_may_be_forbidden() -> None:
    """A client's `stop_token_ids` with `min_tokens`: whatever it names, the step goes on."""
    answer = answering(min_tokens=3, stop_token_ids=[WIDTH, 2**31 - 1, STOP])
    given_logits = torch.zeros(1, WIDTH)
    given_logits[0, STOP], given_logits[0, 5] = 9.0, 8.0
    assert sample(given_logits, [answer.draw()], "thinker").tolist() == [5]


@pytest.mark.parametrize("bad", ["one nan", "all nan", "inf", "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_no_numbers_are_told_of_that_row_alone(bad: Any, temperature: Any) -> None:
    given_logits = logits(4, 3)
    if bad == "one nan":
        given_logits[1, 30] = torch.nan
    else:
        given_logits[1, :] = {"all nan": torch.nan, "inf": torch.inf, "all -inf": -torch.inf}[bad]
    draws = [Draw(Sampling(temperature=temperature), 1, index) for index in range(3)]
    found = sample(given_logits, draws, "thinker").tolist()
    assert found[1] == -1
    alone = [sample(given_logits[row : row + 1], [draws[row]], "thinker").item() for row in (0, 2)]
    assert [found[0], found[2]] == alone
    assert -1 not in alone
    # On a GPU an index outside ends the process.
    tensors = [torch.full((3,), value) for value in (0.5, temperature, 0.0, 1.0, 0.0)]
    assert int(choose(given_logits, *tensors).min()) >= 0


# ---------------------------------------------------------------------------------------------------------- numbers


@given(
    order=st.permutations(range(6)),
    count=st.integers(1, 6),
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6),
    indices=st.lists(st.integers(0, 10**6), min_size=6, max_size=6),
)
def test_a_draw_does_not_depend_on_the_batch_or_its_order(order: Any, count: Any, seeds: Any, indices: Any) -> None:
    given_logits = logits(3, 6)
    params = Sampling(temperature=1.3, top_p=0.95, min_p=0.01)
    draws = [Draw(params, seed, index) for seed, index in zip(seeds, indices, strict=True)]
    alone = [sample(given_logits[row : row + 1], [draws[row]], "thinker").item() for row in range(6)]
    some = list(order)[:count]
    assert sample(given_logits[some], [draws[row] for row in some], "thinker").tolist() == [alone[row] for row in some]


def test_the_seed_of_the_parameters_goes_before_the_jobs() -> None:
    given_logits = logits(3).expand(64, -1)

    def drawn(job_seed: int, **params: int) -> list[int]:
        draws = [Draw(Sampling(temperature=1.0, **params), job_seed, index) for index in range(64)]  # type: ignore[arg-type]
        found: list[int] = sample(given_logits, draws, "thinker").tolist()
        return found

    assert drawn(1, seed=7) == drawn(2, seed=7) == drawn(7)
    assert drawn(1, seed=0) == drawn(0)
    assert drawn(1) != drawn(7)


def test_numbers_are_the_same_in_another_process() -> None:
    keys = [(0, "thinker", 0), (-5, "talker", 7), (2**63 - 1, "predictor", 123456)]
    program = f"from omni_worker.engines.sampler import uniform; print([uniform(*k, 3).tolist() for k in {keys}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([uniform(*key, 3).tolist() for key in keys])  # type: ignore[call-overload]


def test_numbers_stay_what_they_are() -> None:
    """An answer that is continued after an update must not be drawn anew: these are what Philox gives."""
    assert uniform(1, "thinker", 0, 2).tolist() == [0.2761127851882609, 0.4204343560289622]
    assert uniform(-1, "predictor", 9, 2).tolist() == [0.5743542179002434, 0.9415601389956124]


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 2**40), draws=st.integers(1, 40))
def test_numbers_of_neighbours_have_nothing_in_common(seed: Any, index: Any, draws: Any) -> None:
    found = [uniform(seed, "thinker", index, draws), uniform(seed, "thinker", index + 1, draws)]
    found += [uniform(seed, "talker", index, draws), uniform(seed ^ 1, "thinker", index, draws)]
    together = np.concatenate(found)
    assert len(np.unique(together)) == 4 * draws
    assert (together >= 0).all() and (together < 1).all()
    # The first do not depend on how many are drawn.
    assert uniform(seed, "thinker", index)[0] == found[0][0]


@pytest.mark.parametrize("vary", ["index", "seed"])
def test_draws_are_distributed_as_the_chances_say(vary: Any) -> None:
    chances = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    count = 4000
    draws = [
        Draw(Sampling(temperature=1.0), at if vary == "seed" else 11, at if vary == "index" else 5)
        for at in range(count)
    ]
    found = sample(chances.log().expand(count, -1), draws, "thinker")
    expected = chances.double() * count
    deviation = float(((found.bincount(minlength=6) - expected) ** 2 / expected).sum())
    # Chi-square of 5 degrees of freedom: beyond 30.9 with a probability of 1e-5.
    assert deviation < 30.9
    # And no two neighbours hang together.
    pairs = (found[:-1] * 6 + found[1:]).bincount(minlength=36)
    expected = torch.outer(chances, chances).double().reshape(-1) * (count - 1)
    # Of 35 degrees: beyond 81 with 1e-5.
    assert float(((pairs - expected) ** 2 / expected).sum()) < 81.0
