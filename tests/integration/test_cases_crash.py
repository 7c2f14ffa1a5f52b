"""Cases of deaths, stops and restarts with real processes: what clients, health checks and the machine see of them."""

import asyncio
import base64
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from omni_common.errors import OmniError
from omni_common.frames import Beat, Text
from omni_gateway.stream import Event
from support.http import free_port, gateway
from support.rig import Rig, fake, running, until
from support.serving import assert_ends, serving

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
MIB = 1 << 20
PATIENCE_S = 30.0
#: With this rate a word is 38 KB of sound, which goes through shared memory.
LARGE = "stages.talker.options.rate=96000"


def chat(model: str, text: str = "x", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def spoken(text: str, form: str = "pcm16", **more: Any) -> dict[str, Any]:
    return chat("spoken", text, modalities=["text", "audio"], audio={"format": form}, **more)


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with http.get(url) as response:
        return response.status, await response.text()


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, str]:
    async with http.post(url + CHAT, json=body) as response:
        return response.status, await response.text()


async def seen(http: aiohttp.ClientSession, url: str, status: int) -> str:
    """What `url` says once it answers with `status`."""
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await get(http, url))[0] != status:
            await asyncio.sleep(0.02)
    return answer[1]


async def counted(http: aiohttp.ClientSession, url: str, outcome: str, status: int) -> float:
    """Requests of the chat route, as the metrics count them."""
    name = f'omni_requests_total{{outcome="{outcome}",route="{CHAT}",status="{status}"}} '
    lines = (await get(http, url + "/metrics"))[1].splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def is_ready(rig: Rig, stage: str) -> bool:
    return rig.ready(stage) == 1


def is_gone(rig: Rig, stage: str) -> bool:
    return not rig.replicas(stage)


def text_of(events: list[Event]) -> str:
    return "".join(event.body.text for event in events if event.modality == "text" and isinstance(event.body, Text))


def sound_of(events: list[Event]) -> np.ndarray:
    return np.concatenate([event.arrays["samples"] for event in events if event.modality == "audio"])


# ------------------------------------------------------------------------------------------------ what the client sees


async def test_a_failure_has_its_status_or_its_event_and_is_counted() -> None:
    """B016: before the first token a status, after three an event, after a death too; never a clean end."""
    for token in (0, 3):
        async with (
            running(fake("tokens"), f"stages.thinker.options.raise_at={token}") as rig,
            gateway(rig) as url,
            aiohttp.ClientSession() as http,
        ):
            status, text = await post(http, url, chat("tokens", max_tokens=10, stream=True))
            assert "told to fail" in text and '"error"' in text
            assert "[DONE]" not in text and '"finish_reason":"' not in text
            assert status == (500 if token == 0 else 200) and text.startswith("data: ") == bool(token)
            # The role, the tokens, the error.
            assert text.count("data: ") == (0 if token == 0 else 1 + token + 1)
            assert await counted(http, url, "error", status) == 1
            assert await counted(http, url, "success", 200) == 0
            assert (await post(http, url, chat("tokens", max_tokens=token)))[0] == (200 if token else 400)
            await rig.idle()


async def test_a_death_in_mid_stream_is_counted_as_a_failure() -> None:
    """B016"""
    async with (
        running(fake("tokens"), "limits.recover_s=1") as rig,
        gateway(rig) as url,
        aiohttp.ClientSession() as http,
        http.post(url + CHAT, json=chat("tokens", max_tokens=1_000_000, stream=True)) as response,
    ):
        for _ in range(3):
            await response.content.readuntil(b"\n\n")
        rig.kill("thinker")
        rest = (await response.content.read()).decode()
        assert '"code":"stage_lost"' in rest.rstrip().rpartition("\n")[2] and "[DONE]" not in rest
        assert await counted(http, url, "error", 200) == 1 and await counted(http, url, "success", 200) == 0


