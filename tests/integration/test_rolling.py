"""`omni drain|restart|scale` on real processes while clients are served."""

import asyncio
import base64
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from omni_supervisor.control import SOCKET
from support.serving import PATIENCE_S, Serving, assert_ends, omni, serving

CLIENTS = 8
#: The fake talker makes 0.1 s of 24 kHz, 16 bit, of every word.
TONE_BYTES = 4800
#: A request runs for a few tenths of a second, so that each of the steps meets some.
WORDS = 30
SLOW = ("--set", "stages.thinker.options.step_s=0.002")


class Load:
    """`CLIENTS` clients ask one thing after another; every answer must be whole and the right one."""

    def __init__(self, url: str) -> None:
        self.answers = 0
        self.wrong: list[str] = []
        self._url = f"{url}/v1/chat/completions"
        self._changed = asyncio.Event()
        self._over = False

    async def client(self, number: int) -> None:
        # Half of the clients keep their connection, the other half makes a new one for every request.
        connector = aiohttp.TCPConnector(force_close=number % 2 == 0)
        async with aiohttp.ClientSession(connector=connector) as session:
            count = 0
            while not self._over:
                words = " ".join(f"c{number}n{count}w{word}" for word in range(WORDS))
                said = await self._ask(session, words)
                count += 1
                self.answers += 1
                if said != (words, WORDS * TONE_BYTES):
                    self.wrong.append(f"{words!r} was answered {said!r}")
                self._changed.set()

    async def _ask(self, session: aiohttp.ClientSession, words: str) -> tuple[str, int]:
        """The streamed text and the bytes of its sound; the bare answer where it is not what a client wants."""
        body = {
            "model": "spoken",
            "messages": [{"role": "user", "content": words}],
            "stream": True,
            "modalities": ["text", "audio"],
            "audio": {"format": "pcm16"},
        }
        async with session.post(self._url, json=body) as answer:
            try:
                text = await answer.text()
            except aiohttp.ClientPayloadError as error:
                return f"broken off: {error}", 0
        if answer.status != 200 or not text.endswith("data: [DONE]\n\n"):
            return f"{answer.status} {text}", 0
        events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in json.loads(event).get("choices", [])]
        audio = [delta.get("audio") or {} for delta in deltas]
        sound = sum(len(base64.b64decode(piece.get("data") or "")) for piece in audio)
        return "".join(piece.get("transcript") or "" for piece in audio), sound

    async def more(self, count: int) -> None:
        """Wait for so many further answers."""
        goal = self.answers + count
        async with asyncio.timeout(PATIENCE_S):
            while self.answers < goal:
                self._changed.clear()
                await self._changed.wait()

    def end(self) -> None:
        self._over = True


@contextlib.asynccontextmanager
async def load(url: str) -> AsyncIterator[Load]:
    """Clients until the end of the block, none of which has failed then."""
    load = Load(url)
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(load.client(number))
        try:
            await load.more(CLIENTS)
            yield load
            await load.more(CLIENTS)
        finally:
            load.end()
    assert load.wrong == []


@pytest.fixture
async def spoken() -> AsyncIterator[Serving]:
    async with serving(*SLOW, pipeline="spoken") as spoken:
        yield spoken


@pytest.mark.parametrize("target", ["thinker", "talker", "scheduler", "gateway"])
async def test_one_after_another_is_replaced_and_no_request_fails(spoken: Serving, target: str) -> None:
    async with load(spoken.url) as clients:
        for _ in range(3):
            before = spoken.pids()
            status, out = await omni("restart", target)
            assert status == 0, out
            after = spoken.pids()
            name = target if target in after else f"{target}-0"
            assert {n for n in before if before[n] != after[n]} == {name} and before.keys() == after.keys()
            assert f"{name}: process {after[name]} is ready" in out
            await clients.more(CLIENTS)
    assert await spoken.end() == 0


