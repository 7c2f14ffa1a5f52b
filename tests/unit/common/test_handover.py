import asyncio
import contextlib
import errno
import gc
import mmap
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from omni_common.arena import Arena
from omni_common.errors import OmniError
from omni_common.frames import ArenaTensor
from omni_common.handover import MAX_STRANGERS, DescriptorClient, DescriptorServer

OWNER = "0123456789abcdef"
READER = "1111222233334444"
MIB = 1 << 20
#: Fails a test that would hang; none waits this long.
PATIENCE_S = 20.0

# libuv makes a pipe for signals once in a process and keeps it: no leak of the test that happens to be first.
uvloop.new_event_loop().close()

Test = Callable[["Owner"], Awaitable[None]]


class Owner:
    """An arena and its server; what is told as gone comes in `gone`."""

    def __init__(self, run: Path, arena: Arena) -> None:
        self.run = run
        self.arena = arena
        self.gone: asyncio.Queue[str] = asyncio.Queue()
        self.path = run / f"{OWNER}.fd"
        self.server = DescriptorServer(self.path, arena, self.gone.put_nowait)

    async def next_gone(self) -> str:
        return await asyncio.wait_for(self.gone.get(), PATIENCE_S)

    def client(self, incarnation: str = READER) -> DescriptorClient:
        return DescriptorClient(self.run, incarnation)

    def put(self, nbytes: int, holder: str = READER) -> ArenaTensor:
        ref = self.arena.put(np.arange(nbytes, dtype=np.uint8), {holder: 1})
        assert ref is not None
        return ref

    def release(self, offset: int, generation: int) -> None:
        self.arena.release(READER, [(offset, generation)])