async def test_requests_that_run_into_their_limit_leave_the_next_ones_alone() -> None:
    """B043: each is aborted in every stage; one that asks for little is answered afterwards, every time."""
    async with (
        running(fake("tokens"), "limits.total_s=1", "stages.thinker.slots=4") as rig,
        gateway(rig) as url,
        aiohttp.ClientSession() as http,
    ):
        for number in range(3):
            endless = chat("tokens", max_tokens=1_000_000, stream=number % 2 == 0)
            for status, text in await asyncio.gather(*(post(http, url, endless) for _ in range(4))):
                assert status == (504 if number % 2 else 200)
                assert '"error"' in text and "[DONE]" not in text
            await rig.idle()
            status, text = await post(http, url, chat("tokens", max_tokens=2))
            assert status == 200 and "w0 w1" in text
        assert rig.link.fleet is not None and rig.link.fleet.deaths == 0


async def test_encoders_of_many_streams_outlive_clients_that_leave() -> None:
    """B045: three formats at once, half of the clients leave; nobody else's file is broken, the process stays."""
    chance = random.Random(45)
    marks = {"mp3": (b"ID3", b"\xff"), "opus": (b"OggS",), "flac": (b"fLaC",)}
    async with running(fake("spoken"), "limits.queue=64") as rig, gateway(rig) as url:
        name = f"gateway-{url.rsplit(':', 1)[1]}"
        process = psutil.Process(rig.processes[name].pid)

        async def one(form: str, leaves: int) -> int:
            """Bytes of the sound; `leaves`: after so many pieces of it, -1 never."""
            sound = b""
            async with (
                aiohttp.ClientSession() as http,
                http.post(url + CHAT, json=spoken("word " * 30, form, stream=True)) as response,
            ):
                assert response.status == 200, await response.text()
                while leaves:
                    event = await response.content.readuntil(b"\n\n")
                    if event.startswith(b"data: [DONE]"):
                        break
                    for piece in re.findall(rb'"data":"([^"]+)"', event):
                        sound += base64.b64decode(piece)
                        leaves -= 1
                if leaves == 0:
                    response.close()
                    return 0
            assert sound.startswith(marks[form])
            return len(sound)

        whole = {form: await one(form, -1) for form in marks}
        resident: list[int] = []
        for _ in range(12):
            asked = [(form, chance.randrange(4) if number % 2 else -1) for form in marks for number in range(10)]
            sizes = await asyncio.gather(*(one(*ask) for ask in asked))
            for (form, leaves), size in zip(asked, sizes, strict=True):
                assert leaves >= 0 or size == whole[form]
            resident.append(process.memory_info().rss)
            # B069: nothing that clients ask for starts a process.
            assert process.children(recursive=True) == []
        assert rig.processes[name].poll() is None
        # An encoder has a few hundred KB, and 240 of them came after the fourth round.
        assert resident[-1] - resident[3] < 40 * MIB, resident
        await rig.idle()


@pytest.mark.parametrize("stage", ["thinker", "talker"])
async def test_a_stage_dies_before_its_first_piece_and_after_its_last(stage: str) -> None:
    """B054: at the two ends of an answer, where there is nothing to go on from and nothing left to do."""
    async with running(fake("spoken"), LARGE) as rig:
        ask = rig.ask(" ".join(f"{number}" for number in range(12)), ("text", "audio"))
        undisturbed = await rig.answer(ask)
        assert len(undisturbed) == 24
        for heard in (0, 23):
            stream = await rig.link.submit(ask)
            events = aiter(stream)
            got = [await anext(events) for _ in range(heard)]
            rig.kill(stage)
            await rig.wait(stage)
            rig.worker(stage)
            async with asyncio.timeout(PATIENCE_S):
                got += [event async for event in events]
            await stream.aclose()
            assert text_of(got) == text_of(undisturbed)
            np.testing.assert_array_equal(sound_of(got), sound_of(undisturbed))
            await until(lambda: rig.ready(stage) == 1)
        await rig.idle()


