"""`slow_reader`: 16 spoken streams beside one client that reads a byte a second of its own, over real HTTP.

For a minute, and then as often without that client. Both stages are rigs; what is measured is who waits for whom: the
stages for the slow client alone, nobody else.
"""

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator

from tools.bench.processes import Instance, command, instance, resident
from tools.bench.report import Effort, Goal, Result, about, ratios

STREAMS = 16
TOKENS = 100
#: Of the slow client: 19 KB of sound each, 25 KB as base64.
SLOW_TOKENS = 6000
WATCH_S = 60
#: How long the stages may go on until every buffer on the way is full.
FILL_S = 5
GOAL = Goal("<=", 1.25)
CHAT = "/v1/chat/completions"


async def measure(effort: Effort) -> Result:
    result = Result(about(__doc__))
    watch_s = effort.times(WATCH_S)
    beside: list[float] = []
    async with instance("sound") as running:
        pid, port = await running.gateway()
        await _sixteen(port)
        async with _slow_client(port) as slow:
            await asyncio.sleep(min(FILL_S, watch_s))
            full, memory = await _produced(running), resident(pid)
            until = time.monotonic() + watch_s
            while not beside or time.monotonic() < until:
                beside.append(await _sixteen(port))
            made = await _produced(running) - full - len(beside) * STREAMS * TOKENS
            grown = resident(pid) / memory
            assert not slow.done(), "the slow client has its whole answer, so nobody waited for it"
        alone = [await _sixteen(port) for _ in beside]
    result.add("16 streams beside the slow client", "s", beside)
    result.add("16 streams alone", "s", alone)
    result.add("beside / alone", "x", ratios(beside, alone), GOAL)
    result.add("tokens that the thinker made for the slow client, once all was full", "", [made], Goal("<=", 0))
    result.add("of how many", "", [SLOW_TOKENS])
    result.add("tokens made until all was full", "", [full - STREAMS * TOKENS])
    result.add("the gateway's memory, at the end / once all was full", "x", [grown])
    result.notes = [
        f"the slow client is owed {SLOW_TOKENS * 25.6 / 1024:.0f} MiB and read {watch_s} bytes in {watch_s} s",
        f"a round is {STREAMS} streams of {TOKENS} tokens with their sound, each counted; {len(beside)} rounds a side",
    ]
    return result


def _body(tokens: int) -> str:
    asked = {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": tokens}
    return json.dumps({**asked, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}})


async def _sixteen(port: int) -> float:
    """Seconds for as many streams at once."""
    client = await asyncio.create_subprocess_exec(
        *command("tools.bench.sse_client", [str(port), str(STREAMS), CHAT, _body(TOKENS)]), stdout=subprocess.PIPE
    )
    said, _ = await client.communicate()
    found = json.loads(said)
    # A token is an event, and so is its sound.
    assert found["events"] >= 2 * STREAMS * TOKENS, f"only {found['events']} events came"
    elapsed: float = found["elapsed_s"]
    return elapsed


@contextlib.asynccontextmanager
async def _slow_client(port: int) -> AsyncIterator[asyncio.Task[None]]:
    """One that reads a byte a second of its stream from when it has begun; the task ends with the stream."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        body = _body(SLOW_TOKENS)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(sock, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert (await loop.sock_recv(sock, 12)) == b"HTTP/1.1 200"

        async def read() -> None:
            while await loop.sock_recv(sock, 1):
                await asyncio.sleep(1)

        reading = asyncio.create_task(read())
        try:
            yield reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _produced(running: Instance) -> int:
    """Tokens that the thinker has written, once two reports in a row that came later say the same."""
    before, seen = -1, running.link.fleet
    while True:
        while running.link.fleet is seen:
            await asyncio.sleep(0.05)
        seen = running.link.fleet
        assert seen is not None
        now = sum(replica.produced for replica in seen.replicas if replica.stage == "thinker")
        if now == before:
            return now
        before = now
