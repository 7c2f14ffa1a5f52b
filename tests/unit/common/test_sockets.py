"""Real ZeroMQ sockets on a real loop: what must not get lost, and what must be told."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from omni_common.frames import Beat, Bye, Closed, Error, Fleet, Grant, Plain
from omni_common.sockets import Context, ControlClient, ControlServer, Inbox, Outbox, new_context
from omni_common.wire import decode


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    context = new_context()
    yield context
    # Also the sockets of a test that failed: they would hold the end up for ever.
    context.destroy(linger=0)


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def closed(number: int) -> Closed:
    return Closed(f"{number}")


async def test_a_hundred_thousand_frames_arrive_in_order(context: Context, tmp_path: Path) -> None:
    got: list[Plain] = []
    inbox = Inbox(context, f"ipc://{tmp_path}/in", lambda frames, parts: got.extend(frames))
    outbox = Outbox(context, inbox.address)
    count = 100_000
    for number in range(count):
        outbox.send(closed(number))
        if number % 97 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(got) == count, 30)
    assert [frame.request_id for frame in got] == [str(number) for number in range(count)]
    outbox.close()
    inbox.close()


async def test_frames_of_one_turn_leave_as_one_message(context: Context, tmp_path: Path) -> None:
    messages: list[int] = []
    inbox = Inbox(context, f"ipc://{tmp_path}/in", lambda frames, parts: messages.append(len(frames)))
    outbox = Outbox(context, inbox.address)
    for number in range(5):
        outbox.send(closed(number))
    await until(lambda: sum(messages) == 5)
    assert messages == [5]
    outbox.close()
    inbox.close()


async def test_sending_before_the_peer_is_bound_loses_nothing(context: Context, tmp_path: Path) -> None:
    outbox = Outbox(context, f"ipc://{tmp_path}/late")
    for number in range(1000):
        outbox.send(closed(number))
        await asyncio.sleep(0)
    got: list[Plain] = []
    inbox = Inbox(context, f"ipc://{tmp_path}/late", lambda frames, parts: got.extend(frames))
    await until(lambda: len(got) == 1000)
    outbox.close()
    inbox.close()


async def test_more_than_the_high_water_mark_waits_and_arrives(context: Context, tmp_path: Path) -> None:
    outbox = Outbox(context, f"ipc://{tmp_path}/in")
    raw = context.socket(zmq.PULL)
    raw.set(zmq.RCVHWM, 5)
    raw.bind(f"ipc://{tmp_path}/in")
    for number in range(30_000):
        outbox.send(closed(number))
        outbox.flush()
    received = 0
    while received < 30_000:
        await asyncio.sleep(0)
        while True:
            try:
                raw.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            received += 1
    raw.close(0)
    outbox.close()


async def test_raw_parts_travel_beside_the_frame(context: Context, tmp_path: Path) -> None:
    got: list[tuple[list[Plain], list[bytes]]] = []
    inbox = Inbox(context, "tcp://127.0.0.1:*", lambda frames, parts: got.append((frames, [bytes(p) for p in parts])))
    assert inbox.address.startswith("tcp://127.0.0.1:") and not inbox.address.endswith("*")
    outbox = Outbox(context, inbox.address)
    outbox.send(closed(0))
    outbox.send_with_parts(closed(1), [memoryview(b"x" * 1_000_000), memoryview(b"")])
    await until(lambda: len(got) == 2)
    assert got[1] == ([closed(1)], [b"x" * 1_000_000, b""])
    outbox.close()
    inbox.close()


@pytest.mark.parametrize("junk", [b"", b"\x80\x04\x95junk", b"\xff" * 100, b"{}", b"\x81\xa4type\xa3wat"])
async def test_junk_is_dropped_and_the_inbox_lives(context: Context, tmp_path: Path, junk: bytes) -> None:
    got: list[Plain] = []
    inbox = Inbox(context, f"ipc://{tmp_path}/in", lambda frames, parts: got.extend(frames))
    raw = context.socket(zmq.PUSH)
    raw.connect(inbox.address)
    raw.send(junk)
    outbox = Outbox(context, inbox.address)
    outbox.send(closed(1))
    await until(lambda: bool(got))
    assert got == [closed(1)]
    raw.close(0)
    outbox.close()
    inbox.close()


async def test_control_in_both_directions_while_everybody_sends(context: Context, tmp_path: Path) -> None:
    """The edge-triggered descriptor's trap: each side only ever sends from its receive handler or floods."""
    server_got: list[tuple[str, Plain]] = []
    client_got: list[Plain] = []

    def echo(peer: str, frame: Plain) -> None:
        server_got.append((peer, frame))
        server.send(peer, frame)

    server = ControlServer(context, f"ipc://{tmp_path}/control", echo, lambda peer: None)
    clients = [
        ControlClient(context, f"ipc://{tmp_path}/control", f"peer-{number}", client_got.append) for number in range(4)
    ]
    for number in range(5000):
        for client in clients:
            client.send(closed(number))
        if number % 13 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(client_got) == 20_000, 30)
    assert len(server_got) == 20_000
    for client in clients:
        client.close()
    server.close()


