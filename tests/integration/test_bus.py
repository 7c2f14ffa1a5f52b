"""Scheduler, fake workers and a gateway's link as real processes on real sockets."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from omni_common.errors import OmniError
from omni_gateway.stream import Event
from support.rig import Rig, fake, running, until


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


async def test_a_killed_stage_goes_on_when_it_is_back_and_contradicts_nothing() -> None:
    """Every word carries a random number of the process that decided it: deciding anew would show."""
    overrides = ("stages.thinker.options.entropy=true", "stages.thinker.options.step_s=0.001")
    async with running(fake("tokens"), *overrides) as rig:
        stream = await rig.link.submit(rig.ask(params={"thinker": {"max_tokens": 600}}))
        words: list[str] = []
        async for event in stream:
            words.append(event.body.text.strip())
            if len(words) in (100, 300):
                rig.kill("thinker")
                await rig.wait("thinker")
                rig.worker("thinker")
        assert [word.split(".")[0] for word in words] == [f"w{number}" for number in range(600)]
        assert len({word.split(".")[1] for word in words}) > 500
        await stream.aclose()
        assert rig.link.fleet.deaths == 2 and rig.link.fleet.replays == 2
        await rig.idle()


async def test_without_a_restart_the_error_names_the_stage_and_the_next_worker_is_used() -> None:
    """B016, B054: an error with the stage's name in time, and then nothing else needs a restart."""
    async with running(fake("tokens"), "limits.recover_s=1", "limits.queue_s=20") as rig:
        stream = await rig.link.submit(rig.ask(params={"thinker": {"max_tokens": 100_000}}))
        events = aiter(stream)
        await anext(events)
        rig.kill("thinker")
        with pytest.raises(OmniError, match="thinker") as lost:
            async with asyncio.timeout(5):
                async for _ in events:
                    pass
        assert (lost.value.code, lost.value.status, lost.value.stage) == ("stage_lost", 503, "thinker")
        await stream.aclose()
        await rig.wait("thinker")
        waiting = asyncio.create_task(rig.answer(rig.ask(params={"thinker": {"max_tokens": 3}})))
        rig.worker("thinker")
        assert text_of(await waiting) == "w0 w1 w2"
        await rig.idle()


@pytest.mark.parametrize("victims", [("talker",), ("thinker",), ("thinker", "talker")])
async def test_stages_of_a_spoken_answer_die_and_the_sound_is_the_same(victims: tuple[str, ...]) -> None:
    async with running(fake("spoken"), "stages.thinker.options.step_s=0.005") as rig:
        ask = rig.ask(" ".join(f"{number}" for number in range(200)), ("text", "audio"))
        undisturbed = await rig.answer(ask)
        for stage in ("thinker", "talker"):
            rig.worker(stage, f"{stage}-b")
        await until(lambda: rig.ready("thinker") == rig.ready("talker") == 2)
        stream = await rig.link.submit(ask)
        events: list[Event] = []
        async for event in stream:
            events.append(event)
            if len(events) == 100:
                for stage in victims:
                    await until(lambda stage=stage: any(replica.running for replica in rig.replicas(stage)))
                    rig.kill(next(replica.name for replica in rig.replicas(stage) if replica.running))
        await stream.aclose()
        assert text_of(events) == text_of(undisturbed)
        np.testing.assert_array_equal(sound_of(events), sound_of(undisturbed))
        assert rig.link.fleet.failed == 0
        await rig.idle()


#: Far more than the edge's credit and the talker's arena; the last stage begins when all of it is there.
WHOLE = """
name: whole
stages:
  thinker: {engine: fake, model: echo, options: {step_s: 0.002}}
  talker: {engine: fake, model: tone, inputs: [thinker], arena_mib: 1, options: {rate: 192000}}
  finisher: {engine: fake, model: identity, inputs: [talker], stream: false, options: {notes: NOTES}}
tasks:
  chat:
    input: {text: thinker}
    output: {text: thinker, audio: finisher}
"""


@pytest.mark.parametrize("victims", [(), ("finisher",), ("talker",), ("talker", "finisher")])
async def test_a_stage_that_waits_for_whole_inputs_says_the_same(victims: tuple[str, ...], tmp_path: Path) -> None:
    """Also when it dies with a part of them, or who makes them does."""
    file, notes = tmp_path / "whole.yaml", tmp_path / "notes"
    file.write_text(WHOLE.replace("NOTES", str(notes)))
    async with running(str(file), "stages.finisher.stream=true") as rig:
        ask = rig.ask(" ".join(f"{number}" for number in range(300)), ("text", "audio"))
        streamed = await rig.answer(ask)
    shutil.rmtree(notes)
    # A consumer's successor needs again what its arena then must still hold, as with any edge.
    arena = ("stages.talker.arena_mib=64",) if "finisher" in victims else ()
    async with running(str(file), *arena) as rig:
        for stage in victims:
            rig.worker(stage, f"{stage}-b")
        await until(lambda: all(rig.ready(stage) == 2 for stage in victims))
        stream = await rig.link.submit(ask)
        events: list[Event] = []
        async for event in stream:
            events.append(event)
            if len(events) == 150:
                await until(lambda: any("job" in file.read_text() for file in notes.glob("*.log")))
                for stage in victims:
                    await until(lambda stage=stage: any(replica.running for replica in rig.replicas(stage)))
                    rig.kill(next(replica.name for replica in rig.replicas(stage) if replica.running))
        await stream.aclose()
        first = next(number for number, event in enumerate(events) if event.modality == "audio")
        assert first > 150, "the sound began before the text had ended"
        assert text_of(events) == text_of(streamed)
        np.testing.assert_array_equal(sound_of(events), sound_of(streamed))
        assert rig.link.fleet.failed == 0
        await rig.idle()


