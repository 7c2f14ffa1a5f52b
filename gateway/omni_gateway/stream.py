"""What an endpoint sees of a request: submit input, iterate over what comes back, close.

`Bus` is implemented by `link.py` over the real bus and by a rig in the tests; endpoints use nothing else.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from omni_common.frames import Body, Fleet, Params
from omni_common.pipeline import Pipeline

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Given:
    """One piece of input for the stage that takes `modality` (the task's `input:` in the pipeline file)."""

    modality: str
    body: Body
    #: Positions in the edge's unit; see the body's docstring in `frames.py`.
    start: int
    end: int
    last: bool
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """A validated request."""

    pipeline: Pipeline
    task: str
    outputs: list[str]
    given: list[Given]
    seed: int
    #: Per stage, complete and checked: the YAML's defaults under the request's own.
    params: dict[str, Params] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of output, in order within its modality."""

    #: Output modality of the task: `text` or `audio`.
    modality: str
    body: Body | None
    #: Copied out of shared memory: safe to keep.
    arrays: Arrays
    start: int
    end: int
    #: Last of this modality.
    last: bool


class Stream(Protocol):
    """One admitted request. Events of different modalities come as they are ready."""

    request_id: str

    @property
    def ready(self) -> bool:
        """Another event is here already: who writes to a client may write both at once."""
        ...

    def __aiter__(self) -> AsyncIterator[Event]:
        """Ends after the last event of every output. Raises OmniError when the request failed (also in mid-stream).

        A stage's credit comes back as events are taken, so a reader that stops holds only its own request.
        """
        ...

    async def aclose(self) -> None:
        """Cancel if it still runs; idempotent. Always call it (async with / finally)."""
        ...


class Bus(Protocol):
    #: The scheduler's last word; `None` until the first.
    fleet: Fleet | None
    #: Pipelines served, by name.
    pipelines: dict[str, Pipeline]

    async def submit(self, ask: Ask) -> Stream:
        """Returns once every stage is placed. Raises OmniError: 429 `queue_full`, 503 `stage_missing`, 504."""
        ...
