"""Scheduler, fake workers and a gateway's link as real processes on real sockets."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest
from support.rig import Rig, fake, running, until

from omni_common.errors import OmniError
from omni_gateway.stream import Event


def text_of(events: list[Event]) -> str:
    return "".join(event.body.text for event in events if event.modality == "text" and event.body)


def sound_of(events: list[Event]) -> np.ndarray:
    return np.concatenate([event.arrays["samples"] for event in events if event.modality == "audio"])


@pytest.fixture
async def spoken() -> AsyncIterator[Rig]:
    async with running(fake("spoken")) as rig:
        yield rig


@pytest.fixture
async def tokens() -> AsyncIterator[Rig]:
    async with running(fake("tokens")) as rig:
        yield rig


async def test_text_and_sound_come_back_whole_and_in_order(spoken: Rig) -> None:
    events = await spoken.answer(spoken.ask("say 1 and 22", ("text", "audio")))
    assert text_of(events) == "say 1 and 22"
    assert len(sound_of(events)) == 4 * 2400
    for modality in ("text", "audio"):
        mine = [event for event in events if event.modality == modality]
        assert [event.start for event in mine] == [0, *(event.end for event in mine[:-1])]
        assert [event.last for event in mine] == [False] * (len(mine) - 1) + [True]
    await spoken.idle()


async def test_text_only_works_while_the_talker_is_stopped(spoken: Rig) -> None:
    """B019: what is not asked for is not run."""
    spoken.kill("talker", signal.SIGSTOP)
    events = await spoken.answer(spoken.ask("only words"))
    assert text_of(events) == "only words"
    spoken.kill("talker", signal.SIGCONT)


async def test_many_at_once_are_not_mixed_up(spoken: Rig) -> None:
    """B027, B052: each answer holds its own words and its own tone, and only those."""

    async def one(number: int) -> None:
        events = await spoken.answer(spoken.ask(f"{number} x{number} y", ("text", "audio")))
        assert text_of(events) == f"{number} x{number} y"
        sound = sound_of(events)
        peak = np.abs(np.fft.rfft(sound[:2400])).argmax() * 24_000 / 2400
        assert abs(peak - (200 + 10 * number)) <= 10

    await asyncio.gather(*(one(number) for number in range(60)))
    await spoken.idle()


async def test_large_tensors_go_through_three_stages_and_every_slot_comes_back() -> None:
    async with running(fake("identity3")) as rig:
        big = np.arange(1_000_000, dtype=np.float32)

        async def one(number: int) -> None:
            (event,) = await rig.answer(rig.ask(arrays={"x": big + number}))
            np.testing.assert_array_equal(event.arrays["x"], big + number + 3)

        for _ in range(3):
            await asyncio.gather(*(one(number) for number in range(24)))
        await rig.idle()
        assert rig.link._node.arena.used == 0


async def test_a_worker_started_by_hand_is_used_and_its_death_leaves_the_others(spoken: Rig) -> None:
    spoken.worker("talker", "talker-b")
    await until(lambda: spoken.ready("talker") == 2)
    await asyncio.gather(*(spoken.answer(spoken.ask("a b c", ("text", "audio"))) for _ in range(8)))
    await until(lambda: all(replica.steps > 1 for replica in spoken.replicas("talker")))
    spoken.kill("talker-b")
    await spoken.wait("talker-b")
    await until(lambda: spoken.ready("talker") == 1)
    assert text_of(await spoken.answer(spoken.ask("still here", ("text", "audio")))) == "still here"
    spoken.worker("talker", "talker-c")
    await until(lambda: spoken.ready("talker") == 2)
    await spoken.idle()


async def test_a_killed_stage_fails_its_requests_at_once_with_its_name(tokens: Rig) -> None:
    """B016, B054: an error with the stage's name, soon, and the next worker is used without any other restart."""
    stream = await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 100_000}}))
    events = aiter(stream)
    await anext(events)
    tokens.kill("thinker")
    with pytest.raises(OmniError, match="thinker") as lost:
        async with asyncio.timeout(3):
            async for _ in events:
                pass
    assert (lost.value.code, lost.value.status, lost.value.stage) == ("stage_lost", 503, "thinker")
    await stream.aclose()
    await tokens.wait("thinker")
    waiting = asyncio.create_task(tokens.answer(tokens.ask(params={"thinker": {"max_tokens": 3}})))
    tokens.worker("thinker")
    assert text_of(await waiting) == "w0 w1 w2"
    await tokens.idle()


