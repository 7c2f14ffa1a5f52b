"""Which process is hit, how, and at which event: a list that a seed decides."""

import itertools
import random
import signal
from dataclasses import dataclass

STAGES = ("thinker", "talker", "wave")
SCHEDULER = "scheduler"
#: Events inside a fake engine, in the order of a job's life (see `omni_worker.engines.fake_notes`).
INSIDE = ("placed", "first", "mid", "last", "sent", "idle")
#: Moments that only the harness sees: a request waits for a place while the victim works; a death on top of another.
OUTSIDE = ("queued", "recovery")
PHASES = (*OUTSIDE[:1], *INSIDE, *OUTSIDE[1:])
#: What the phases mean for the scheduler, by the client's streams: one waits for its placement; one is placed and has
#: nothing yet; all run; one has ended its text and not its sound; the end of one is not confirmed; nothing has to be
#: decided; a stage has just died.
SCHEDULER_PHASES = PHASES


@dataclass(frozen=True, slots=True)
class Blow:
    """`victims[0]` is hit at `phase`, the others at once with it. More than one: every replica of theirs."""

    victims: tuple[str, ...]
    phase: str
    number: int = signal.SIGKILL

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name} {'+'.join(self.victims)} {self.phase}"


#: Deaths together.
TOGETHER = (
    ("thinker", "talker"),
    ("talker", "wave"),
    ("thinker", "wave"),
    STAGES,
    ("scheduler", "talker"),
    ("scheduler", "thinker"),
    ("scheduler", *STAGES),
)


def cells() -> list[tuple[str, str]]:
    """Every (process, phase) of the report."""
    return [*itertools.product(STAGES, PHASES), *((SCHEDULER, phase) for phase in SCHEDULER_PHASES)]


def make_plan(seed: int, count: int) -> list[Blow]:
    """`count` blows. Every cell comes before any comes twice as often as another; then deaths together, and now and
    then a stop or an orderly end, which take seconds."""
    chance = random.Random(seed)
    plan: list[Blow] = []
    while len(plan) < count:
        turn = [Blow((victim,), phase) for victim, phase in cells()]
        # A scheduler takes longer to be missed; a stage is hit again instead.
        turn += [Blow((stage,), phase) for stage in STAGES for phase in ("mid", "sent")]
        turn += [Blow(victims, chance.choice(("first", "mid", "sent"))) for victims in chance.sample(TOGETHER, 3)]
        turn.append(Blow((chance.choice(STAGES),), chance.choice(INSIDE[:3]), signal.SIGSTOP))
        turn.append(Blow((chance.choice(STAGES),), "mid", signal.SIGTERM))
        chance.shuffle(turn)
        plan += turn
    return plan[:count]
