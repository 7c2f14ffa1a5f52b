"""How long a client waits after a death, and what a stopped worker may still do. Times are printed; only sanity is
asserted, because the machine may be busy."""

import asyncio
import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from chaos.clients import Asked, fault
from omni_gateway.stream import Event
from support.rig import Rig, fake, running, until

#: Seconds that the stopped worker sleeps; must show 3 says 20.
STOPPED_S = float(os.environ.get("OMNI_STOPPED_S", "8"))


def has_it(rig: Rig, notes: Path, request_id: str) -> str:
    """Name of the live process that has the request."""
    names = {process.pid: name for name, process in rig.processes.items()}
    (name,) = (
        names[int(path.stem)]
        for path in notes.glob("*.log")
        if int(path.stem) in names and f"job {request_id}" in path.read_text()
    )
    return name


async def wait_of_one(rig: Rig, stage: str, notes: Path, restart: bool) -> float:
    """Kill the replica of `stage` that has a stream; the client's longest pause after that."""
    stream = await rig.link.submit(rig.ask("x", ("text", "audio"), {"thinker": {"max_tokens": 1000}}))
    events = aiter(stream)
    # Every stage waits for the one before, so that little is on the way when it dies.
    for _ in range(100):
        await anext(events)
    name = has_it(rig, notes, stream.request_id)
    rig.kill(name)
    killed = last = time.monotonic()
    pause = 0.0
    await rig.wait(name)
    if restart:
        rig.worker(stage, name)
    # Sound needs every stage. What comes half a second later comes from the one that took over.
    while last - killed < 0.5:
        event = await anext(events)
        if event.modality == "audio":
            now = time.monotonic()
            pause, last = max(pause, now - last), now
    await stream.aclose()
    if not restart:
        rig.worker(stage, name)
    return pause


def told(what: str, pauses: list[float]) -> None:
    print(f"{what}: p50 {statistics.median(pauses):.3f} s, max {max(pauses):.3f} s")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["thinker", "talker", "wave"])
async def test_time_to_the_next_chunk(stage: str, tmp_path: Path) -> None:
    """Must show 2: with a second replica at most 0.5 s and the lost context; without, loading and a second."""
    notes = tmp_path / stage
    options = ("stages.thinker.options.step_s=0.004", f"stages.{stage}.options.notes={notes}")
    async with running(fake("chaos"), *options) as rig:
        begun = time.monotonic()
        rig.worker(stage, f"{stage}-b")
        await until(lambda: rig.ready(stage) == 2)
        loading = time.monotonic() - begun
        both = []
        for _ in range(8):
            both.append(await wait_of_one(rig, stage, notes, restart=False))
            await rig.idle()
            await until(lambda: rig.ready(stage) == 2)
        rig.kill(f"{stage}-b", signal.SIGTERM)
        await rig.wait(f"{stage}-b")
        alone = []
        for _ in range(4):
            alone.append(await wait_of_one(rig, stage, notes, restart=True))
            await rig.idle()
    told(f"{stage}, with a second replica", both)
    told(f"{stage}, alone (loading takes {loading:.2f} s)", alone)
    assert statistics.median(both) < 3 and max(alone) < loading + 15


@pytest.mark.slow
async def test_a_worker_started_by_hand_sleeps_and_is_not_heard_again() -> None:
    """Must show 3: its requests move away, and what it sends after SIGCONT is ignored."""
    async with running(fake("chaos"), "stages.thinker.options.step_s=0.003") as rig:
        rig.worker("talker", "by-hand")
        await until(lambda: rig.ready("talker") == 2)
        streams = [
            await rig.link.submit(rig.ask("x", ("text", "audio"), {"thinker": {"max_tokens": 1200}})) for _ in range(4)
        ]
        events: list[list[Event]] = [[] for _ in streams]

        async def read(number: int) -> None:
            async for event in streams[number]:
                events[number].append(event)

        reading = [asyncio.create_task(read(number)) for number in range(4)]
        await until(lambda: all(len(got) > 60 for got in events))
        await until(lambda: any(r.name == "by-hand" and r.running == 2 for r in rig.replicas("talker")))
        rig.kill("by-hand", signal.SIGSTOP)
        slept = time.monotonic()
        await asyncio.gather(*reading)
        while time.monotonic() - slept < STOPPED_S:
            await asyncio.sleep(0.1)
        assert "by-hand" not in {replica.name for replica in rig.replicas("talker")}
        after = asyncio.create_task(rig.answer(rig.ask("x", ("text", "audio"), {"thinker": {"max_tokens": 300}})))
        rig.kill("by-hand", signal.SIGCONT)
        assert await rig.wait("by-hand") == 3
        for got, tokens in ((await after, 300), *((got, 1200) for got in events)):
            problem = fault(rig, Asked(0, tokens, events=got), entropy=True)
            assert not problem, problem
        for stream in streams:
            await stream.aclose()
        await rig.idle()