async def test_an_unreachable_peer_is_told(context: Context, tmp_path: Path) -> None:
    unreachable: list[str] = []
    server = ControlServer(context, f"ipc://{tmp_path}/control", lambda peer, frame: None, unreachable.append)
    server.send("nobody", Bye())
    await until(lambda: bool(unreachable))
    assert unreachable == ["nobody"]
    server.close()


async def test_a_peer_that_reads_nothing_holds_nobody_and_loses_nothing(context: Context, tmp_path: Path) -> None:
    hello: list[str] = []
    server = ControlServer(
        context, f"ipc://{tmp_path}/control", lambda peer, frame: hello.append(peer), lambda peer: None
    )
    raw = context.socket(zmq.DEALER)
    raw.set(zmq.IDENTITY, b"slow")
    raw.set(zmq.RCVHWM, 5)
    raw.connect(f"ipc://{tmp_path}/control")
    quick_got: list[Plain] = []
    quick = ControlClient(context, f"ipc://{tmp_path}/control", "quick", quick_got.append)
    quick.send(Beat())
    raw.send(b"\x81\xa4type\xa4beat")
    await until(lambda: set(hello) == {"quick", "slow"})
    sent = 25_000
    for number in range(sent):
        server.send("slow", Fleet(f"{number}" + "x" * 200))
        server.flush()
    server.send("quick", Closed("q"))
    await until(lambda: bool(quick_got))
    received: list[Plain] = []
    async with asyncio.timeout(30):
        while len(received) < sent:
            await asyncio.sleep(0)
            while raw.poll(0):
                received += decode(raw.recv())
    assert [frame.scheduler.rstrip("x") for frame in received] == [str(number) for number in range(sent)]
    raw.close(0)
    quick.close()
    server.close()


async def test_a_frame_of_unknown_type_is_answered_with_an_error(context: Context, tmp_path: Path) -> None:
    server = ControlServer(context, f"ipc://{tmp_path}/control", lambda peer, frame: None, lambda peer: None)
    raw = context.socket(zmq.DEALER)
    raw.connect(f"ipc://{tmp_path}/control")
    raw.send(b"\x81\xa4type\xa3wat")
    while not raw.poll(0):
        await asyncio.sleep(0)
    (answer,) = decode(raw.recv())
    assert isinstance(answer, Error) and answer.code == "bad_frame" and "wat" in answer.message
    raw.close(0)
    server.close()


async def test_closing_with_mail_for_a_dead_peer_does_not_hang(tmp_path: Path) -> None:
    context = new_context()
    outbox = Outbox(context, f"ipc://{tmp_path}/nobody")
    for number in range(1000):
        outbox.send(Grant("r", "a>b", "x", 1, 1, number, number, number))
    await asyncio.sleep(0)
    outbox.close()
    async with asyncio.timeout(2):
        await asyncio.to_thread(context.term)
