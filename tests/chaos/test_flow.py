"""Overload, clients that go away, and clients that do not read."""

import asyncio
import contextlib
import random
import time

import aiohttp
import numpy as np
import psutil
import pytest

from omni_common.errors import OmniError
from support.http import gateway
from support.rig import Rig, fake, running, until

MIB = 1 << 20


def memory(rig: Rig) -> dict[str, int]:
    """Resident bytes of every process of the rig."""
    return {name: psutil.Process(process.pid).memory_info().rss for name, process in rig.processes.items()}


def chat(tokens: int, stream: bool = False) -> dict[str, object]:
    messages = [{"role": "user", "content": "x"}]
    return {"model": "tokens", "messages": messages, "max_tokens": tokens, "stream": stream}


@pytest.mark.slow
async def test_ten_times_the_capacity() -> None:
    """Must show 5: what is admitted finishes, the rest is told at once, and the memory stays."""
    slots, queue, tokens = 10, 40, 30
    overrides = (f"stages.thinker.slots={slots}", f"limits.queue={queue}", "stages.thinker.options.step_s=0.01")
    async with running(fake("tokens"), *overrides) as rig, gateway(rig) as url:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            latencies: list[float] = []

            async def one() -> int:
                begun = time.monotonic()
                async with session.post(f"{url}/v1/chat/completions", json=chat(tokens)) as response:
                    answer = await response.json()
                    if response.status == 200:
                        latencies.append(time.monotonic() - begun)
                        assert len(answer["choices"][0]["message"]["content"].split()) == tokens
                    else:
                        assert response.status == 429, answer
                        assert int(response.headers["retry-after"]) >= 1
                    return response.status

            async def crowd() -> None:
                statuses = await asyncio.gather(*(one() for _ in range(500)))
                # While the crowd arrives some have finished, which makes room for others.
                assert slots + queue <= statuses.count(200) < 500
                await rig.idle()

            for _ in range(2):
                await crowd()
            before = memory(rig)
            for _ in range(3):
                await crowd()
            after = memory(rig)
        grown = {name: round((after[name] - before[name]) / MIB, 1) for name in before}
        print("latency of the admitted", round(max(latencies), 2), "s; grown (MiB):", grown)
        assert all(mib < 8 for mib in grown.values()), grown
        # Everybody waits for at most a full queue, ten at a time.
        assert max(latencies) < 60


@pytest.mark.slow
async def test_two_hundred_clients_go_away_at_random_points() -> None:
    """Must show 6 (B043, B046): and after each a normal request succeeds."""
    chance = random.Random(6)
    async with running(fake("chaos"), "stages.thinker.options.step_s=0.001") as rig:
        ask = rig.ask("x", ("text", "audio"), {"thinker": {"max_tokens": 1_000}})
        normal = rig.ask("x", ("text", "audio"), {"thinker": {"max_tokens": 2}})

        async def leaves() -> None:
            kind = chance.randrange(4)
            submitting = asyncio.create_task(rig.link.submit(ask))
            if kind == 0:
                for _ in range(chance.randrange(30)):
                    await asyncio.sleep(0)
                submitting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await submitting).aclose()
                return
            stream = await submitting
            events = aiter(stream)
            for _ in range(0 if kind == 1 else chance.randrange(1, 40)):
                await anext(events)
            if kind == 3:
                waiting = asyncio.create_task(anext(events))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await stream.aclose()

        for _ in range(200):
            await leaves()
            events = await rig.answer(normal)
            assert len(events) == 4 and [event.last for event in events].count(True) == 2
        await rig.idle()
        # Those that were told off before they were placed are counted too.
        assert rig.link.fleet.failed == 0


@pytest.mark.slow
async def test_aborts_over_http_are_each_followed_by_an_answer() -> None:
    async with running(fake("tokens"), "stages.thinker.options.step_s=0.001") as rig, gateway(rig) as url:
        chance = random.Random(7)
        async with aiohttp.ClientSession() as session:
            for number in range(60):
                async with aiohttp.ClientSession() as leaving:
                    body = chat(100_000, stream=number % 2 == 0)
                    request = asyncio.create_task(leaving.post(f"{url}/v1/chat/completions", json=body))
                    if number % 2 == 0:
                        response = await request
                        await response.content.read(chance.randrange(1, 3000))
                        response.close()
                    else:
                        await asyncio.sleep(chance.random() * 0.05)
                        request.cancel()
                        await asyncio.gather(request, return_exceptions=True)
                async with session.post(f"{url}/v1/chat/completions", json=chat(2)) as response:
                    assert response.status == 200
        await rig.idle()


