"""Random schedules of a whole instance (`world.py`): two pipelines, three requests, up to seven workers, two gateways.

After every event the machine's invariants hold; when nothing more goes wrong every request has had one answer, what was
heard is what was read, and nothing is left anywhere.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.world import World

#: What is not wanted where only deaths and losses are.
QUIET = {"submit", "0.3", "1.0", "6.0"}

SCHEDULES = st.lists(st.integers(0, 4095), min_size=20, max_size=250)


@settings(max_examples=300)
@given(SCHEDULES)
def test_whatever_happens_every_request_ends_once_and_contradicts_nothing(schedule: list[int]) -> None:
    world = World()
    try:
        for number in schedule:
            world.happen(number)
        world.settle()
        world.judge()
    except BaseException as error:
        error.add_note("\n".join(world.trace))
        raise


@pytest.mark.parametrize("seed", range(400))
def test_nothing_that_was_heard_is_decided_anew(seed: int) -> None:
    """Deaths, one after another, while words are on their way: of those who decide, who hold, and who know."""
    chance = random.Random(seed)
    world = World()
    world.budget |= {"kill": 5, "fail": 0, "gateway": 0, "cancel": 0}
    world.control()
    world.submit()
    world.submit()
    world.control()
    try:
        for _ in range(chance.randrange(20, 300)):
            moves = world.moves()
            mishaps = [group for kind, group in world.mishaps().items() if group and kind not in QUIET]
            if mishaps and (not moves or chance.random() > 0.93):
                moves = chance.choice(mishaps)
            if moves:
                words, act = chance.choice(moves)
                world.trace.append(words)
                act()
        world.settle()
        world.judge()
    except BaseException as error:
        error.add_note("\n".join(world.trace))
        raise
    assert {outcome for outcomes in world.outcomes.values() for outcome in outcomes} <= {"done", "poison_request"}
