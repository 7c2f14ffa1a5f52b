"""`identity`: three stages in three processes that hand everything on, asked through the gateway's link.

Every stage reads each byte that it gets and writes a new tensor (x + 1), so the answer proves that all three did.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass

import numpy as np
from tools.bench.processes import Instance, instance
from tools.bench.report import Effort, Goal, Result, about

from omni_common.frames import Text
from omni_gateway.stream import Arrays, Ask, Given

#: Requests of a round: one after another, and 150 at a time.
ALONE = 200
TOGETHER = 900
CONCURRENT = 150
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Payload:
    name: str
    body: Text
    arrays: Arrays
    #: SGLang-Omni 0.1.9's orchestration, from DESIGN.md section 10: measured on a machine of this kind (2 cores).
    peer_ms: float
    peer_rate: float
    goal_ms: Goal
    goal_rate: Goal


PAYLOADS = (
    Payload("ids", Text(ids=list(range(64))), {}, 4.5, 300, Goal("<=", 2), Goal(">=", 900)),
    Payload("8 KB", Text(), {"x": np.ones(2048, np.float32)}, 4.7, 275, Goal("<=", 2), Goal(">=", 800)),
    Payload("2 MB tensor", Text(), {"x": np.ones(500_000, np.float32)}, 17.6, 70, Goal("<=", 4), Goal(">=", 350)),
)


async def measure(effort: Effort) -> Result:
    result = Result(about(__doc__))
    async with instance("identity") as running:
        for payload in PAYLOADS:
            alone: list[float] = []
            together: list[float] = []
            for _ in range(WARM_UP):
                await _one(running, payload)
            for _ in range(effort.rounds):
                took = [await _one(running, payload) for _ in range(effort.times(ALONE))]
                alone.append(statistics.median(took) * 1e3)
                together.append(await _many(running, payload, effort.times(TOGETHER)))
            result.add(f"{payload.name}, 1 at a time: p50", "ms", alone, payload.goal_ms)
            result.add(f"{payload.name}, {CONCURRENT} at a time", "req/s", together, payload.goal_rate)
            result.add(f"{payload.name}: SGLang-Omni's p50 / ours", "x", [payload.peer_ms / value for value in alone])
            result.add(
                f"{payload.name}: our req/s / SGLang-Omni's", "x", [value / payload.peer_rate for value in together]
            )
    result.notes = [
        "SGLang-Omni's figures (p50 4.5, 4.7, 17.6 ms; 300, 275, 70 req/s) are constants measured earlier on a machine "
        "of this kind, not in this run"
    ]
    return result


async def _one(running: Instance, payload: Payload) -> float:
    """Seconds from the submission to the whole answer."""
    given = Given("text", payload.body, 0, 1, last=True, arrays=payload.arrays)
    began = time.perf_counter()
    stream = await running.link.submit(Ask(running.pipeline, "chat", ["text"], [given], 1))
    try:
        events = [event async for event in stream]
    finally:
        await stream.aclose()
    took = time.perf_counter() - began
    (event,) = events
    assert isinstance(event.body, Text)
    assert event.body.ids == payload.body.ids
    for name, array in payload.arrays.items():
        assert event.arrays[name][0] == array[0] + 3
        assert event.arrays[name][-1] == array[-1] + 3
    return took


async def _many(running: Instance, payload: Payload, requests: int) -> float:
    """Requests per second."""
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            await _one(running, payload)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CONCURRENT)))
    return requests / (time.perf_counter() - began)