async def test_a_stage_that_kills_itself_in_mid_answer() -> None:
    async with running(fake("tokens"), "stages.thinker.options.die_at=5") as rig:
        with pytest.raises(OmniError, match="was lost"):
            await rig.answer(rig.ask(params={"thinker": {"max_tokens": 10}}))


async def test_without_a_worker_the_request_is_refused_and_says_which_stage() -> None:
    async with running(fake("spoken"), stages=("thinker",)) as rig:
        with pytest.raises(OmniError, match="talker") as refused:
            await rig.answer(rig.ask("x", ("text", "audio")))
        assert (refused.value.status, refused.value.code) == (503, "stage_missing")
        assert text_of(await rig.answer(rig.ask("words"))) == "words"


async def test_cancel_stops_the_stage_and_leaves_nothing(tokens: Rig) -> None:
    """B042, B043: cancelled at many points, then one that must succeed."""
    for reads in (0, 1, 3, 10):
        streams = [
            await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 1_000_000}})) for _ in range(4)
        ]
        for stream in streams:
            events = aiter(stream)
            for _ in range(reads):
                await anext(events)
            await stream.aclose()
            await stream.aclose()
        assert text_of(await tokens.answer(tokens.ask(params={"thinker": {"max_tokens": 2}}))) == "w0 w1"
    submits = [
        asyncio.create_task(tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 1_000_000}})))
        for _ in range(8)
    ]
    await asyncio.sleep(0)
    for submit in submits:
        submit.cancel()
    await asyncio.gather(*submits, return_exceptions=True)
    await tokens.idle()


async def test_a_reader_that_stops_holds_only_its_own_request(tokens: Rig) -> None:
    slow = await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 100_000}}))
    await anext(aiter(slow))

    def steps() -> int:
        return tokens.replicas("thinker")[0].produced

    assert len(await tokens.answer(tokens.ask(params={"thinker": {"max_tokens": 5000}}))) == 5000
    await until(lambda: steps() > 5000)
    stuck = steps()
    assert stuck < 5000 + 2000, "the stage ran on without credit"
    await slow.aclose()
    await tokens.idle()


async def test_a_full_queue_is_refused_at_once_and_the_admitted_finish() -> None:
    """B047"""
    async with running(fake("tokens"), "stages.thinker.slots=2", "limits.queue=4") as rig:

        async def one() -> str:
            try:
                return text_of(await rig.answer(rig.ask(params={"thinker": {"max_tokens": 500}})))
            except OmniError as error:
                assert (error.status, error.code) == (429, "queue_full")
                assert error.retry_after_s > 0
                return "refused"

        answers = await asyncio.gather(*(one() for _ in range(50)))
        assert answers.count("refused") == 50 - 6
        assert all(answer == "refused" or answer.startswith("w0 w1 ") for answer in answers)
        await rig.idle()


async def test_an_error_of_one_request_leaves_the_others(tokens: Rig) -> None:
    good = asyncio.create_task(tokens.answer(tokens.ask(params={"thinker": {"max_tokens": 3000}})))
    with pytest.raises(OmniError) as refused:
        await tokens.answer(tokens.ask(params={"thinker": {"temperature": 99}}))
    assert (refused.value.status, refused.value.param) == (400, "params.thinker.temperature")
    assert len(await good) == 3000


async def test_a_stage_that_raises_fails_only_the_request() -> None:
    async with running(fake("tokens"), "stages.thinker.options.raise_at=5") as rig:
        with pytest.raises(OmniError, match="told to fail at token 5"):
            await rig.answer(rig.ask(params={"thinker": {"max_tokens": 10}}))
        assert text_of(await rig.answer(rig.ask(params={"thinker": {"max_tokens": 4}}))) == "w0 w1 w2 w3"
        await rig.idle()


