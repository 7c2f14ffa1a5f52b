"""`omni serve` with its real processes, on engines that compute nothing."""

import asyncio
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from omni_common.frames import Fleet
from omni_supervisor.cli import main

PIPELINE = Path(__file__).parents[1] / "pipelines" / "identity3.yaml"
#: Six Python processes start on a machine that may be loaded.
PATIENCE_S = 60.0
OMNI = (sys.executable, "-m", "omni_supervisor.cli")


class Serving:
    """A running `omni serve`; its log is read all the time."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.lines: list[str] = []
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())
            self._changed.set()

    async def seen(self, pattern: str, times: int = 1) -> str:
        async with asyncio.timeout(PATIENCE_S):
            while len(found := [line for line in self.lines if re.search(pattern, line)]) < times:
                self._changed.clear()
                assert not self._reader.done(), self.lines
                await self._changed.wait()
        return found[times - 1]

    async def ready(self, times: int = 1) -> None:
        await self.seen(r"^omni +\| ready after", times)

    def children(self) -> dict[str, psutil.Process]:
        """By module and, for workers, name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            line = child.cmdline()
            module = line[line.index("-m") + 1].split(".")[0].removeprefix("omni_")
            found[line[line.index("--name") + 1] if "--name" in line else module] = child
        return found

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children().items()}

    async def fleet(self) -> Fleet:
        omni = await asyncio.create_subprocess_exec(
            *OMNI, "status", "--json", "--url", f"http://127.0.0.1:{self.port}", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await omni.communicate()
        assert omni.returncode == 0
        return msgspec.json.decode(out, type=Fleet)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await self.wait()

    async def wait(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            status = await self.process.wait()
            await self._reader
        return status


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run folders are made. Short, because sockets lie in it."""
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "r"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def serve(base: Path) -> AsyncIterator[Callable]:
    started: list[Serving] = []

    async def serve(*flags: str, port: int | None = None) -> Serving:
        port = port or free_port()
        process = await asyncio.create_subprocess_exec(
            *OMNI, "serve", "--pipeline", str(PIPELINE), "--port", str(port), *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        started.append(Serving(process, port))
        return started[-1]

    yield serve
    for serving in started:
        await serving.end(signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def assert_ends(fds: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for fd in fds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(max(0.0, deadline - time.monotonic()) * 1000), "a process is still alive"
        os.close(fd)


async def test_starts_serves_and_stops_clean(serve, base: Path) -> None:
    serving = await serve()
    await serving.ready()
    assert f"http://127.0.0.1:{serving.port}/v1" in await serving.seen("ready after")
    fleet = await serving.fleet()
    assert {r.name: r.state for r in fleet.replicas} == {"one-0": "ready", "two-0": "ready", "three-0": "ready"}
    assert set(serving.children()) == {"scheduler", "gateway", "one-0", "two-0", "three-0"}
    [run] = base.iterdir()
    assert run.stat().st_mode & 0o777 == 0o770
    assert await serving.end() == 0
    assert list(base.iterdir()) == []
    log = "\n".join(serving.lines)
    assert "Traceback" not in log and "leaked" not in log and "never retrieved" not in log


async def test_ctrl_c_of_a_terminal_stops_in_order(serve) -> None:
    serving = await serve()
    await serving.ready()
    assert await serving.end(signal.SIGINT) == 0


async def test_stops_while_it_is_still_starting(serve, base: Path) -> None:
    serving = await serve()
    await serving.seen(r"^omni +\| starting")
    assert await serving.end() == 0
    assert list(base.iterdir()) == []


async def test_kill_9_of_the_supervisor_leaves_no_orphan_and_nothing_in_the_way(serve, base: Path) -> None:
    serving = await serve()
    await serving.ready()
    fds = [os.pidfd_open(child.pid) for child in serving.children().values()]
    assert await serving.end(signal.SIGKILL) == -signal.SIGKILL
    assert_ends(fds, within_s=5.0)
    [dead] = base.iterdir()
    again = await serve(port=serving.port)
    await again.ready()
    assert not dead.exists()
    assert await again.end() == 0


async def test_a_killed_worker_is_used_again_and_nothing_else_is_restarted(serve) -> None:
    serving = await serve()
    await serving.ready()
    before = serving.pids()
    os.kill(before["two-0"], signal.SIGKILL)
    await serving.seen(r"two-0 has ended \(killed by SIGKILL")
    await serving.seen(r"^two-0 +\| .*is ready", 2)
    async with asyncio.timeout(PATIENCE_S):
        while {r.pid for r in (await serving.fleet()).replicas if r.state == "ready"} & {before["two-0"]}:
            await asyncio.sleep(0.1)
    after = serving.pids()
    assert after.pop("two-0") != before.pop("two-0")
    assert after == before
    assert await serving.end() == 0


@pytest.mark.parametrize("name", ["scheduler", "gateway"])
async def test_scheduler_and_gateway_come_back(serve, name: str) -> None:
    serving = await serve()
    await serving.ready()
    before = serving.pids()
    os.kill(before[name], signal.SIGKILL)
    up = {"scheduler": r"^scheduler \| .*three-0 is ready", "gateway": r"^gateway +\| .*listening"}
    await serving.seen(up[name], 2)
    assert {replica.state for replica in (await serving.fleet()).replicas} == {"ready"}
    after = serving.pids()
    assert after.pop(name) != before.pop(name)
    assert after == before
    assert await serving.end() == 0


async def test_a_stopped_worker_does_not_hold_up_the_end(serve) -> None:
    serving = await serve("--stop-timeout", "3")
    await serving.ready()
    serving.children()["one-0"].send_signal(signal.SIGSTOP)
    assert await serving.end() == 1
    await serving.seen("killing one-0: not ended")


async def test_a_port_in_use_is_named_before_anything_is_started(serve, base: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        serving = await serve(port=port)
        assert await serving.wait() == 2
    assert serving.lines == [
        f"omni: cannot listen at port {port} of 127.0.0.1: Address already in use; choose another: --port"
    ]
    assert list(base.iterdir()) == []


async def test_two_instances_do_not_disturb_each_other(serve) -> None:
    one, two = await serve(), await serve()
    await one.ready()
    await two.ready()
    pids = [{r.pid for r in (await serving.fleet()).replicas} for serving in (one, two)]
    assert len(pids[0]) == len(pids[1]) == 3 and not pids[0] & pids[1]
    assert await one.end() == 0
    assert len((await two.fleet()).replicas) == 3
    assert await two.end() == 0


async def test_a_second_instance_in_the_same_folder_is_refused(serve, base: Path) -> None:
    one = await serve("--run-dir", str(base / "x"))
    await one.ready()
    two = await serve("--run-dir", str(base / "x"))
    assert await two.wait() == 2
    assert "another omni serve uses the run folder" in two.lines[-1]
    assert await one.end() == 0


async def test_a_stage_that_cannot_load_says_why(serve) -> None:
    serving = await serve("--set", "stages.two.options={fail_load: no such weights}")
    line = await serving.seen("two-0 given up after 5 failed starts")
    assert "no such weights" in line
    assert (await serving.fleet()).stages
    assert await serving.end() == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pipeline", "embeded"], "embedded"),
        (["--set", "stages.thinker.params.temprature=1"], "`temperature`"),
        (["--set", "stages.talker.inputs=[code2wav]"], "talker"),
        (["--set", "stages.thinker.slots=many"], "slots"),
        (["--platform", "toaster"], "toaster"),
    ],
)
def test_a_wrong_pipeline_is_refused_before_any_process(
    base: Path, flags: list[str], said: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen.__init__", refuse)
    assert main(["serve", *flags]) == 2
    assert said in capsys.readouterr().err
    assert list(base.iterdir()) == []


def test_unknown_flags_are_refused(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--prot", "81"])
    assert end.value.code == 2
    assert json.dumps("--prot")[1:-1] in capsys.readouterr().err