@pytest.mark.slow
async def test_a_client_that_hardly_reads_holds_up_nobody_but_its_own_stage() -> None:
    """Must show 7: an answer larger than 16 MiB, read at a byte a second, while 16 others stream."""
    tokens = 6000  # 38 KB of sound each: 230 MB.
    overrides = ("stages.thinker.options.step_s=0.001", "stages.talker.slots=64", "stages.wave.slots=64")
    async with running(fake("chaos"), "stages.thinker.slots=64", *overrides) as rig:

        async def sixteen() -> float:
            ask = rig.ask("x", ("text", "audio"), {"thinker": {"max_tokens": 100}})
            begun = time.monotonic()
            answers = await asyncio.gather(*(rig.answer(ask) for _ in range(16)))
            assert all(len(events) == 200 for events in answers)
            return time.monotonic() - begun

        await sixteen()
        alone = min([await sixteen() for _ in range(2)])
        made_before = await steady(rig)
        slow = await rig.link.submit(rig.ask("x", ("text", "audio"), {"thinker": {"max_tokens": tokens}}))
        await anext(aiter(slow))
        beside = min([await sixteen() for _ in range(2)])
        print(f"16 streams beside a client that does not read: {beside / alone:.2f} of their time without it")
        assert beside < alone * 5
        # The others have made 2 x 16 x 100; the rest is the slow one's, which waits for credit.
        await until(lambda: produced(rig)[0] - made_before[0] > 3200)
        stuck = await steady(rig)
        ahead = stuck[0] - made_before[0] - 3200
        assert ahead < tokens / 2, f"the thinker ran {ahead} tokens ahead of its reader"
        used = max(replica.arena_used for replica in rig.replicas("wave"))
        assert used <= 32 * MIB, f"{used / MIB:.0f} MiB of the arena wait for one reader"
        await slow.aclose()
        # What it had not read is given back when it is forgotten.
        del slow
        await rig.idle()


def produced(rig: Rig) -> list[int]:
    return [rig.replicas(stage)[0].produced for stage in ("thinker", "talker", "wave")]


async def steady(rig: Rig) -> list[int]:
    """What the stages have produced once two beats say the same."""
    before, seen = produced(rig), rig.link.fleet
    changes = 0
    while changes < 3:
        await until(lambda seen=seen: rig.link.fleet is not seen)
        seen = rig.link.fleet
        changes = changes + 1 if produced(rig) == before else 0
        before = produced(rig)
    return before


@pytest.mark.slow
async def test_a_reader_of_shared_memory_that_stops_leaves_room_for_others() -> None:
    """Sixteen clients that do not read, and one that does, over an arena that holds a few of their chunks."""
    overrides = tuple(f"stages.{stage}.arena_mib=8" for stage in ("one", "two", "three"))
    async with running(fake("identity3"), *overrides) as rig:
        big = np.zeros(1_000_000, np.uint8)
        stuck = []
        for _ in range(16):
            stream = await rig.link.submit(rig.ask(arrays={"x": big}))
            stuck.append(stream)
        try:
            async with asyncio.timeout(10):
                for _ in range(8):
                    (event,) = await rig.answer(rig.ask(arrays={"x": big}))
                    assert event.arrays["x"][0] == 3
        finally:
            while stuck:
                await stuck.pop().aclose()


@pytest.mark.slow
async def test_a_dead_gateways_requests_end_within_a_second_and_the_other_streams_on() -> None:
    """Gateway kills, judged on the other gateway's streams."""
    async with running(fake("tokens"), "stages.thinker.options.step_s=0.002") as rig:
        mine = asyncio.create_task(rig.answer(rig.ask(params={"thinker": {"max_tokens": 3000}})))
        for number in range(4):
            async with gateway(rig) as url, aiohttp.ClientSession() as session:
                responses = [
                    await session.post(f"{url}/v1/chat/completions", json=chat(1_000_000, stream=True))
                    for _ in range(4)
                ]
                await until(lambda: sum(replica.running for replica in rig.replicas("thinker")) == 5)
                name = f"gateway-{url.rsplit(':', 1)[1]}"
                rig.kill(name)
                begun = time.monotonic()
                await until(lambda: rig.link.fleet.running == (0 if mine.done() else 1))
                print(f"cancelled {time.monotonic() - begun:.2f} s after the gateway's death")
                for response in responses:
                    with pytest.raises((aiohttp.ClientError, ConnectionError)):
                        while await response.content.read(65536):
                            pass
                await rig.wait(name)
            assert not mine.done() or number > 0
        words = [event.body.text.strip() for event in await mine]
        assert words == [f"w{number}" for number in range(3000)]
        with contextlib.suppress(OmniError):
            await rig.answer(rig.ask(params={"thinker": {"max_tokens": 2}}))
        await rig.idle()