async def test_a_request_that_waits_for_a_stage_that_dies_while_it_loads_is_answered() -> None:
    """B054: death at load, again and again; then one that comes up."""
    async with running(fake("spoken"), stages=("thinker",)) as rig:
        for _ in range(3):
            rig.worker("talker")
            await until(lambda: any(replica.state == "loading" for replica in rig.replicas("talker")) or bool(
                rig.ready("talker")
            ))  # fmt: skip
            waiting = asyncio.create_task(rig.answer(rig.ask("here I am", ("text", "audio"))))
            rig.kill("talker")
            await rig.wait("talker")
            rig.worker("talker")
            async with asyncio.timeout(PATIENCE_S):
                assert text_of(await waiting) == "here I am"
            rig.kill("talker")
            await rig.wait("talker")
            await until(lambda: not rig.replicas("talker"))


# ------------------------------------------------------------------------------------------------ health and heartbeats


async def test_a_stopped_stage_is_an_error_with_its_name_and_readiness_says_so() -> None:
    """B054, B056: nobody takes its place, nothing of it ends, and its client is told within the limits."""
    async with (
        running(fake("tokens"), "limits.recover_s=1") as rig,
        gateway(rig) as url,
        aiohttp.ClientSession() as http,
    ):
        async with http.post(url + CHAT, json=chat("tokens", max_tokens=1_000_000, stream=True)) as response:
            await response.content.readuntil(b"\n\n")
            rig.kill("thinker", signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_S):
                last = (await response.content.read()).decode().rstrip().rpartition("\n")[2]
        assert '"code":"stage_lost"' in last and "thinker" in last
        assert "thinker" in await seen(http, url + "/health/ready", 503)
        assert (await get(http, url + "/health"))[0] == 503 and (await get(http, url + "/health/live"))[0] == 200
        rig.kill("thinker", signal.SIGCONT)
        assert await rig.wait("thinker") == 3
        rig.worker("thinker")
        await seen(http, url + "/health/ready", 200)
        assert (await post(http, url, chat("tokens", max_tokens=2)))[0] == 200
        await rig.idle()


async def test_a_hung_engine_is_not_ready_although_it_beats() -> None:
    """B056: the loop that does the work stands still; the one that beats goes on."""
    overrides = ("stages.thinker.options.step_s=3600", "stages.thinker.stall_s=1.5", "limits.recover_s=1")
    async with running(fake("tokens"), *overrides) as rig, gateway(rig) as url, aiohttp.ClientSession() as http:
        await seen(http, url + "/health/ready", 200)
        asking = asyncio.create_task(post(http, url, chat("tokens", max_tokens=10)))
        assert "thinker" in await seen(http, url + "/health/ready", 503)
        assert (await get(http, url + "/health/live"))[0] == 200
        status, text = await asking
        assert status == 503 and "thinker" in text and "hung" in text
        assert await rig.wait("thinker") == 3


async def test_every_side_dies_five_times_and_is_up_again() -> None:
    """B055: what is down is known as down, and what is up as up, each time."""
    async with running(fake("spoken")) as rig:
        for _ in range(5):
            async with gateway(rig) as url, aiohttp.ClientSession() as http:
                ready = url + "/health/ready"
                await seen(http, ready, 200)
                rig.kill("talker")
                await rig.wait("talker")
                assert "talker" in await seen(http, ready, 503)
                # The word of the return comes from another scheduler than the word of the death.
                rig.kill("scheduler")
                await rig.wait("scheduler")
                rig.worker("talker")
                rig.scheduler()
                await seen(http, ready, 200)
                assert (await post(http, url, spoken("all here")))[0] == 200
                name = f"gateway-{url.rsplit(':', 1)[1]}"
                rig.kill(name)
                await rig.wait(name)
            await until(lambda: rig.link.fleet is not None and rig.link.fleet.gateways == 1)
        await rig.idle()


