"""The control socket with a supervisor that does what a test says."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from omni_common.errors import OmniError
from omni_supervisor.cli import main
from omni_supervisor.control import SOCKET, control_server, find_supervisor, send_order
from omni_supervisor.orders import Drain, Order, Restart, Scale


class Supervisor:
    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.said = ["one", "two"]
        self.refusal: OmniError | None = None
        self.failure: Exception | None = None
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.task: asyncio.Task[None] | None = None

    def carry_out(self, order: Order, say: Callable[[str], None]) -> "asyncio.Task[None]":
        self.orders.append(order)
        if self.refusal:
            raise self.refusal

        async def work() -> None:
            for text in self.said:
                say(text)
                await self.goes_on.wait()
            if self.failure:
                raise self.failure

        self.task = asyncio.create_task(work())
        return self.task


@pytest.fixture
async def supervisor() -> Supervisor:
    return Supervisor()


@pytest.fixture
async def path(tmp_path: Path, supervisor: Supervisor) -> AsyncIterator[Path]:
    async with control_server(tmp_path, supervisor.carry_out):
        yield tmp_path / SOCKET
    assert not (tmp_path / SOCKET).exists()


async def told(path: Path, order: Order) -> list[str]:
    return [text async for text in send_order(path, order)]


@pytest.mark.parametrize("order", [Drain("talker-0"), Restart("all", stop_first=True), Scale("talker", 3)])
async def test_an_order_arrives_as_it_was_given_and_what_happens_is_told(
    path: Path, supervisor: Supervisor, order: Order
) -> None:
    assert await told(path, order) == ["one", "two"]
    assert supervisor.orders == [order]


async def test_things_are_told_as_they_happen(path: Path, supervisor: Supervisor) -> None:
    supervisor.goes_on.clear()
    reports = send_order(path, Drain("talker"))
    assert await anext(reports) == "one"
    supervisor.goes_on.set()
    assert [text async for text in reports] == ["two"]


async def test_the_group_may_give_orders_and_nobody_else(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


async def test_a_refusal_and_a_failure_are_errors(path: Path, supervisor: Supervisor) -> None:
    supervisor.failure = OmniError("talker-0 given up: no weights")
    reports = send_order(path, Restart("talker"))
    assert await anext(reports) == "one"
    with pytest.raises(OmniError, match="given up: no weights"):
        _ = [text async for text in reports]
    supervisor.refusal = OmniError("nothing here is called x", code="unknown_target", status=404)
    with pytest.raises(OmniError, match="nothing here is called x") as error:
        await told(path, Drain("x"))
    assert error.value.status == 404


async def test_a_mistake_of_ours_is_told_and_logged(path: Path, supervisor: Supervisor, caplog) -> None:
    supervisor.failure = ZeroDivisionError("oops")
    with pytest.raises(OmniError, match="internal error.*ZeroDivisionError"):
        await told(path, Drain("x"))
    assert caplog.records[0].exc_info


async def test_a_stop_meanwhile_is_told(path: Path, supervisor: Supervisor) -> None:
    supervisor.goes_on.clear()
    reports = send_order(path, Drain("talker"))
    await anext(reports)
    assert supervisor.task is not None
    supervisor.task.cancel()
    with pytest.raises(OmniError, match="has been stopped meanwhile"):
        await anext(reports)


async def test_an_order_goes_on_when_nobody_listens_any_more(path: Path, supervisor: Supervisor) -> None:
    supervisor.goes_on.clear()
    reports = send_order(path, Drain("talker"))
    await anext(reports)
    await reports.aclose()
    supervisor.goes_on.set()
    assert supervisor.task is not None
    await supervisor.task


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"order": "scale", "stage": "a", "count": 65}', b'{"order": "stop"}', b"x" * 5000]
)
async def test_what_is_no_order_is_refused(path: Path, supervisor: Supervisor, body: bytes) -> None:
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.post("http://supervisor/orders", data=body) as answer:
            assert answer.status in (400, 413)
        async with session.get("http://supervisor/orders") as answer:
            assert answer.status == 405
    assert supervisor.orders == []


async def test_a_dead_ones_socket_is_no_obstacle(tmp_path: Path, supervisor: Supervisor) -> None:
    (tmp_path / SOCKET).touch()
    async with control_server(tmp_path, supervisor.carry_out):
        assert await told(tmp_path / SOCKET, Drain("a")) == ["one", "two"]


# ------------------------------------------------------------------------------------------------------- which one?


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("OMNI_RUN_DIR", raising=False)
    return tmp_path


async def test_the_only_one_here_is_found(base: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, dead = (base / f"omnibus-{name}" for name in ("one", "two", "dead"))
    for folder in (one, two, dead):
        folder.mkdir()
    async with control_server(dead, supervisor.carry_out):
        os.link(dead / SOCKET, dead / "kept")
    (dead / "kept").rename(dead / SOCKET)
    with pytest.raises(OmniError, match="none runs here"):
        find_supervisor(None)
    async with control_server(one, supervisor.carry_out):
        assert find_supervisor(None) == one / SOCKET
        async with control_server(two, supervisor.carry_out):
            with pytest.raises(OmniError, match=f"several run: {one}, {two}; name one with --run-dir"):
                find_supervisor(None)
            monkeypatch.setenv("OMNI_RUN_DIR", str(two))
            assert find_supervisor(None) == two / SOCKET
            assert find_supervisor(one) == one / SOCKET
            # The servers get to see that those who only knocked are gone.
            assert await told(two / SOCKET, Drain("a")) == await told(one / SOCKET, Drain("a"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["drain", "talker"], "which run folder? none runs here"),
        (["scale", "talker=2"], "which run folder? none runs here"),
        (["restart", "all", "--run-dir", "/nonexistent"], "no omni serve at /nonexistent: No such file or directory"),
    ],
)
def test_no_running_instance_is_one_line_and_status_1(base: Path, argv: list[str], message: str, capsys) -> None:
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"omni: {message}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("talker", "talker is not STAGE=COUNT"),
        ("=3", "is not STAGE=COUNT"),
        ("talker=", "is not STAGE=COUNT"),
        ("talker=-1", "is not STAGE=COUNT"),
        ("talker=many", "is not STAGE=COUNT"),
        ("talker=65", "a stage has 0 to 64 replicas"),
    ],
)
def test_a_count_that_makes_no_sense_is_refused(text: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["scale", text])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
