"""The shortest way to each fault that random schedules found in the pure machines: scheduler, edges."""

import pytest

from chaos.world import World
from omni_common.edges import InEdge, OutEdge, Retained
from omni_common.frames import PROTOCOL_VERSION, Closed, Done, Fenced, Hello, Link, Text
from omni_scheduler.request import Phase
from unit.scheduler.system import REQUEST, full_system


@pytest.fixture
def world() -> World:
    """Everybody registered, one request placed, nothing delivered of it."""
    world = World()
    world.calm()
    world.submit()
    world.control()
    return world


def restarted_without(world: World, name: str) -> None:
    """The scheduler comes back; the hello of `name` is still on the way when the time for claims is over."""
    world.stop_scheduler()
    world.start_scheduler()
    late = world.up.pop(name)
    world.passes(1.0)
    world.passes(6.0)
    world.up[name] = late


def test_a_claim_that_comes_too_late_leaves_nothing_behind(world: World) -> None:
    restarted_without(world, world.named("second"))
    world.settle()
    world.judge()


def test_a_claim_of_a_worker_that_died_since_is_no_claim(world: World) -> None:
    world.stop_scheduler()
    world.start_scheduler()
    victim = world.named("second")
    world.deliver_up(victim)
    world.kill(victim)
    world.notice(victim)
    world.settle()
    world.judge()


def test_a_hello_that_comes_after_its_senders_death_is_not_believed(world: World) -> None:
    assert world.machine is not None
    world.machine.gone("ghost", "its process ended", world.now)
    hello = Hello(PROTOCOL_VERSION, "gateway", "ghost", "ghost")
    (answer,) = world.machine.received("ghost", hello, world.now)
    assert isinstance(answer.frame, Fenced) and "ghost" not in world.machine.fleet.peers


def test_a_neighbour_that_missed_the_word_of_a_replacement_hears_it_from_the_next_scheduler(world: World) -> None:
    """The old scheduler had placed a stage anew; its `relink` to the gateway died with it."""
    victim = world.named("second")
    world.kill(victim)
    world.notice(victim)
    third = world.named("third")
    while world.down[third] or world.up[third]:
        world.deliver_down(third) if world.down[third] else world.deliver_up(third)
    replacement = world.start_worker("second")
    world.control()
    third_actor = world.actors[third]
    # As if the relink had been lost: the consumer still waits for the dead.
    (edge,) = (edges.ins["second>third"] for edges in third_actor.requests.values())
    edge.link, edge.fenced = Link("second>third", "second", victim, victim), True
    assert world.actors[replacement].requests
    world.stop_scheduler()
    world.settle()
    world.judge()


def test_a_failure_known_before_the_gateway_submits_again_is_not_lost(world: World) -> None:
    """The worker tells the new scheduler (a proposal, see `actors.py`), which does not know the request yet."""
    world.calm()
    world.submit()
    world.control()
    failing = world.actors[world.named("copy")]
    failing.fail("r1")  # type: ignore[attr-defined]
    world.stop_scheduler()
    world.start_scheduler()
    late = world.up.pop("g0")
    world.control()
    world.up["g0"] = late
    world.settle()
    assert world.outcomes["r1"] == ["stage_failed_on_purpose"]


def test_a_suspect_is_not_starved_by_requests_that_keep_coming() -> None:
    """It lost its stage through no fault of its own; the other replica always has a request that came later."""
    system = full_system(slots=4)
    system.joins("w2b", "second")
    system.submits()
    system.submits("1" * 32)
    victim, other = ("w2", "w2b") if REQUEST in system.machine.fleet.peers["w2"].placed else ("w2b", "w2")
    system.dies(victim)
    system.answers("gate")
    before = "1" * 32
    for number in range(100):
        now = f"{number:032}"
        system.submits(now)
        system.says("gate", Done(before))
        for peer in ("w1", other):
            system.says(peer, Closed(before))
        before = now
        if system.phase is Phase.RUNNING:
            return
    raise AssertionError("100 requests went past it")


LINK = Link("one>two", "two", "consumer", "ipc://consumer")


def chunks(*bounds: tuple[int, int, bool]) -> OutEdge:
    out = OutEdge("r", LINK, "producer", 1)
    for start, end, last in bounds:
        out.offer(Retained(start, end, last, Text("x"), {}, 1))
    return out


def received(*bounds: tuple[int, int, bool]) -> InEdge:
    """A consumer that got these from a producer that is dead, linked to `producer` now."""
    edge = InEdge("r", Link("one>two", "one", "dead", "ipc://dead"), "consumer", 1)
    old = chunks(*bounds)
    old.source = "dead"
    old.grant(edge.open())
    for chunk in old.take():
        assert edge.accept(chunk) == "new"
    edge.fence()
    return edge


def test_a_producer_placed_anew_is_not_held_up_by_a_consumer_that_has_everything() -> None:
    """A stage with two consumers is computed again for the slower one."""
    done = ((0, 1, False), (1, 2, True))
    edge, out = received(*done), chunks(*done)
    grant = edge.relink(Link("one>two", "one", "producer", "ipc://producer"))
    if grant is not None:
        out.grant(grant)
        out.take()
    assert out.waiting == 0


def test_other_chunk_boundaries_after_a_replay_end_somehow() -> None:
    edge, out = received((0, 3, False)), chunks((0, 2, False), (2, 4, False), (4, 6, True))
    grant = edge.relink(Link("one>two", "one", "producer", "ipc://producer"))
    for _ in range(20):
        assert grant is not None
        out.grant(grant)
        verdicts = [edge.accept(chunk) for chunk in out.take()]
        if "gap" not in verdicts:
            return
        grant = edge.reopen()
    raise AssertionError("opened 20 times for the same chunk")


def test_what_was_evicted_is_never_sent() -> None:
    out = chunks((0, 1, False), (1, 2, False))
    out.log[0].evicted = True
    edge = InEdge("r", Link("one>two", "one", "producer", "ipc://producer"), "consumer", 1)
    assert not out.grant(edge.open())
    out.grant(edge.open())
    assert [chunk.start for chunk in out.take()] == []