async def test_a_beat_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """B055: an exception in one heartbeat, and the next one comes."""
    async with running(fake("tokens")) as rig:
        beats: list[int] = []

        def beat() -> Beat:
            beats.append(len(beats))
            if len(beats) == 1:
                raise RuntimeError("this once")
            return Beat()

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        monkeypatch.setattr(rig.link._member, "_beat", beat)
        await until(lambda: len(beats) >= 2, 10)
        assert not rig.stop.requested
        assert await rig.answer(rig.ask(params={"thinker": {"max_tokens": 2}}))


# ---------------------------------------------------------------------------------------------- processes and memory


async def test_kill_9_of_one_instance_leaves_others_with_the_same_command_line_alone() -> None:
    """B057: children end, and nothing that only looks like one."""
    alike = [sys.executable, "-c", "input()", "-m", "omni_worker.main", "--stage", "two", "--name", "two-0"]
    bystander = await asyncio.create_subprocess_exec(*alike, stdin=subprocess.PIPE, start_new_session=True)
    try:
        async with serving() as one, serving() as two:
            pids = two.pids()
            fds = [os.pidfd_open(pid) for pid in one.pids().values()]
            await one.end(signal.SIGKILL)
            assert_ends(fds, within_s=10.0)
            assert two.pids() == pids and {r.state for r in (await two.fleet()).replicas} == {"ready"}
            assert await two.end() == 0
        assert bystander.returncode is None
    finally:
        await bystander.communicate(b"\n")
    assert bystander.returncode == 0


def arenas(rig: Rig) -> set[str]:
    """Incarnations whose memory some process of the rig, or this one, still has."""
    found: set[str] = set()
    for pid in ("self", *(str(process.pid) for process in rig.processes.values())):
        found |= set(re.findall(r"memfd:omni-([0-9a-f]{16})", Path(f"/proc/{pid}/maps").read_text()))
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                found |= set(re.findall(r"memfd:omni-([0-9a-f]{16})", os.readlink(entry.path)))
            except FileNotFoundError:
                continue
    return found


def living(rig: Rig) -> set[str]:
    assert rig.link.fleet is not None
    return {rig.link._node.incarnation} | {replica.incarnation for replica in rig.link.fleet.replicas}


async def test_what_a_worker_left_that_died_unseen_is_cleared_away() -> None:
    """B060: it died while there was no scheduler. Its neighbours let go of its memory, and its sockets go."""
    async with running(fake("identity3")) as rig:
        big = np.zeros(900_000, np.uint8)

        def sockets() -> set[str]:
            return {path.stem for path in rig.run.path.iterdir() if path.suffix in (".in", ".fd")}

        for stage in ("one", "three"):
            # Everybody has mapped the memory of whoever sends to it.
            await rig.answer(rig.ask(arrays={"x": big}))
            (dead,) = rig.replicas(stage)
            for name in ("scheduler", stage):
                rig.kill(name)
                await rig.wait(name)
            assert dead.incarnation in arenas(rig) & sockets()
            rig.worker(stage)
            rig.scheduler()
            await rig.answer(rig.ask(arrays={"x": big}))
            await until(partial(is_ready, rig, stage))
            await until(lambda: arenas(rig) == sockets() == living(rig), 10)
        await rig.idle()


