"""Random schedules of a whole instance (`world.py`): two pipelines, three requests, up to seven workers, two gateways.

After every event the machine's invariants hold; when nothing more goes wrong every request has had one answer, what was
heard is what was read, and nothing is left anywhere.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.world import World

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
