"""`omni serve` with its real processes, on engines that compute nothing."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from omni_supervisor.cli import main
from support.serving import PATIENCE_S, Serving, assert_ends, start


@pytest.fixture
async def serve(base: Path) -> AsyncIterator[Callable]:
    started: list[Serving] = []

    async def serve(*flags: str, port: int | None = None) -> Serving:
        started.append(await start(*flags, port=port))
        return started[-1]

    yield serve
    for serving in started:
        await serving.end(signal.SIGKILL)


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


@pytest.mark.parametrize("moment", ["starting", "loading", "draining", "stopped"])
async def test_kill_9_of_the_supervisor_at_any_moment_leaves_nothing(serve, base: Path, moment: str) -> None:
    serving = await serve()
    await serving.seen(r"^omni +\| starting")
    if moment == "loading":
        await serving.seen(r"^scheduler \| .* is here")
    elif moment != "starting":
        await serving.ready()
    processes = serving.children()
    fds = [os.pidfd_open(child.pid) for child in processes.values()]
    if moment == "draining":
        serving.process.send_signal(signal.SIGTERM)
        await serving.seen(r"^omni +\| stopping")
    elif moment == "stopped":
        for child in processes.values():
            child.send_signal(signal.SIGSTOP)
    assert await serving.end(signal.SIGKILL) == -signal.SIGKILL
    assert_ends(fds, within_s=10.0)
    again = await serve()
    await again.ready()
    assert await again.end() == 0
    assert list(base.iterdir()) == []


async def test_kill_9_in_a_given_folder_leaves_nothing_in_the_way(serve, base: Path) -> None:
    folder = base / "kept"
    folder.mkdir()
    (folder / "notes").touch()
    serving = await serve("--run-dir", str(folder))
    await serving.ready()
    fds = [os.pidfd_open(child.pid) for child in serving.children().values()]
    await serving.end(signal.SIGKILL)
    assert_ends(fds, within_s=10.0)
    dead = {path for path in folder.iterdir() if path.is_socket()}
    assert dead
    again = await serve("--run-dir", str(folder))
    await again.ready()
    inboxes = {path for path in dead if path.suffix in (".in", ".fd")}
    assert inboxes and not any(path.exists() for path in inboxes)
    assert await again.end() == 0
    assert {path.name for path in folder.iterdir()} == {"notes", "scheduler.lock"}


async def test_a_worker_that_is_killed_as_soon_as_it_is_ready_is_started_again_at_once(serve) -> None:
    serving = await serve()
    await serving.ready()
    for life in range(1, 4):
        os.kill(serving.pids()["two-0"], signal.SIGKILL)
        await serving.seen(r"two-0 has ended", life)
        await serving.seen(r"^scheduler \| .*two-0 is ready", life + 1)
        async with asyncio.timeout(PATIENCE_S):
            while [replica.state for replica in await serving.replicas("two")] != ["ready"]:
                pass
    assert len([line for line in serving.lines if "two-0 has ended" in line]) == 3
    assert {line.split("again ")[1] for line in serving.lines if "two-0 has ended" in line} <= {"at once", "in 0.1 s"}
    assert await serving.end() == 0


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


@pytest.mark.parametrize("name", ["one-0", "scheduler", "gateway"])
async def test_a_stopped_process_does_not_hold_up_the_end(serve, base: Path, name: str) -> None:
    serving = await serve()
    await serving.ready()
    serving.children()[name].send_signal(signal.SIGSTOP)
    assert await serving.end() == 0
    assert list(base.iterdir()) == []


async def test_a_stopped_process_is_killed_at_the_second_signal(serve, base: Path) -> None:
    """Stopped again and again, so that it cannot obey the first."""
    serving = await serve()
    await serving.ready()
    child = serving.children()["one-0"]
    child.send_signal(signal.SIGSTOP)
    serving.process.send_signal(signal.SIGTERM)
    await serving.seen(r"^omni +\| stopping")
    child.send_signal(signal.SIGSTOP)
    assert await serving.end() in (0, 1)
    assert list(base.iterdir()) == []


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
