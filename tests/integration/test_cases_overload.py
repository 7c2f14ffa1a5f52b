"""Cases of full systems, clients that leave or do not read, and ends that must not hang, with real processes."""

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from omni_common.frames import Tensor, Text
from omni_gateway.link import BusStream
from omni_gateway.stream import Ask, Given
from support.http import gateway
from support.rig import Rig, fake, running, until

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
PATIENCE_S = 30.0

#: A stage of its own behind each route, one request at a time; two may wait.
ROUTES = """
name: routes
stages:
  thinker: {{engine: fake, model: echo, slots: 1, options: {{notes: {notes}}}}}
  talker: {{engine: fake, model: tone, slots: 1, options: {{notes: {notes}}}}}
tasks:
  chat: {{input: {{text: thinker}}, output: {{text: thinker}}}}
  speech: {{input: {{text: talker}}, output: {{audio: talker}}}}
limits: {{queue: 2}}
"""


def chat(model: str, text: str = "x", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def asked(stream: bool) -> list[tuple[str, dict[str, Any]]]:
    """Route and body of each request."""
    speech = {"model": "routes", "input": "words", "stream_format": "sse" if stream else "audio"}
    return [(CHAT, chat("routes", stream=stream)), (SPEECH, speech)]


async def hold(rig: Rig) -> list[BusStream]:
    """Take the only place of every stage, for inputs that have not ended."""
    given = [Given("text", Text("x"), 0, 1, False)]
    tasks = {"chat": "text", "speech": "audio"}
    return [await rig.link.submit(Ask(rig.pipeline, task, [output], given, 1)) for task, output in tasks.items()]


async def counts(rig: Rig, **figures: int) -> None:
    """Until the scheduler reports these."""
    await until(lambda: all(getattr(rig.link.fleet, name, None) == value for name, value in figures.items()))


async def produced(rig: Rig, stage: str, count: int) -> None:
    """Until the stage says that it has made so much since it started."""
    await until(lambda: [replica.produced for replica in rig.replicas(stage)] == [count])


def started(notes: Path) -> int:
    """Requests that ever came to an engine."""
    return sum(file.read_text().count("job ") for file in notes.glob("*.log"))


async def test_a_full_system_refuses_on_every_route_at_once_and_who_leaves_the_queue_never_starts(
    tmp_path: Path,
) -> None:
    """B047: refused before anything is sent, while everything else answers. B042: a queued request is forgotten."""
    notes = tmp_path / "notes"
    file = tmp_path / "routes.yaml"
    file.write_text(ROUTES.format(notes=notes))
    async with running(str(file)) as rig, gateway(rig) as url, aiohttp.ClientSession() as http:
        held = await hold(rig)
        await until(lambda: started(notes) == 2)
        async with aiohttp.ClientSession() as leaving:
            waiting = [asyncio.create_task(status(leaving, url + path, body)) for path, body in asked(False)]
            await counts(rig, queued=2)
            for path, body in asked(False) + asked(True):
                async with asyncio.timeout(PATIENCE_S), http.post(url + path, json=body) as response:
                    assert response.status == 429 and int(response.headers["retry-after"]) >= 1
                    error = (await response.json())["error"]
                    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            for path in ("/health", "/health/ready", "/v1/models", "/metrics", "/omni/status"):
                async with asyncio.timeout(PATIENCE_S), http.get(url + path) as response:
                    assert response.status == 200
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await counts(rig, queued=0, rejected=4)
        for stream in held:
            await stream.aclose()
        await rig.idle()
        assert started(notes) == 2
        for path, body in asked(False):
            assert await status(http, url + path, body) == 200
        assert started(notes) == 4
        await rig.idle()


async def status(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with http.post(url, json=body) as response:
        await response.read()
        return response.status


async def test_a_client_that_leaves_when_only_the_last_stage_has_work_stops_it() -> None:
    """B042: everything before it has ended and waits in its inbox; what comes next is answered as ever."""
    async with running(fake("spoken")) as rig, gateway(rig) as url, aiohttp.ClientSession() as http:
        more = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
        words = 0
        for number, stream in enumerate((True, False), 1):
            words += 30
            rig.kill("talker", signal.SIGSTOP)
            async with aiohttp.ClientSession() as leaving:
                body = chat("spoken", "word " * 30, stream=stream, **more)
                asking = asyncio.create_task(status(leaving, url + CHAT, body))
                await produced(rig, "thinker", words)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await counts(rig, cancelled=number)
            rig.kill("talker", signal.SIGCONT)
            await rig.idle()
            async with http.post(url + CHAT, json=chat("spoken", "all here", **more)) as response:
                assert (await response.json())["choices"][0]["message"]["audio"]["transcript"] == "all here"
            words += 2
        await rig.idle()


async def test_a_client_that_reads_nothing_is_let_go_at_the_deadline() -> None:
    """B042, B108: it holds neither a stage nor the gateway for longer than a request may take, though it stays."""
    overrides = ("limits.total_s=1.5", "stages.thinker.options.per_step=50")
    async with running(fake("tokens"), *overrides) as rig, gateway(rig) as url, aiohttp.ClientSession() as http:
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = json.dumps(chat("tokens", stream=True, max_tokens=1_000_000)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: rig.replicas("thinker")[0].running == 1)
            await counts(rig, failed=1)
            await rig.idle()
            async with http.post(url + CHAT, json=chat("tokens", max_tokens=2)) as response:
                assert response.status == 200
            await zero_in_flight(http, url)


async def zero_in_flight(http: aiohttp.ClientSession, url: str) -> None:
    name = f'omni_requests_in_flight{{route="{CHAT}"}} '
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get(url + "/metrics") as response:
                (line,) = [line for line in (await response.text()).splitlines() if line.startswith(name)]
            value = float(line.removeprefix(name))
            assert value >= 0
            if value == 0:
                return
            await asyncio.sleep(0.02)


async def test_what_is_counted_after_answers_errors_and_aborts_over_the_real_bus() -> None:
    """B108: every request once, as what it was; gauges at zero, in the gateway and of the fleet."""
    chance = random.Random(108)
    async with running(fake("spoken"), "limits.queue=128") as rig, gateway(rig) as url:
        told: Counter[str] = Counter()

        async def one(number: int) -> None:
            kind = ("whole", "streamed", "wrong", "leaves")[number % 4]
            form = chance.choice(("mp3", "opus", "pcm16"))
            body = chat("spoken", "word " * 20, modalities=["text", "audio"], audio={"format": form})
            body |= {"stream": kind in ("streamed", "leaves")}
            if kind == "wrong":
                body["modalities"] = ["smell"]
            async with aiohttp.ClientSession() as http, http.post(url + CHAT, json=body) as response:
                if kind == "leaves":
                    await response.content.readuntil(b"\n\n")
                    response.close()
                    return
                text = await response.text()
                assert response.status == (400 if kind == "wrong" else 200), text
            told["error" if kind == "wrong" else "success"] += 1

        total = 200
        for start in range(0, total, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))
        await rig.idle()
        async with aiohttp.ClientSession() as http:
            await zero_in_flight(http, url)
            async with http.get(url + "/metrics") as response:
                text = await response.text()
        counted: Counter[str] = Counter()
        for outcome, value in re.findall(
            rf'^omni_requests_total{{outcome="(\w+)",route="{CHAT}".*}} (\S+)$', text, re.M
        ):
            counted[outcome] += int(float(value))
        assert sum(counted.values()) == total
        assert counted["error"] == told["error"] == total // 4
        # One that leaves as its answer ends may have had all of it.
        assert counted["success"] >= told["success"] == total // 2
        assert re.search(r"^omni_queue_requests 0\.0$", text, re.M)
        assert re.search(r"^omni_running_requests 0\.0$", text, re.M)
        assert re.findall(r"^omni_stage_(?:running|waiting){.*} (\S+)$", text, re.M) == ["0.0"] * 4
        fleet = rig.link.fleet
        assert fleet is not None and fleet.admitted == fleet.completed + fleet.cancelled + fleet.failed
        assert fleet.failed == 0 and fleet.admitted == total - total // 4


# ------------------------------------------------------------------------------------------- the gateway's own arena


async def test_a_client_that_leaves_while_its_input_is_copied_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B059, B042: the copy, in its thread, cannot be cancelled; what it has put into the arena must come back."""
    async with running(fake("identity3")) as rig:
        node = rig.link._node
        publish = node.publish
        begun, go, done = threading.Event(), threading.Event(), threading.Event()

        def slowly(request_id: str, arrays: dict[str, np.ndarray], sinks: int) -> dict[str, Tensor] | None:
            begun.set()
            go.wait(PATIENCE_S)
            try:
                return publish(request_id, arrays, sinks)
            finally:
                done.set()

        monkeypatch.setattr(node, "publish", slowly)
        big = {"x": np.zeros(1_000_000, np.float32)}
        submitting = asyncio.create_task(rig.link.submit(rig.ask(arrays=big)))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        submitting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await submitting
        go.set()
        await asyncio.to_thread(done.wait, PATIENCE_S)
        monkeypatch.undo()
        await rig.idle()
        await until(lambda: node.arena.used == 0, 5)
        (event,) = await rig.answer(rig.ask(arrays=big))
        assert event.arrays["x"][0] == 3


async def test_who_waits_for_room_hears_of_it_whoever_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """B067: room that comes between the look and the wait, and other requests that ask for theirs meanwhile."""
    async with running(fake("identity3")) as rig:
        publish = rig.link._publish
        # As if every grant came before the word of the placement, which is then no news of room.
        monkeypatch.setattr(rig.link._node, "_on_room", lambda request_id: None)
        looks = 0

        async def full_once(request_id: str, arrays: dict[str, np.ndarray], sinks: int) -> dict[str, Tensor] | None:
            nonlocal looks
            if not arrays:
                return {}
            looks += 1
            if looks > 1:
                return await publish(request_id, arrays, sinks)
            # There was none at the look; now a slot comes back, from whatever thread, and others ask for something.
            rig.link._node.arena.on_free[0]()
            await asyncio.sleep(0)
            await rig.answer(rig.ask())
            return None

        monkeypatch.setattr(rig.link, "_publish", full_once)
        async with asyncio.timeout(10):
            (event,) = await rig.answer(rig.ask(arrays={"x": np.zeros(100_000, np.float32)}))
        assert looks == 2 and event.arrays["x"][0] == 3
        await rig.idle()


# --------------------------------------------------------------------------------------------------------------- ends


async def test_a_gateway_that_cannot_listen_ends_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    """B066, B071: its sockets on the bus are there already, and the scheduler knows it."""
    async with running(fake("tokens")) as rig:
        with socket.create_server(("127.0.0.1", 0)) as other:
            rig.start("second", "omni_gateway.main", "--port", str(other.getsockname()[1]), "--name", "second")
            async with asyncio.timeout(PATIENCE_S):
                assert await rig.wait("second") not in (0, -signal.SIGKILL)
        assert "cannot listen on" in capfd.readouterr().err
        await counts(rig, gateways=1)
        assert await rig.answer(rig.ask(params={"thinker": {"max_tokens": 2}}))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_everybody_ends_in_order_without_a_scheduler_that_answers(number: signal.Signals) -> None:
    """B066: with mail for it that nobody takes."""
    async with running(fake("spoken")) as rig, gateway(rig) as url:
        rig.kill("scheduler", number)
        names = [f"gateway-{url.rsplit(':', 1)[1]}", "thinker", "talker"]
        for name in names:
            rig.kill(name, signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert [await rig.wait(name) for name in names] == [0, 0, 0]
        rig.kill("scheduler", signal.SIGKILL)
        await rig.wait("scheduler")
