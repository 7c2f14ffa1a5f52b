import msgspec
import pytest

from omni_common.errors import OmniError
from omni_supervisor.orders import Add, Drain, Kept, Leave, Order, Replace, Restart, Scale, Step, steps

STAGES = ("thinker", "talker")
KEPT = [
    Kept("scheduler", "scheduler"),
    Kept("thinker-0", "worker", "thinker"),
    Kept("gateway", "gateway"),
    *(Kept(f"talker-{n}", "worker", "talker") for n in (0, 1, 10, 2)),
    # As it stands after a rolling restart: what was replaced has moved to the end.
]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Drain("thinker"), [Leave(("thinker-0",))]),
        (Drain("talker-10"), [Leave(("talker-10",))]),
        (Restart("talker-1"), [Replace("talker-1", False)]),
        (Restart("talker-1", stop_first=True), [Replace("talker-1", True)]),
        (Restart("talker"), [Replace(f"talker-{n}", False) for n in (0, 1, 10, 2)]),
        (Restart("scheduler"), [Replace("scheduler", True)]),
        (Restart("gateway"), [Replace("gateway", False)]),
        (Scale("talker", 4), []),
        (Scale("talker", 2), [Leave(("talker-2", "talker-10"))]),
        (Scale("talker", 0), [Leave(("talker-0", "talker-1", "talker-2", "talker-10"))]),
        (Scale("talker", 6), [Add("talker", (3, 4))]),
        (Scale("thinker", 3), [Add("thinker", (1, 2))]),
        (Scale("talker", 64), [Add("talker", tuple(n for n in range(64) if n not in (0, 1, 2, 10)))]),
    ],
)
def test_steps(order: Order, expected: list[Step]) -> None:
    assert steps(order, KEPT, STAGES) == expected


def test_everything_is_restarted_from_the_inside_out() -> None:
    names = [step.name for step in steps(Restart("all"), KEPT, STAGES)]
    assert names == ["scheduler", "thinker-0", "talker-0", "talker-1", "talker-10", "talker-2", "gateway"]


@pytest.mark.parametrize(
    ("order", "status", "message"),
    [
        (Drain("talkr"), 404, "nothing here is called talkr; there are thinker, talker, scheduler, thinker-0, gateway"),
        (Restart("talker-3"), 404, "nothing here is called talker-3"),
        (Scale("code2wav", 1), 404, "no pipeline here has a stage code2wav; there are thinker, talker"),
        (Scale("talker-0", 1), 404, "no pipeline here has a stage talker-0"),
        (Scale("scheduler", 2), 404, "no pipeline here has a stage scheduler"),
        (Drain("scheduler"), 409, "scheduler cannot be drained, only restarted"),
        (Drain("all"), 409, "gateway cannot be drained, only restarted"),
    ],
)
def test_refusals(order: Order, status: int, message: str) -> None:
    with pytest.raises(OmniError) as error:
        steps(order, KEPT, STAGES)
    assert error.value.status == status and message in error.value.message


def test_a_stage_without_replicas_says_how_to_get_one() -> None:
    with pytest.raises(OmniError, match="stage talker has no replica here; start one with: omni scale talker=1"):
        steps(Restart("talker"), KEPT[:3], STAGES)


def test_what_was_given_up_is_tried_again_under_its_name() -> None:
    kept = [Kept("talker-0", "worker", "talker", lost=True), Kept("talker-1", "worker", "talker")]
    assert steps(Scale("talker", 2), kept, STAGES) == [Add("talker", (0,))]
    assert steps(Scale("talker", 1), kept, STAGES) == []
    assert steps(Restart("talker-0"), kept, STAGES) == [Replace("talker-0", False)]


@pytest.mark.parametrize(
    "body",
    [
        '{"order": "scale", "stage": "talker", "count": 65}',
        '{"order": "scale", "stage": "talker", "count": -1}',
        '{"order": "scale", "stage": "talker", "count": "3"}',
        '{"order": "scale", "stage": "talker"}',
        '{"order": "restart", "target": ""}',
        '{"order": "restart", "target": "talker", "stopfirst": true}',
        '{"order": "stop", "target": "talker"}',
        "{}",
    ],
)
def test_orders_are_checked_where_they_come_in(body: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Order)


def test_orders_in_words() -> None:
    assert [str(o) for o in (Drain("a-0"), Restart("all"), Scale("a", 3))] == ["drain a-0", "restart all", "scale a=3"]