async def test_whole_inputs_beyond_the_stages_memory_are_an_error_that_says_so(tmp_path: Path) -> None:
    file = tmp_path / "whole.yaml"
    file.write_text(WHOLE.replace("NOTES", str(tmp_path / "notes")))
    async with running(str(file), "stages.finisher.hold_mib=1") as rig:
        with pytest.raises(OmniError, match="output of talker takes more than 1 MiB.*raise the stage's hold_mib"):
            await rig.answer(rig.ask(" ".join(["x"] * 300), ("audio",)))
        await rig.answer(rig.ask("short", ("audio",)))
        await rig.idle()


async def test_a_request_that_kills_its_stage_again_and_again_fails_and_the_stage_lives() -> None:
    async with running(fake("tokens"), "stages.thinker.options.die_at=0") as rig:
        answer = asyncio.create_task(rig.answer(rig.ask(params={"thinker": {"max_tokens": 10}})))
        for _ in range(2):
            await rig.wait("thinker")
            rig.worker("thinker")
        with pytest.raises(OmniError) as poison:
            await answer
        assert poison.value.code == "poison_request"
        await rig.wait("thinker")
        rig.worker("thinker")
        await until(lambda: rig.ready("thinker") == 1)


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
    stuck, seen, same = steps(), tokens.link.fleet, 0
    while same < 2:
        await until(lambda seen=seen: tokens.link.fleet is not seen)
        seen = tokens.link.fleet
        same = same + 1 if steps() == stuck else 0
        stuck = steps()
    assert stuck < 5000 + 100_000, "the stage ran on without credit"
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


async def test_sigterm_drains(tokens: Rig) -> None:
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


async def test_a_second_sigterm_ends_at_once_and_the_request_goes_on_elsewhere(tokens: Rig) -> None:
    stream = await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 20_000}}))
    events = aiter(stream)
    await anext(events)
    tokens.kill("thinker", signal.SIGTERM)
    await until(lambda: tokens.replicas("thinker")[0].state == "draining")
    tokens.kill("thinker", signal.SIGTERM)
    assert await tokens.wait("thinker") == 1
    tokens.worker("thinker")
    count = 1
    async for _ in events:
        count += 1
    assert count == 20_000
    await stream.aclose()
    await tokens.idle()


async def test_a_stopped_worker_is_replaced_and_fenced_when_it_wakes() -> None:
    async with running(fake("tokens"), "stages.thinker.options.entropy=true") as rig:
        stream = await rig.link.submit(rig.ask(params={"thinker": {"max_tokens": 30_000}}))
        events = aiter(stream)
        first = await anext(events)
        rig.kill("thinker", signal.SIGSTOP)
        rig.worker("thinker", "thinker-b")
        words = [first.body.text, *[event.body.text async for event in events]]
        assert [word.strip().split(".")[0] for word in words] == [f"w{number}" for number in range(30_000)]
        await stream.aclose()
        rig.kill("thinker", signal.SIGCONT)
        assert await rig.wait("thinker") == 3
        await rig.idle()


async def test_streams_go_on_while_the_scheduler_is_dead_and_new_ones_wait_for_it(spoken: Rig) -> None:
    long = spoken.ask(" ".join(f"{number}" for number in range(3000)), ("text", "audio"))
    undisturbed = text_of(await spoken.answer(long))
    for _ in range(3):
        running_stream = await spoken.link.submit(long)
        events = aiter(running_stream)
        got = [await anext(events)]
        spoken.kill("scheduler")
        await spoken.wait("scheduler")
        waiting = asyncio.create_task(spoken.answer(spoken.ask("back again", ("text", "audio"))))
        got += [await anext(events) for _ in range(500)]
        spoken.scheduler()
        got += [event async for event in events]
        await running_stream.aclose()
        assert text_of(got) == undisturbed
        assert text_of(await waiting) == "back again"
        await spoken.idle()


async def test_a_cancel_while_the_scheduler_is_dead_is_not_lost(tokens: Rig) -> None:
    stream = await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 1_000_000}}))
    await anext(aiter(stream))
    tokens.kill("scheduler")
    await tokens.wait("scheduler")
    await stream.aclose()
    tokens.scheduler()
    await tokens.idle()


async def test_a_worker_and_the_scheduler_die_together(tokens: Rig) -> None:
    stream = await tokens.link.submit(tokens.ask(params={"thinker": {"max_tokens": 5000}}))
    events = aiter(stream)
    count = 1
    await anext(events)
    tokens.kill("thinker", signal.SIGSTOP)
    tokens.kill("scheduler")
    tokens.kill("thinker")
    for name in ("scheduler", "thinker"):
        await tokens.wait(name)
    tokens.scheduler()
    tokens.worker("thinker")
    async for _ in events:
        count += 1
    assert count == 5000
    await stream.aclose()
    await tokens.idle()


async def test_two_schedulers_in_one_run_folder_are_refused(spoken: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    spoken.start("second", "omni_scheduler.main")
    assert await spoken.wait("second") == 1
    assert "another scheduler" in capfd.readouterr().err
    assert text_of(await spoken.answer(spoken.ask("unharmed"))) == "unharmed"


async def test_hung_engine_is_found_although_its_beats_go_on() -> None:
    """B056: busy without progress is death, told to the requests, and the process ends."""
    overrides = ("stages.thinker.options.step_s=3600", "stages.thinker.stall_s=1.5", "limits.recover_s=1")
    async with running(fake("tokens"), *overrides) as rig:
        with pytest.raises(OmniError, match="hung"):
            async with asyncio.timeout(15):
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