@pytest.fixture
def run() -> Iterator[Path]:
    """A run folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="omni") as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def owner_in(run: Path, nbytes: int = MIB, memfd: bool = True) -> AsyncIterator[Owner]:
    owner = Owner(run, Arena(OWNER, nbytes, run, memfd=memfd))
    await owner.server.start()
    try:
        yield owner
    finally:
        await owner.server.close()
        owner.arena.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest, run: Path) -> Callable[[Test], None]:
    """Runs a test against a fresh owner, on one kind of loop."""

    async def main(test: Test) -> None:
        async with owner_in(run) as owner:
            await test(owner)

    def on_loop(test: Test) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main(test))

    return on_loop


def test_an_arena_is_handed_over_once_and_read_in_place(on_loop: Callable[[Test], None]) -> None:
    async def test(owner: Owner) -> None:
        assert owner.path.stat().st_mode & 0o777 == 0o660
        client = owner.client()
        assert not client.is_mapped(OWNER)
        arenas = await asyncio.gather(*(client.arena_of(OWNER) for _ in range(5)))
        assert len(set(map(id, arenas))) == 1
        assert client.is_mapped(OWNER)
        ref = owner.put(50_000)
        view = client.view(ref, owner.release)
        assert np.array_equal(view, np.arange(50_000, dtype=np.uint8))
        assert owner.server.is_connected(READER)
        del view
        assert owner.arena.used == 0
        client.close()
        assert await owner.next_gone() == READER
        assert not owner.server.is_connected(READER)
        with pytest.raises(OmniError, match="not mapped"):
            client.view(ref, owner.release)

    on_loop(test)


def test_the_socket_ends_after_the_last_view(on_loop: Callable[[Test], None]) -> None:
    """While a view lives the owner must not give the slot away, whatever the consumer has dropped."""

    async def test(owner: Owner) -> None:
        client, other = owner.client(), owner.client("aaaa" * 4)
        arena = await client.arena_of(OWNER)
        view = client.view(owner.put(100), owner.release)
        part = view[5:7]
        client.drop(OWNER)
        client.drop(OWNER)
        del view, arena
        # What came before the other's end has been seen with it.
        await other.arena_of(OWNER)
        other.close()
        assert await owner.next_gone() == "aaaa" * 4
        assert owner.server.is_connected(READER)
        assert part.tolist() == [5, 6]
        del part
        assert await owner.next_gone() == READER

    on_loop(test)


def test_a_consumer_is_gone_with_its_last_connection(on_loop: Callable[[Test], None]) -> None:
    async def test(owner: Owner) -> None:
        first, second = owner.client(), owner.client()
        await first.arena_of(OWNER)
        await second.arena_of(OWNER)
        first.close()
        third = owner.client("aaaa" * 4)
        await third.arena_of(OWNER)
        third.close()
        assert await owner.next_gone() == "aaaa" * 4
        assert owner.server.is_connected(READER)
        second.close()
        assert await owner.next_gone() == READER

    on_loop(test)


async def code_of(attempt: Awaitable[Any]) -> str:
    with pytest.raises(OmniError) as caught:
        await asyncio.wait_for(attempt, PATIENCE_S)
    return caught.value.code


def test_an_owner_that_is_not_there_is_told(on_loop: Callable[[Test], None]) -> None:
    async def test(owner: Owner) -> None:
        client = owner.client()
        assert await code_of(client.arena_of("f" * 16)) == "arena_gone"
        for name in ("../" + OWNER, OWNER.upper(), OWNER + "\n", "", "queue"):
            assert await code_of(client.arena_of(name)) == "arena_gone"
        await owner.server.close()
        assert not owner.path.exists()
        assert await code_of(client.arena_of(OWNER)) == "arena_gone"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(os.fspath(owner.path))
        assert await code_of(client.arena_of(OWNER)) == "arena_gone"
        owner.path.unlink()
        await owner.server.start()
        await client.arena_of(OWNER)
        client.close()

    on_loop(test)


def test_one_caller_s_cancellation_does_not_fail_another(run: Path) -> None:
    async def main() -> None:
        client = DescriptorClient(run, READER)
        arena = Arena(OWNER, MIB)
        with _silent_owner(run) as listener:
            callers = [asyncio.create_task(client.arena_of(OWNER)) for _ in range(2)]
            await _readable(listener)
            first, _ = listener.accept()
            callers[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await callers[0]
            await _readable(listener)
            second, _ = listener.accept()
            with first, second:
                socket.send_fds(second, [f"{arena.size} {OWNER}\n".encode()], [arena.descriptor])
                await asyncio.wait_for(callers[1], PATIENCE_S)
        client.close()
        arena.close()

    asyncio.run(main())


def test_dropping_an_owner_ends_the_wait_for_it(run: Path) -> None:
    async def main() -> None:
        async with owner_in(run) as owner:
            client = owner.client()
            caller = asyncio.create_task(client.arena_of(OWNER))
            await asyncio.sleep(0)
            client.drop(OWNER)
            assert await code_of(caller) == "arena_gone"
            assert not client.is_mapped(OWNER)
            assert await owner.next_gone() == READER

    asyncio.run(main())


def _silent_owner(run: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    listener.bind(os.fspath(run / f"{OWNER}.fd"))
    listener.listen()
    return listener


async def _readable(sock: socket.socket) -> None:
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(sock, ready.set)
    try:
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
    finally:
        asyncio.get_running_loop().remove_reader(sock)


def test_an_owner_that_does_not_answer_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_common.handover.HANDOVER_S", 0.05)

    async def main() -> None:
        with _silent_owner(run):
            assert await code_of(DescriptorClient(run, READER).arena_of(OWNER)) == "arena_gone"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "descriptors", "why"),
    [
        (b"", 0, "closed the connection|reset by peer"),
        (b"what?\n", 1, "something else"),
        (b"4096 0123456789abcdef\n", 0, "something else"),
        (b"4096 ffffffffffffffff\n", 1, "something else"),
        (b"4096 0123456789abcdef\n", 1, "another size"),
        (b"4096 0123456789abcdef\n", 3, "another size"),
        (b"9" * 60, 1, "something else"),
    ],
)
def test_a_wrong_answer_leaves_nothing_behind(run: Path, answer: bytes, descriptors: int, why: str) -> None:
    async def main() -> None:
        client = DescriptorClient(run, READER)
        with _silent_owner(run) as listener, tempfile.TemporaryFile() as file:
            caller = asyncio.create_task(client.arena_of(OWNER))
            await _readable(listener)
            peer, _ = listener.accept()
            with peer:
                if answer:
                    socket.send_fds(peer, [answer], [file.fileno()] * descriptors)
            with pytest.raises(OmniError, match=why):
                await caller
        client.close()

    asyncio.run(main())


def strangers(path: Path, data: bytes = b"") -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    sock.connect(os.fspath(path))
    if data:
        sock.send(data)
    return sock


@pytest.mark.parametrize(
    "data",
    [b"\n", b"queue\n", b"\xff" * 16, b"\xff" * 17, b"0123456789ABCDEF\n", b"1111222233334444\nmore", b"x" * 100_000],
)
def test_strangers_get_nothing(on_loop: Callable[[Test], None], data: bytes) -> None:
    async def test(owner: Owner) -> None:
        stranger = strangers(owner.path)
        with stranger, contextlib.suppress(BrokenPipeError):
            await asyncio.to_thread(stranger.sendall, data)
            if len(data) > 16:
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(stranger.recv, 1) == b""
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(stranger.recv, 1) == b""
        client = owner.client()
        await client.arena_of(OWNER)
        client.close()
        assert await owner.next_gone() == READER
        assert owner.gone.empty()

    on_loop(test)


def test_many_silent_strangers_are_bounded_and_slow_ones_served(on_loop: Callable[[Test], None]) -> None:
    async def test(owner: Owner) -> None:
        before = len(os.listdir("/proc/self/fd"))
        silent = [strangers(owner.path) for _ in range(3 * MAX_STRANGERS)]
        slow = strangers(owner.path, b"9999")
        client = owner.client()
        await client.arena_of(OWNER)
        # Both ends of our connections are in this process.
        assert len(os.listdir("/proc/self/fd")) - before <= len(silent) + MAX_STRANGERS + 6
        slow.send(b"888877776666\n")
        answer, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, slow, 64, 1)
        assert answer == f"{owner.arena.size} {OWNER}\n".encode()
        for descriptor in descriptors:
            os.close(descriptor)
        # Chatter on the lifeline means nothing.
        slow.sendall(b"x" * 10_000)
        slow.close()
        assert await owner.next_gone() == "9999888877776666"
        for sock in silent:
            sock.close()
        client.close()
        assert await owner.next_gone() == READER

    on_loop(test)


def test_no_descriptor_left_is_no_end(on_loop: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(owner: Owner) -> None:
        accept = socket.socket.accept
        calls: list[int] = []

        def full(listener: socket.socket) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", full)
        client = owner.client()
        await client.arena_of(OWNER)
        assert len(calls) == 2
        client.close()

    on_loop(test)


CONSUMER = """
import asyncio, signal, sys
from pathlib import Path
import msgspec
from omni_common.frames import ArenaTensor
from omni_common.handover import DescriptorClient

