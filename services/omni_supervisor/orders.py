"""What `omni drain|restart|scale` ask of a running `omni serve`, and which steps that means. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from omni_common.errors import OmniError
from omni_supervisor.plan import STOP_ORDER, Role, worker_name

MAX_REPLICAS = 64
#: `restart all`.
ALL = "all"
_Target = Annotated[str, Meta(min_length=1, max_length=64)]


class _Order(msgspec.Struct, tag_field="order", tag=str.lower, forbid_unknown_fields=True, frozen=True):
    """Base of the orders, which travel as JSON with the tag `order`."""


class Drain(_Order, frozen=True):
    """A replica, or every replica of a stage, finishes what runs, takes nothing new, leaves, and is not replaced."""

    target: _Target

    def __str__(self) -> str:
        return f"drain {self.target}"


class Restart(_Order, frozen=True):
    """Replace the process of a unit, those of a stage one after another, or `all`."""

    target: _Target
    #: End the old process before the new one starts: for stages that fit only once into the machine.
    stop_first: bool = False

    def __str__(self) -> str:
        return f"restart {self.target}"


class Scale(_Order, frozen=True):
    """Run `count` replicas of a stage."""

    stage: _Target
    count: Annotated[int, Meta(ge=0, le=MAX_REPLICAS)]

    def __str__(self) -> str:
        return f"scale {self.stage}={self.count}"


Order = Drain | Restart | Scale


@dataclass(frozen=True, slots=True)
class Kept:
    """One unit as it stands. `lost`: it was given up, no process of it runs."""

    name: str
    role: Role
    stage: str = ""
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Add:
    """Start these replicas (numbers) of a stage, all at once."""

    stage: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Let these units finish and go, all at once."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """A fresh process for this unit. `stop_first`: the two must not run side by side."""

    name: str
    stop_first: bool


Step = Add | Leave | Replace


def steps(order: Order, kept: Sequence[Kept], stages: Collection[str]) -> list[Step]:
    """The steps of an order, to be done one after another. `stages`: those that the pipelines have.

    Raises OmniError: 404 for a name that is not here, 409 for what cannot be done with it.
    """
    if isinstance(order, Scale):
        return _scale(order, kept, stages)
    targets = _find(order.target, kept, stages)
    if isinstance(order, Restart):
        # One scheduler a run folder: its lock keeps a second one from running beside it.
        return [Replace(unit.name, order.stop_first or unit.role == "scheduler") for unit in targets]
    others = sorted({unit.name for unit in targets if unit.role != "worker"})
    if others:
        message = f"{others[0]} cannot be drained, only restarted: nothing works without it"
        raise OmniError(message, code="not_a_stage", status=409)
    return [Leave(tuple(unit.name for unit in targets))]


def _find(target: str, kept: Sequence[Kept], stages: Collection[str]) -> list[Kept]:
    if target == ALL:
        return sorted(kept, key=lambda unit: STOP_ORDER.index(unit.role), reverse=True)
    found = [unit for unit in kept if target in (unit.name, unit.stage)]
    if found:
        return found
    if target in stages:
        message = f"stage {target} has no replica here; start one with: omni scale {target}=1"
        raise OmniError(message, code="no_replica", status=409)
    message = f"nothing here is called {target}; there are {_names(kept, stages)}"
    raise OmniError(message, code="unknown_target", status=404)


def _scale(order: Scale, kept: Sequence[Kept], stages: Collection[str]) -> list[Step]:
    stage = order.stage
    if stage not in stages:
        message = f"no pipeline here has a stage {stage}; there are {', '.join(stages)}"
        raise OmniError(message, code="unknown_target", status=404)
    # What was given up makes room for another try under the same name.
    running = [unit.name for unit in kept if unit.stage == stage and not unit.lost]
    extra = len(running) - order.count
    if extra > 0:
        last = sorted(running, key=_number)[-extra:]
        return [Leave(tuple(last))]
    if extra == 0:
        return []
    free = [number for number in range(MAX_REPLICAS) if worker_name(stage, number) not in running]
    return [Add(stage, tuple(free[:-extra]))]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _names(kept: Iterable[Kept], stages: Collection[str]) -> str:
    return ", ".join([*stages, *(unit.name for unit in kept), ALL])
