"""A job as positions: what was fed comes out once, in order, however it is taken."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_common.params import Generation
from omni_worker.engine import Job
from omni_worker.engines.sequence import Sequence

AXES = 3


def sequence() -> Sequence:
    return Sequence(Job("a", 1, Generation(), (), ()))


def fed(blocks: list[int]) -> tuple[Sequence, torch.Tensor, torch.Tensor]:
    """Blocks of so many positions, 0: one with a number as its position. All embeds and positions beside it."""
    made = sequence()
    embeds, places, at = [], [], 0
    for block in blocks:
        count = max(block, 1)
        values = torch.arange(at, at + count)
        positions = torch.stack([values * 10 + axis for axis in range(AXES)]) if block else at * 10
        made.feed(values[:, None].double(), positions)
        embeds.append(values[:, None].double())
        places.append(positions if block else torch.full((AXES, 1), at * 10))
        at += count
    assert made.fed == made.ready == at
    return made, torch.cat(embeds), torch.cat(places, 1)


@given(
    blocks=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    takes=st.lists(st.integers(1, 9), max_size=40),
    reused=st.integers(0, 20),
    twice=st.booleans(),
)
def test_any_blocks_taken_in_any_pieces(blocks: Any, takes: Any, reused: Any, twice: Any) -> None:
    made, embeds, places = fed(blocks)
    made.reuse(min(reused, made.fed - 1))
    for take in [*takes, *[1] * made.fed]:
        if not made.ready:
            break
        count = min(take, made.ready)
        at = made.length
        for _ in range(1 + twice):
            # What was taken and not computed is taken again.
            found, where = made.take_one() if count == 1 else made.take(count)
            assert torch.equal(found, embeds[at : at + count])
            assert torch.equal(where.expand(AXES, -1), places[:, at : at + count])
        made.length += count
    assert made.ready == 0 or not takes


@given(count=st.integers(2, 5))
def test_one_is_as_a_piece_of_one(count: Any) -> None:
    for blocks in ([count, 0, 0], [0, count], [1, 0]):
        one, all_at_once = fed(blocks)[0], fed(blocks)[0]
        while one.ready:
            embeds, places = one.take_one()
            expected, expected_places = all_at_once.take(1)
            assert torch.equal(embeds, expected)
            assert torch.equal(places.expand(AXES, 1), expected_places.expand(AXES, 1))
            one.length += 1
            all_at_once.length += 1


def test_what_has_been_computed_is_not_held() -> None:
    made, _, _ = fed([5, 0, 0, 0])
    made.length = 7
    made.take_one()
    assert len(made._inputs) == 1