async def main():
    run, me, owner = sys.argv[1:]
    client = DescriptorClient(Path(run), me)
    await client.arena_of(owner)
    print("mapped", flush=True)
    views = []
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "view":
            views.append(client.view(msgspec.json.decode(rest, type=ArenaTensor), lambda *slot: print(*slot)))
        elif word == "sum":
            print(sum(int(view.sum()) for view in views), flush=True)
        elif word == "end":
            views.clear()
            client.drop(owner)
            print("ended", flush=True)

asyncio.run(main())
"""

OWNING = """
import asyncio, sys
from pathlib import Path
import msgspec, numpy as np
from omni_common.arena import Arena
from omni_common.handover import DescriptorServer

async def main():
    run, me, nbytes, memfd = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "memfd"
    arena = Arena(me, nbytes, run, memfd=memfd)
    await DescriptorServer(run / f"{me}.fd", arena, lambda who: None).start()
    ref = arena.put(np.ones(nbytes // 2, np.uint8), {"x": 1})
    print(msgspec.json.encode(ref).decode(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Process:
    """A Python process that is talked to in lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def ask(self, line: str = "") -> str:
        assert self._process.stdin
        assert self._process.stdout
        if line:
            self._process.stdin.write(line.encode() + b"\n")
        answer = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)
        return answer.decode().strip()

    async def view(self, ref: ArenaTensor) -> None:
        assert self._process.stdin
        self._process.stdin.write(b"view " + msgspec.json.encode(ref) + b"\n")
        assert int(await self.ask("sum")) > 0

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.wait_for(self._process.wait(), PATIENCE_S)


@contextlib.asynccontextmanager
async def python(script: str, *args: str | Path) -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *args, stdin=pipe, stdout=pipe)
    try:
        yield Process(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # Reads the pipes to their end, so that they are closed.
        await process.communicate()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def held_somewhere(incarnation: str) -> list[str]:
    """Mappings and descriptors of that arena in all processes: without any, the kernel has freed its memory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                found += re.findall(f"memfd:omni-{incarnation}|{incarnation}.arena", (process / "maps").read_text())
            with contextlib.suppress(OSError):
                targets = [os.readlink(entry) for entry in (process / "fd").iterdir()]
                found += [target for target in targets if f"omni-{incarnation}" in target]
    return found


def shmem() -> int:
    """Bytes of shared memory in the machine."""
    lines = Path("/proc/meminfo").read_text()
    return int(re.findall(r"Shmem: +(\d+) kB", lines)[0]) * 1024


async def test_a_killed_consumer_gives_its_slots_back(run: Path) -> None:
    async with owner_in(run) as owner:
        async with python(CONSUMER, run, READER, OWNER) as consumer:
            assert await consumer.ask() == "mapped"
            shared = owner.put(100_000)
            owner.arena.hold(shared.offset, shared.generation, "queue")
            await consumer.view(shared)
            await consumer.view(owner.put(200_000))
            await consumer.kill()
            assert await owner.next_gone() == READER
        assert owner.arena.forget(READER) == 262_144
        assert owner.arena.used == owner.arena.held_by("queue") == 131_072


async def test_a_stopped_consumer_keeps_its_slots_until_it_dies(run: Path) -> None:
    async with owner_in(run) as owner, python(CONSUMER, run, READER, OWNER) as consumer:
        assert await consumer.ask() == "mapped"
        await consumer.view(owner.put(100_000))
        os.kill(consumer.pid, signal.SIGSTOP)
        await until(lambda: Path(f"/proc/{consumer.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        # Somebody else comes and goes: the end of the stopped one would have been seen with that.
        client = owner.client("aaaa" * 4)
        await client.arena_of(OWNER)
        client.close()
        assert await owner.next_gone() == "aaaa" * 4
        assert owner.server.is_connected(READER)
        os.kill(consumer.pid, signal.SIGCONT)
        assert await consumer.ask("sum") == str(int(np.arange(100_000, dtype=np.uint8).sum()))
        os.kill(consumer.pid, signal.SIGSTOP)
        await consumer.kill()
        assert await owner.next_gone() == READER
        assert owner.arena.forget(READER) == owner.arena.total // 8


async def test_many_consumers_that_die_leave_nothing(run: Path) -> None:
    """B059: whatever was held or waited for, everything is back afterwards."""
    async with owner_in(run) as owner:
        names = [f"{n:016x}" for n in range(6)]
        descriptors = len(os.listdir("/proc/self/fd"))
        for round_ in range(2):
            async with contextlib.AsyncExitStack() as stack:
                for name in names:
                    consumer = await stack.enter_async_context(python(CONSUMER, run, name, OWNER))
                    assert await consumer.ask() == "mapped"
                    await consumer.view(owner.put(20_000, name))
                    owner.put(30_000 + round_, name)
            assert {await owner.next_gone() for _ in names} == set(names)
            assert sum(owner.arena.forget(name) for name in names) == 6 * (32_768 + 32_768)
            assert owner.arena.used == 0
        await until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


@pytest.mark.parametrize("backend", ["memfd", "file"])
async def test_a_killed_owner_s_tensors_are_read_to_the_end(run: Path, backend: str) -> None:
    size = 192 * MIB
    name = os.urandom(8).hex()
    before = shmem()
    async with python(OWNING, run, name, str(size), backend) as owning:
        ref = msgspec.json.decode(await owning.ask(), type=ArenaTensor)
        async with python(CONSUMER, run, READER, name) as consumer:
            assert await consumer.ask() == "mapped"
            await consumer.view(ref)
            await owning.kill()
            assert await consumer.ask("sum") == str(size // 2)
            assert held_somewhere(name)
            client = DescriptorClient(run, "aaaa" * 4)
            assert await code_of(client.arena_of(name)) == "arena_gone"
            assert (await consumer.ask("end")).split() == [str(ref.offset), str(ref.generation)]
            assert await consumer.ask() == "ended"
            assert held_somewhere(name) == []
            # Others use shared memory too: the tolerance is half of the arena.
            await until(lambda: shmem() < before + size // 2)


async def test_the_named_file_is_handed_over_alike(run: Path) -> None:
    async with owner_in(run, memfd=False) as owner:
        client = owner.client()
        await client.arena_of(OWNER)
        view = client.view(owner.put(5000), owner.release)
        assert np.array_equal(view, np.arange(5000, dtype=np.uint8))
        del view
        assert owner.arena.used == 0
        client.close()
        assert await owner.next_gone() == READER
    assert list(run.iterdir()) == []


async def test_a_consumer_can_neither_write_nor_cut(run: Path) -> None:
    async with owner_in(run) as owner:
        sock = strangers(owner.path, READER.encode() + b"\n")
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, sock, 64, 1)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptors[0], owner.arena.size, mmap.MAP_SHARED, mmap.PROT_WRITE | mmap.PROT_READ)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptors[0], 4096)
        os.close(descriptors[0])
        sock.close()
        assert await owner.next_gone() == READER


async def test_descriptors_do_not_go_to_children(run: Path) -> None:
    async with owner_in(run) as owner:
        client = owner.client()
        await client.arena_of(OWNER)
        inherited = [
            os.readlink(f"/proc/self/fd/{number}")
            for number in os.listdir("/proc/self/fd")
            if number.isdigit() and _is_inheritable(int(number))
        ]
        assert not [target for target in inherited if "omni" in target or "socket" in target]
        client.close()
        gc.collect()
        assert await owner.next_gone() == READER


def _is_inheritable(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False