async def test_restarts_after_deaths_under_load_succeed_and_leave_no_memory() -> None:
    """B060: a stage dies, the others run on without it, then everything is killed and started again, four times."""
    stages = ("one", "two", "three")
    foreign = Path("/dev/shm") / f"0123456789abcdef.{os.getpid()}.arena"
    foreign.touch()
    try:
        before = set(os.listdir("/dev/shm"))
        async with running(fake("identity3"), *(f"stages.{stage}.arena_mib=4" for stage in stages)) as rig:
            own = rig.run.path / "notes.arena"
            own.touch()
            big = np.zeros(900_000, np.uint8)
            for number in range(4):
                load = [asyncio.create_task(rig.answer(rig.ask(arrays={"x": big}))) for _ in range(16)]
                victim = stages[number % 3]
                await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
                rig.kill(victim)
                await rig.wait(victim)
                load += [asyncio.create_task(rig.answer(rig.ask(arrays={"x": big}))) for _ in range(16)]
                await until(partial(is_gone, rig, victim))
                for name in ("scheduler", *stages):
                    if name != victim:
                        rig.kill(name)
                        await rig.wait(name)
                for task in load:
                    task.cancel()
                await asyncio.gather(*load, return_exceptions=True)
                rig.scheduler()
                for stage in stages:
                    rig.worker(stage)
                async with asyncio.timeout(PATIENCE_S):
                    (event,) = await rig.answer(rig.ask(arrays={"x": big}))
                assert event.arrays["x"].tobytes() == (big + 3).tobytes()
                del event
                await until(lambda: all(rig.ready(stage) == 1 for stage in stages))
                await rig.idle()
                await until(lambda: rig.link._node.arena.used == 0)
                await until(lambda: arenas(rig) <= living(rig))
                assert set(os.listdir("/dev/shm")) == before and own.exists()
    finally:
        foreign.unlink()


async def test_a_stopped_consumer_fills_an_arena_and_breaks_nothing() -> None:
    """B061: what there is no room for waits, what can never fit fails alone, and all goes on when it wakes."""
    async with running(fake("identity3"), "stages.one.arena_mib=4") as rig:
        data = np.random.default_rng(61).integers(0, 200, 1_000_000, np.uint8)
        rig.kill("two", signal.SIGSTOP)
        asking = [asyncio.create_task(rig.answer(rig.ask(arrays={"x": data + n}))) for n in range(12)]
        await until(lambda: any(replica.arena_used >= 3 * MIB for replica in rig.replicas("one")))
        with pytest.raises(OmniError) as refused:
            async with asyncio.timeout(PATIENCE_S):
                await rig.answer(rig.ask(arrays={"x": np.zeros(8 * MIB, np.uint8)}))
        assert (refused.value.code, refused.value.stage) == ("tensor_too_large", "one")
        assert not any(task.done() for task in asking)
        rig.kill("two", signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_S):
            for number, (event,) in enumerate(await asyncio.gather(*asking)):
                np.testing.assert_array_equal(event.arrays["x"], data + number + 3)
        del event, asking
        assert rig.link.fleet is not None and rig.link.fleet.deaths == 0
        await rig.idle()


async def test_nothing_is_said_of_leaks_after_work_and_an_ordered_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """B065: ten answers through shared memory, then SIGTERM; Python tells of what nobody closed."""
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    before = set(os.listdir("/dev/shm"))
    async with serving("--set", LARGE, pipeline="spoken") as instance:
        async with aiohttp.ClientSession() as http:
            for _ in range(10):
                status, text = await post(http, instance.url, spoken("ten answers in all"))
                assert status == 200 and len(text) > 20_000
        assert await instance.end() == 0
        said = [
            line
            for line in instance.lines
            if re.search(r"leaked|resource_tracker|ResourceWarning|never (retrieved|awaited)|Traceback", line)
        ]
        assert said == []
    assert set(os.listdir("/dev/shm")) == before


# ------------------------------------------------------------------------------------------------------- containers


