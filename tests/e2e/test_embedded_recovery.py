"""Workers that join, leave and die beside a running system with the embedded models."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.clients.api import Api, Body, join, say
from e2e.clients.instance import Instance, Logged, command
from omni_common.frames import Fleet, Replica

pytestmark = pytest.mark.embedded

TEXT = "The train leaves at noon."
LONG = " ".join(f"This is sentence number {number} of a long text." for number in range(1, 40))


def ready(fleet: Fleet, stage: str) -> list[Replica]:
    return [replica for replica in fleet.replicas if replica.stage == stage and replica.state == "ready"]


async def by_hand(log: Path) -> Logged:
    """A talker as somebody starts it who knows only the command; ready."""
    worker = Logged([command("omni-worker"), "--stage", "talker", "--name", "by-hand"], log)
    try:
        await asyncio.to_thread(worker.said, "by-hand is ready")
    except BaseException:
        worker.end(signal.SIGKILL)
        raise
    return worker


async def used_at_once(api: Api, expected: Body) -> None:
    """The second replica takes one of two texts that are spoken at the same time, from the first second on."""
    fleet = await api.wait_for(lambda fleet: len(ready(fleet, "talker")) == 2, timeout_s=1.0)
    assert next(replica for replica in fleet.replicas if replica.name == "by-hand").produced == 0
    both = await asyncio.gather(api.speech(TEXT), api.speech(TEXT))
    assert [answer.data for answer in both] == [expected.data] * 2
    await api.wait_for(lambda fleet: any(r.name == "by-hand" and r.produced > 0 for r in fleet.replicas))


async def four_on_two(api: Api) -> list[asyncio.Task[Body]]:
    """Long texts that are being spoken, two on each of two talkers."""
    running = [asyncio.create_task(api.speech(LONG)) for _ in range(4)]
    await api.wait_for(lambda fleet: sorted(r.running for r in ready(fleet, "talker")) == [2, 2])
    return running


async def test_a_talker_by_hand_is_used_killed_and_used_again(api: Api, instance: Instance, tmp_path: Path) -> None:
    """It finds the running instance by itself. Of its death nobody hears anything: the other talker goes on for it."""
    expected, long = await api.speech(TEXT), await api.speech(LONG)
    before = {name: process.pid for name, process in instance.processes().items()}
    for attempt in ("first", "second"):
        worker = await by_hand(tmp_path / f"{attempt}.log")
        try:
            await used_at_once(api, expected)
            running = await four_on_two(api)
        finally:
            worker.end(signal.SIGKILL)
        assert [answer.data == long.data for answer in await asyncio.gather(*running)] == [True] * 4
        await api.wait_for(lambda fleet: [r.name for r in ready(fleet, "talker")] == ["talker-0"])
        assert (await api.speech(TEXT)).data == expected.data
        await api.idle()
    assert {name: process.pid for name, process in instance.processes().items()} == before


async def test_a_talker_by_hand_that_is_told_to_stop_finishes_first(api: Api, tmp_path: Path) -> None:
    long = await api.speech(LONG)
    worker = await by_hand(tmp_path / "worker.log")
    try:
        await api.wait_for(lambda fleet: len(ready(fleet, "talker")) == 2)
        running = await four_on_two(api)
    finally:
        status = await asyncio.to_thread(worker.end, signal.SIGTERM)
    assert [answer.data == long.data for answer in await asyncio.gather(*running)] == [True] * 4
    assert status == 0 and "Traceback" not in worker.log
    await api.idle()


async def test_a_killed_talker_of_omni_serve_comes_back_and_nothing_else_is_touched(
    api: Api, instance: Instance
) -> None:
    """What was being spoken goes on with the new one. B019: while there is none, text is answered."""
    expected, long = await api.speech(TEXT), await api.speech(LONG)
    before = {name: process.pid for name, process in instance.processes().items()}
    deaths = (await api.fleet()).deaths
    seen = len(instance.log)
    running = asyncio.create_task(api.speech(LONG))
    await api.wait_for(lambda fleet: ready(fleet, "talker")[0].running == 1)
    psutil.Process(before["talker-0"]).kill()
    admitted = (await api.wait_for(lambda fleet: fleet.deaths == deaths + 1)).admitted
    health = await api.get("/health/ready")
    text = say("What is the capital of Japan?", modalities=["text"], audio=None)
    answer = asyncio.create_task(api.chat(text))
    fleet = await api.wait_for(lambda fleet: fleet.admitted == admitted + 1)
    assert not ready(fleet, "talker") and health.status == 503 and b"talker" in health.data
    assert (await api.get("/health/live")).status == 200
    assert "Tokyo" in (await answer)["choices"][0]["message"]["content"]

    await asyncio.to_thread(instance.said, r"^talker-0 +\| .*is ready", seen)
    await api.wait_for(lambda fleet: len(ready(fleet, "talker")) == 1)
    assert (await api.get("/health/ready")).status == 200
    assert (await running).data == long.data
    assert (await api.speech(TEXT)).data == expected.data
    assert "Tokyo" in (await api.chat_stream(say("What is the capital of Japan?"))).text
    after = {name: process.pid for name, process in instance.processes().items()}
    assert after.pop("talker-0") != before.pop("talker-0")
    assert after == before
    await api.idle()


@pytest.mark.parametrize("stage", ["thinker", "code2wav"])
async def test_an_answer_goes_on_where_it_was_when_its_stage_dies(api: Api, instance: Instance, stage: str) -> None:
    """Killed after the first sound: the client gets the words and samples of an undisturbed answer."""
    body = say("Tell me about the moon.", stream=True)
    undisturbed = await api.chat_stream(body)
    deaths, seen = (await api.idle()).deaths, len(instance.log)
    lines = []
    async with api.session.post(f"{api.url}/v1/chat/completions", json=body) as response:
        async for line in response.content:
            lines.append(line)
            if b'"data":' in line:
                instance.processes()[f"{stage}-0"].kill()
                break
        lines += [line async for line in response.content]
    answer = join([event(line) for line in lines if line.startswith(b"data: ")])
    assert answer.text == undisturbed.text
    assert answer.sound == undisturbed.sound
    await asyncio.to_thread(instance.said, rf"^{stage}-0 +\| .*is ready", seen)
    assert (await api.idle()).deaths == deaths + 1


def event(line: bytes) -> Any:
    data = line.removeprefix(b"data: ").strip()
    return "[DONE]" if data == b"[DONE]" else json.loads(data)
