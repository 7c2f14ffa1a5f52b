"""Two hundred deaths while eight clients stream, and shorter runs with other settings."""

import pytest

from chaos.drive import chaos
from chaos.plan import STAGES


@pytest.mark.slow
async def test_two_hundred_deaths_lose_nothing() -> None:
    """Must show 1. Every word carries a random number of the process that decided it, and so does its sound."""
    report = await chaos(seed=1, blows=160)
    print(report.table())
    assert not report.lost
    assert report.deaths >= 200 and not report.empty(), report.table()
    assert report.recomputed == 0, "a stage that lived on computed something twice"
    assert report.replays > 200 and report.evicted == 0


@pytest.mark.slow
async def test_the_answers_are_the_undisturbed_ones() -> None:
    """Words that do not depend on chance: every byte is known before."""
    report = await chaos(seed=2, blows=40, entropy=False)
    print(report.table())
    assert not report.lost and report.recomputed == 0 and report.blows >= 30


@pytest.mark.parametrize("seed", [3])
async def test_a_few_deaths(seed: int) -> None:
    """For the quick suite: a shuffled handful of the same."""
    report = await chaos(seed, blows=6, streams=4)
    assert not report.lost and report.recomputed == 0
    assert report.blows >= 4 and {victim for victim, _ in report.hits} & {*STAGES, "scheduler"}