async def ends(command: list[str]) -> tuple[int, str]:
    """Exit status and errors of a process that ends by itself."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("omni_worker.main", ["--stage", "one"]), ("omni_gateway.main", ["--port", "0"])],
)
async def test_too_little_memory_is_said_before_anything_is_loaded(module: str, arguments: list[str]) -> None:
    """B073: how much, where, and which setting; in one line and with a status."""
    overrides = ("stages.one.arena_mib=64", "stages.one.options.fail_load=it was loaded")
    async with running(fake("identity3"), *overrides, stages=()) as rig:
        limited = ["sh", "-c", 'ulimit -f 2000 && exec "$@"', "sh", sys.executable, "-m", module]
        status, said = await ends([*limited, *rig._arguments(), *arguments])
        assert status == 1
        (line,) = said.splitlines()
        assert "no room for an arena of 64 MiB" in line and "arena_mib" in line


async def test_the_order_of_starts_does_not_matter() -> None:
    """B074: gateway and workers are there before the scheduler, wait for it, and are used."""
    async with running(fake("spoken"), stages=()) as rig, aiohttp.ClientSession() as http:
        rig.kill("scheduler")
        await rig.wait("scheduler")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        rig.start("gateway", "omni_gateway.main", "--port", str(port))
        for stage in ("talker", "thinker"):
            rig.worker(stage)

        async def live() -> bool:
            try:
                return (await get(http, url + "/health/live"))[0] == 200
            except aiohttp.ClientConnectionError:
                return False

        async with asyncio.timeout(PATIENCE_S):
            while not await live():
                await asyncio.sleep(0.02)
        assert "scheduler" in await seen(http, url + "/health/ready", 503)
        rig.scheduler()
        await seen(http, url + "/health/ready", 200)
        assert (await post(http, url, spoken("hello")))[0] == 200
        assert all(process.poll() is None for process in rig.processes.values())


@pytest.mark.parametrize("module", ["omni_scheduler.main", "omni_worker.main", "omni_gateway.main"])
async def test_a_run_folder_that_cannot_be_used_is_one_clear_line(tmp_path: Path, module: str) -> None:
    """B074: somebody else's folder, and a path that cannot be a folder."""
    stage = ["--stage", "thinker"] if "worker" in module else []
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-m", module, "--pipelines", fake("tokens"), *stage, "--run-dir"]
    private = tmp_path / "private"
    private.mkdir(mode=0o500)
    for folder in (file / "run", private):
        # Root may write everywhere, unless it has given its privileges up.
        privileges = ["setpriv", "--bounding-set=-all"] if os.getuid() == 0 else []
        status, said = await ends([*privileges, *command, str(folder)])
        assert status == 2
        (line,) = said.splitlines()
        assert line.startswith("omni-") and str(folder) in line


HEALTH = ROOT / "deploy/docker/health.py"


async def test_the_health_check_of_a_container_tells_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """B075: with what is in the image, about this very process, by a round trip over the bus, and in time."""
    spec = importlib.util.spec_from_file_location("health", HEALTH)
    assert spec is not None and spec.loader is not None
    health = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(health)

    async def asked(role: str) -> tuple[int, str]:
        env = {**os.environ, "OMNI_RUN_DIR": str(rig.run.path)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, HEALTH, role, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        )
        # Docker ends a check that takes longer than its limit, and what it was about to say is lost.
        async with asyncio.timeout(PATIENCE_S):
            said, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode().strip()

    async def until_said(role: str, status: int, words: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not ((answer := await asked(role))[0] == status and words in answer[1]):
                assert "Traceback" not in answer[1]

    async with running(fake("spoken"), stages=("thinker",)) as rig, gateway(rig) as url:
        monkeypatch.setattr(health, "READY", url + "/health/ready")
        assert await asked("scheduler") == (0, "healthy")
        assert await asked("thinker") == (0, "healthy")
        assert await asked("talker") == (1, "the scheduler does not know it")
        assert "talker" in await asyncio.to_thread(health.gateway)
        rig.worker("talker")
        await until_said("talker", 0, "healthy")
        assert await asyncio.to_thread(health.gateway) == ""
        rig.kill("thinker", signal.SIGSTOP)
        await until_said("thinker", 1, "")
        rig.kill("thinker")
        await rig.wait("thinker")
        await until_said("thinker", 1, "the scheduler does not know it")
        assert "thinker" in await asyncio.to_thread(health.gateway)
        rig.kill("scheduler")
        await rig.wait("scheduler")
        for role in ("scheduler", "talker"):
            assert await asked(role) == (1, "the scheduler does not answer")
        rig.scheduler()
        rig.worker("thinker")
        for role in ("scheduler", "thinker", "talker"):
            await until_said(role, 0, "healthy")
