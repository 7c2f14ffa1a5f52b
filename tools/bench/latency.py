"""`latency`: what the bus adds to one token of one stream, from the engine's hands to those of the gateway's endpoint.

One way, by the clock that all processes of a host share: engine thread, worker's loop, ZeroMQ, gateway's loop, the
endpoint's `async for`. Against it: a blocking ZeroMQ socket to a process that answers at once, with frames as long
and with the same pauses between them, so that both sides wake processes that sleep.
"""

import statistics
import tempfile
import time

from tools.bench.paced_stage import GAP_S
from tools.bench.processes import Instance, helper, instance
from tools.bench.report import Effort, Goal, Result, about, ratios
from tools.bench.segments import Segments

from omni_common import wire
from omni_common.frames import Chunk, Text
from omni_common.ids import new_incarnation, new_request_id
from omni_common.sockets import new_context
from omni_gateway.stream import Ask, Given

#: The sides take turns after so many tokens, so often within a round: a busy machine then slows both alike.
TOKENS = 50
TURNS = 6
WARM_UP = 5
GOAL = Goal("<=", 2.5)


async def measure(effort: Effort) -> Result:
    result = Result(about(__doc__))
    tokens = effort.times(TOKENS)
    chunk = wire.encode(
        Chunk(new_request_id(), "thinker>client", new_incarnation(), 1, 1, 100, 100, 101, body=Text("1" * 15))
    )
    bus: list[list[float]] = []
    trips: list[list[float]] = []
    async with instance("tokens", worker_module="tools.bench.paced_stage") as running:
        with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
            context = new_context()
            address = f"ipc://{folder}/pair"
            peer = Segments(context, address)
            try:
                with helper("tools.bench.segments", address):
                    for _ in range(effort.rounds):
                        bus.append([])
                        trips.append([])
                        for _ in range(TURNS):
                            bus[-1] += (await _stream(running, WARM_UP + tokens))[WARM_UP:]
                            trips[-1] += _round_trips(peer, len(chunk), WARM_UP + tokens)[WARM_UP:]
            finally:
                peer.close()
                context.term()
    medians = [statistics.median(values) for values in bus]
    halves = [statistics.median(values) / 2 for values in trips]
    result.add("bus, one way", "us", [value * 1e6 for value in medians])
    result.add("bus, one way, 99th percentile", "us", [_high(values) * 1e6 for values in bus])
    result.add("blocking ZeroMQ, half a round trip", "us", [value * 1e6 for value in halves])
    result.add("bus / half a blocking round trip", "x", ratios(medians, halves), GOAL)
    result.add("bus / blocking round trip", "x", [ratio / 2 for ratio in ratios(medians, halves)])
    result.notes = [f"{TURNS * tokens} tokens a round, one every {GAP_S * 1e3:g} ms; a frame has {len(chunk)} bytes"]
    return result


async def _stream(running: Instance, tokens: int) -> list[float]:
    """Seconds on the way, token by token."""
    prompt = Given("text", Text("go"), 0, 2, last=True)
    ask = Ask(running.pipeline, "chat", ["text"], [prompt], 1, {"thinker": {"max_tokens": tokens}})
    stream = await running.link.submit(ask)
    took = []
    try:
        async for event in stream:
            assert isinstance(event.body, Text)
            took.append((time.monotonic_ns() - int(event.body.text)) / 1e9)
    finally:
        await stream.aclose()
    assert len(took) == tokens, f"{len(took)} tokens of {tokens} came"
    return took


def _round_trips(peer: Segments, nbytes: int, times: int) -> list[float]:
    took = []
    for _ in range(times):
        time.sleep(GAP_S)
        began = time.monotonic_ns()
        peer.control(nbytes)
        took.append((time.monotonic_ns() - began) / 1e9)
    return took


def _high(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