async def test_restart_all_scale_and_drain_under_load_then_a_kill_leaves_nothing(spoken: Serving) -> None:
    run = Path(os.environ["XDG_RUNTIME_DIR"])
    async with load(spoken.url) as clients:
        before = spoken.pids()
        assert (await omni("scale", "talker=3"))[0] == 0
        assert sorted(r.name for r in await spoken.replicas("talker")) == ["talker-0", "talker-1", "talker-2"]
        await clients.more(CLIENTS)

        status, out = await omni("restart", "all")
        assert status == 0, out
        after = spoken.pids()
        assert after.keys() == before.keys() | {"talker-1", "talker-2"}
        assert not set(before.values()) & set(after.values())
        assert {r.pid for r in (await spoken.fleet()).replicas} == {p for n, p in after.items() if n[-2] == "-"}

        status, out = await omni("drain", "talker-0")
        assert status == 0 and f"talker-0: process {after['talker-0']} has left" in out
        await clients.more(CLIENTS)
        status, out = await omni("scale", "talker=1")
        assert status == 0 and f"talker-2: process {after['talker-2']} has left" in out
        await clients.more(CLIENTS)
        [talker] = await spoken.replicas("talker")
        assert (talker.name, talker.pid, talker.state) == ("talker-1", after["talker-1"], "ready")
        status, table = await omni("status", "--url", spoken.url)
        assert status == 0 and "talker-1" in table and "talker-0" not in table and " 0 failed" in table
    fds = [os.pidfd_open(pid) for pid in spoken.pids().values()]
    await spoken.end(signal.SIGKILL)
    assert_ends(fds, within_s=10.0)
    [dead] = run.glob("omnibus-*")
    async with serving(pipeline="spoken") as again:
        assert not dead.exists()
        assert await again.end() == 0
    assert list(run.glob("omnibus-*")) == []


async def test_a_worker_that_is_killed_while_it_drains_loses_nothing(spoken: Serving) -> None:
    async with load(spoken.url) as clients:
        old = spoken.pids()["talker-0"]
        order = asyncio.create_task(omni("restart", "talker"))
        await spoken.seen(r"talker-0 is draining")
        with contextlib.suppress(ProcessLookupError):
            os.kill(old, signal.SIGKILL)
        status, out = await order
        assert status == 0, out
        await clients.more(CLIENTS)
    assert await spoken.end() == 0


@pytest.mark.parametrize("moment", ["asked to restart all", "thinker-0: process .* is ready"])
async def test_kill_9_of_the_supervisor_in_the_middle_of_an_order_leaves_nothing(spoken: Serving, moment: str) -> None:
    order = asyncio.create_task(omni("restart", "all"))
    await spoken.seen(moment)
    fds = [os.pidfd_open(child.pid) for _, child in spoken.processes() if psutil.pid_exists(child.pid)]
    await spoken.end(signal.SIGKILL)
    status, out = await order
    assert status == 1 and out.splitlines()[-1].startswith("omni: ")
    assert_ends(fds, within_s=10.0)
    async with serving(pipeline="spoken") as again:
        assert await again.end() == 0


async def test_a_stop_in_the_middle_of_an_order_is_told_and_ends_everything(spoken: Serving) -> None:
    order = asyncio.create_task(omni("restart", "all"))
    await spoken.seen("asked to restart all")
    assert await spoken.end() == 0
    status, out = await order
    assert status == 1 and out.splitlines()[-1].startswith("omni: ")
    assert list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("omnibus-*")) == []


async def test_a_new_version_that_does_not_start_changes_nothing(spoken: Serving, tmp_path: Path) -> None:
    """The new worker is killed while it loads: its requests are the old one's still."""
    async with load(spoken.url):
        before = spoken.pids()
        order = asyncio.create_task(omni("restart", "talker"))
        async with asyncio.timeout(PATIENCE_S):
            while len(fresh := {p.pid for n, p in spoken.processes() if n == "talker-0"} - set(before.values())) == 0:
                await asyncio.sleep(0.01)
        os.kill(fresh.pop(), signal.SIGKILL)
        status, out = await order
        assert status == 1 and "killed by SIGKILL" in out and "talker-0 is left as it was" in out
        assert spoken.pids() == before
    assert await spoken.end() == 0


async def test_orders_that_make_no_sense_are_refused_with_a_clear_line(spoken: Serving) -> None:
    for arguments, message in (
        (("restart", "talkr"), "nothing here is called talkr; there are thinker, talker, scheduler"),
        (("scale", "vocoder=2"), "no pipeline here has a stage vocoder; there are thinker, talker"),
        (("drain", "gateway"), "gateway cannot be drained, only restarted"),
    ):
        assert await omni(*arguments) == (1, f"omni: {message}{(await omni(*arguments))[1].partition(message)[2]}")
    [run] = Path(os.environ["XDG_RUNTIME_DIR"]).glob("omnibus-*")
    assert (run / SOCKET).stat().st_mode & 0o777 == 0o660
    assert await omni("scale", "talker=1", "--run-dir", str(run)) == (0, "nothing to do\n")
    assert await spoken.end() == 0
