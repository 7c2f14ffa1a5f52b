"""`stream`: streamed text through gateway, scheduler and a stub stage, over real HTTP and real processes.

One server-sent event a token, 32 streams at a time. Against it: a bare aiohttp handler that streams the same bytes, as
many events, on the same loop (uvloop). Once as fast as it goes, where events of a stream may pile up and then leave in
one write; once at the pace of a model, where each leaves alone.
"""

import asyncio
import json
import subprocess
import tempfile
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tools.bench.processes import answers, command, cpu_s, free_port, helper, instance, until
from tools.bench.report import Effort, Goal, Result, about, ratios

STREAMS = 32
TOKENS = 1500
PACED_TOKENS = 100
#: Seconds between two tokens of a stream.
PACE_S = 0.01
RATE_GOAL = Goal(">=", 0.5)
CPU_GOAL = Goal("<=", 1.7)
CHAT = "/v1/chat/completions"
#: Events that are no token: the role, the finish reason, the end mark.
EXTRA_EVENTS = 3


@dataclass(slots=True)
class Side:
    """One server and what was measured of it, a value a round."""

    pid: int
    port: int
    path: str
    rate: list[float] = field(default_factory=list)
    #: CPU seconds of the server process an event.
    cpu: list[float] = field(default_factory=list)
    #: Share of one core that the server and the client used.
    server_share: list[float] = field(default_factory=list)
    client_share: list[float] = field(default_factory=list)

    async def round(self, body: str, events: int) -> None:
        before = cpu_s(self.pid)
        arguments = [str(self.port), str(STREAMS), self.path, body]
        client = await asyncio.create_subprocess_exec(
            *command("tools.bench.sse_client", arguments), stdout=subprocess.PIPE
        )
        said, _ = await client.communicate()
        used = cpu_s(self.pid) - before
        found = json.loads(said)
        assert found["events"] == events, f"{found['events']} events of {events} came"
        self.rate.append(events / found["elapsed_s"])
        self.cpu.append(used / events)
        self.server_share.append(used / found["elapsed_s"])
        self.client_share.append(found["cpu_s"] / found["elapsed_s"])

    def forget_first(self) -> None:
        """The first round warms up."""
        for values in (self.rate, self.cpu, self.server_share, self.client_share):
            del values[0]


async def measure(effort: Effort) -> Result:
    result = Result(about(__doc__))
    tokens, paced_tokens = effort.times(TOKENS), effort.times(PACED_TOKENS)
    fast, bare, recorded = await _sides(effort.rounds, tokens, 0.0)
    paced, paced_bare, _ = await _sides(effort.rounds, paced_tokens, PACE_S)
    result.add("Omnibus: events", "1/s", fast.rate)
    result.add("bare: events", "1/s", bare.rate)
    result.add("events a second, Omnibus / bare", "x", ratios(fast.rate, bare.rate), RATE_GOAL)
    for name, side in (("gateway", fast), ("bare", bare), ("paced, gateway", paced), ("paced, bare", paced_bare)):
        result.add(f"{name}: CPU an event", "us", [value * 1e6 for value in side.cpu])
    result.add("gateway's CPU an event, Omnibus / bare", "x", ratios(fast.cpu, bare.cpu), CPU_GOAL)
    result.add("paced: gateway's CPU an event, Omnibus / bare", "x", ratios(paced.cpu, paced_bare.cpu), CPU_GOAL)
    for name, side in (("Omnibus", fast), ("bare", bare)):
        result.add(f"{name}: core used by the server", "x", side.server_share)
        result.add(f"{name}: core used by the client", "x", side.client_share)
    result.notes = [
        f"{STREAMS} streams of {tokens} tokens a round, paced: {paced_tokens}, one every {PACE_S * 1e3:g} ms; "
        f"{len(recorded) / (tokens + EXTRA_EVENTS):.0f} bytes an event; each event was counted",
        "the time runs from the first connection to the end of the last stream, so admission and placement are in it",
        "the bare handler writes event by event, and gives the loop a turn after each",
        "the client is a process of its own on raw sockets; its share of a core tells that it is no bottleneck "
        "(gateway, scheduler, stage and client share the machine's cores)",
    ]
    return result


async def _sides(rounds: int, tokens: int, pace_s: float) -> tuple[Side, Side, bytes]:
    """Omnibus, the bare handler, and the bytes of a stream; the sides take turns."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": tokens, "temperature": 0}
    )
    async with instance("tokens", f"stages.thinker.options.step_s={pace_s}") as running:
        pid, port = await running.gateway()
        recorded = await asyncio.to_thread(_record, port, body)
        with tempfile.NamedTemporaryFile(prefix="omni-bench-") as file:
            Path(file.name).write_bytes(recorded)
            bare_port = free_port()
            with helper("tools.bench.bare_server", str(bare_port), file.name, str(pace_s)) as server:
                await until(lambda: answers(f"http://127.0.0.1:{bare_port}/"), "the bare server is not there")
                omnibus, bare = Side(pid, port, CHAT), Side(server.pid, bare_port, "/stream")
                events = STREAMS * (tokens + EXTRA_EVENTS)
                for side in [omnibus, bare] * (1 + rounds):
                    await side.round(body, events)
    omnibus.forget_first()
    bare.forget_first()
    return omnibus, bare, recorded


def _record(port: int, body: str) -> bytes:
    """The bytes of one stream, after a look at its events: one a token."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{CHAT}", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        recorded = bytes(response.read())
    events = [json.loads(line[5:]) for line in recorded.splitlines() if line.startswith(b"data: {")]
    words = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    tokens = [word for word in words if word]
    assert tokens == [f"{' ' if index else ''}w{index}" for index in range(len(tokens))]
    assert len(tokens) == json.loads(body)["max_tokens"]
    return recorded