async def test_a_stage_that_cannot_load_says_why_and_ends() -> None:
    async with running(fake("tokens"), "stages.thinker.options.fail_load=no weights today", stages=()) as rig:
        rig.worker("thinker")
        assert await rig.wait("thinker") == 1
        await until(lambda: not rig.replicas("thinker"))


async def test_a_worker_with_other_settings_is_refused_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    async with running(fake("tokens"), stages=()) as rig:
        rig._overrides.append("stages.thinker.options.per_step=3")
        rig.worker("thinker")
        assert await rig.wait("thinker") == 3
    assert "digest" in capfd.readouterr().err


async def test_sigterm_drains_and_a_second_one_ends(tokens: Rig) -> None:
    stream = await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 20_000}}))
    events = aiter(stream)
    await anext(events)
    tokens.kill("thinker", signal.SIGTERM)
    await until(lambda: tokens.replicas("thinker")[0].state == "draining")
    count = 1
    async for _ in events:
        count += 1
    assert count == 20_000
    await stream.aclose()
    assert await tokens.wait("thinker") == 0

    tokens.worker("thinker")
    await until(lambda: tokens.ready("thinker") == 1)
    stream = await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 1_000_000}}))
    events = aiter(stream)
    await anext(events)
    tokens.kill("thinker", signal.SIGTERM)
    await until(lambda: tokens.replicas("thinker")[0].state == "draining")
    tokens.kill("thinker", signal.SIGTERM)
    assert await tokens.wait("thinker") == 1
    with pytest.raises(OmniError, match="was lost"):
        async for _ in events:
            pass
    await stream.aclose()


async def test_a_stopped_worker_is_declared_dead_and_fenced_when_it_wakes(tokens: Rig) -> None:
    stream = await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 1_000_000}}))
    events = aiter(stream)
    await anext(events)
    tokens.kill("thinker", signal.SIGSTOP)
    with pytest.raises(OmniError, match="silent"):
        async with asyncio.timeout(10):
            async for _ in events:
                pass
    await stream.aclose()
    tokens.kill("thinker", signal.SIGCONT)
    assert await tokens.wait("thinker") == 3


async def test_the_scheduler_comes_back_and_everybody_is_used_again(spoken: Rig) -> None:
    spoken.kill("scheduler")
    await spoken.wait("scheduler")
    waiting = asyncio.create_task(spoken.answer(spoken.ask("back again", ("text", "audio"))))
    spoken.scheduler()
    assert text_of(await waiting) == "back again"
    await spoken.idle()


async def test_two_schedulers_in_one_run_folder_are_refused(spoken: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    spoken.start("second", "omni_scheduler.main")
    assert await spoken.wait("second") == 1
    assert "another scheduler" in capfd.readouterr().err
    assert text_of(await spoken.answer(spoken.ask("unharmed"))) == "unharmed"


async def test_hung_engine_is_found_although_its_beats_go_on() -> None:
    """B056: busy without progress is death, told to the requests, and the process ends."""
    async with running(fake("tokens"), "stages.thinker.options.step_s=3600", "stages.thinker.stall_s=1.5") as rig:
        with pytest.raises(OmniError, match="hung"):
            async with asyncio.timeout(10):
                await rig.answer(rig.ask(params={"thinker": {"max_tokens": 10}}))
        assert await rig.wait("thinker") == 3


async def test_a_dead_gateway_takes_only_its_own_requests(tokens: Rig) -> None:
    other = Rig(tokens.run.path, fake("tokens"))
    await other.link.start()
    mine = asyncio.create_task(tokens.answer(tokens.ask(params={"thinker": {"max_tokens": 20_000}})))
    stream = await other.link.submit(other.ask(params={"thinker": {"max_tokens": 1_000_000}}))
    with contextlib.suppress(OmniError):
        await anext(aiter(stream))
    await other.link.close()
    assert len(await mine) == 20_000
    await tokens.idle()
