"""Cases of ZeroMQ's traps that the tests of the sockets leave out."""

import ast
import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq

import omni_common
from omni_common.frames import Beat, Bye, Closed, Fleet, Plain
from omni_common.sockets import HIGH_WATER, Context, ControlClient, ControlServer, Inbox, Outbox, new_context

HOSTILE = [
    pickle.dumps({"id": 1}),
    pickle.dumps(print, protocol=0),
    b"",
    b"\xff" * 1000,
    b"\x81\xa4type",
    b"\xc1",
    b"\x93" * 50_000,
    b"\xdf\xff\xff\xff\xff",
    b"GET / HTTP/1.1\r\n\r\n",
]


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    context = new_context()
    yield context
    # Not `term`, which would wait for ever for the sockets of a test that failed.
    context.destroy(linger=0)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def test_no_receive_can_be_cancelled() -> None:
    """B067: a receive that is a future can complete and be cancelled in one turn, and its message is lost. None is."""
    folder = Path(omni_common.__file__).parent
    tree = ast.parse((folder / "sockets.py").read_bytes())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "zmq" in imported and "zmq.asyncio" not in imported
    receiving = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("recv")
    ]
    assert receiving and {node.func.attr for node in receiving if isinstance(node.func, ast.Attribute)} == {"recv"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFunctionDef)]


async def test_readers_that_give_up_all_the_time_lose_nothing(context: Context, tmp_path: Path) -> None:
    """B067: 100,000 frames for a reader whose waits time out again and again."""
    count = 100_000
    queue: asyncio.Queue[Plain] = asyncio.Queue(maxsize=count)

    def take(frames: list[Plain], parts: list[memoryview]) -> None:
        for frame in frames:
            queue.put_nowait(frame)

    inbox = Inbox(context, f"ipc://{tmp_path}/in", take)
    outbox = Outbox(context, inbox.address)
    got: list[Plain] = []
    gave_up = 0

    async def read() -> None:
        nonlocal gave_up
        while len(got) < count:
            try:
                got.append(await asyncio.wait_for(queue.get(), 0.001))
            except TimeoutError:
                gave_up += 1
            while not queue.empty():
                got.append(queue.get_nowait())

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        for number in range(count):
            outbox.send(Closed(f"{number}"))
            if number % 89 == 0:
                # Now and then the reader has to give up.
                await asyncio.sleep(0.003 if number % (89 * 50) == 0 else 0)
    assert [frame.request_id for frame in got if isinstance(frame, Closed)] == [str(number) for number in range(count)]
    assert gave_up > 10
    outbox.close()
    inbox.close()


async def test_a_peer_that_dies_while_its_pipe_is_full_is_told_and_holds_nobody(
    context: Context, tmp_path: Path
) -> None:
    """B068: what waited for it does not wait for ever, and no send blocks."""
    heard: list[str] = []
    unreachable: list[str] = []
    address = f"ipc://{tmp_path}/control"
    server = ControlServer(context, address, lambda peer, frame: heard.append(peer), unreachable.append)
    slow = context.socket(zmq.DEALER)
    slow.set(zmq.IDENTITY, b"slow")
    slow.set(zmq.RCVHWM, 5)
    slow.connect(address)
    slow.send(b"\x81\xa4type\xa4beat")
    quick_got: list[Plain] = []
    quick = ControlClient(context, address, "quick", quick_got.append)
    quick.send(Beat())
    await until(lambda: {"quick", "slow"} <= set(heard))
    for number in range(HIGH_WATER + 5000):
        server.send("slow", Fleet(f"{number}" + "x" * 200))
        server.flush()
    assert server._backlog["slow"], "the pipe is not full"
    slow.close(0)
    await until(lambda: "slow" in unreachable)
    await until(lambda: not server._backlog)
    server.send("quick", Closed("q"))
    await until(lambda: bool(quick_got))
    assert set(unreachable) == {"slow"}
    server.send("slow", Closed("late"))
    before = len(unreachable)
    await until(lambda: len(unreachable) > before)
    quick.close()
    server.close()


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_the_control_plane_outlives_what_is_no_frame(context: Context, tmp_path: Path, hostile: bytes) -> None:
    """B081: in both directions, alone and behind other parts; nothing of it is ever more than refused."""
    heard: list[Plain] = []
    server = ControlServer(
        context, f"ipc://{tmp_path}/control", lambda peer, frame: heard.append(frame), lambda peer: None
    )
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{tmp_path}/control")
    for message in ([hostile], [b"", hostile], [hostile] * 5):
        stranger.send_multipart(message)
    client = ControlClient(context, f"ipc://{tmp_path}/control", "client", lambda frame: None)
    client.send(Bye("heard"))
    await until(lambda: bool(heard))
    assert heard == [Bye("heard")]

    false = context.socket(zmq.ROUTER)
    false.bind(f"ipc://{tmp_path}/false")
    told: list[Plain] = []
    victim = ControlClient(context, f"ipc://{tmp_path}/false", "victim", told.append)
    victim.send(Beat())
    await until(lambda: bool(false.poll(0)))
    false.recv_multipart()
    false.send_multipart([b"victim", hostile])
    false.send_multipart([b"victim", b"\x82\xa4type\xa3bye\xa6reason\xa2ok"])
    await until(lambda: bool(told))
    assert told == [Bye("ok")]
    for socket in (stranger, false):
        socket.close(0)
    for own in (client, victim, server):
        own.close()


async def test_everything_ends_at_once_with_mail_in_every_direction(tmp_path: Path) -> None:
    """B066: mail for the dead, mail for who does not read, unread mail, connections that never were."""
    heard: list[str] = []
    context = new_context()
    server = ControlServer(
        context, f"ipc://{tmp_path}/control", lambda peer, frame: heard.append(peer), lambda peer: None
    )
    inbox = Inbox(context, f"ipc://{tmp_path}/in", lambda frames, parts: None)
    # It lives on and reads nothing, so what waits for it could wait for ever.
    elsewhere = new_context()
    deaf = elsewhere.socket(zmq.DEALER)
    deaf.set(zmq.IDENTITY, b"deaf")
    deaf.set(zmq.RCVHWM, 1)
    deaf.set(zmq.LINGER, 0)
    deaf.connect(f"ipc://{tmp_path}/control")
    deaf.send(b"\x81\xa4type\xa4beat")
    clients = [ControlClient(context, f"ipc://{tmp_path}/{where}", where, print) for where in ("control", "nowhere")]
    outboxes = [Outbox(context, f"ipc://{tmp_path}/{where}") for where in ("in", "nobody")]
    await until(lambda: bool(heard))
    for number in range(1000):
        server.send("deaf", Fleet("x" * 1000))
        server.flush()
        for sender in (*clients, *outboxes):
            sender.send(Closed(f"{number}"))
            sender.flush()
    for own in (*clients, *outboxes, inbox, server):
        own.close()
        own.close()
    ended = asyncio.create_task(asyncio.to_thread(context.term))
    done, _ = await asyncio.wait({ended}, timeout=5)
    elsewhere.destroy(linger=0)
    await ended
    assert done, "it waited for the peer that does not read"


async def test_a_handler_that_raises_leaves_the_socket_awake(tmp_path: Path) -> None:
    """B067: one frame that somebody cannot handle must not swallow the edge that announced those behind it."""
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: told.append(what["exception"]))
    got: list[str] = []

    def take(frames: list[Plain], parts: list[memoryview]) -> None:
        for frame in frames:
            assert isinstance(frame, Closed)
            if frame.request_id == "10":
                raise ValueError("cannot handle this")
            got.append(frame.request_id)

    context = new_context()
    inbox = Inbox(context, f"ipc://{tmp_path}/in", take)
    outbox = Outbox(context, inbox.address)
    for number in range(1000):
        outbox.send(Closed(f"{number}"))
        outbox.flush()
    try:
        async with asyncio.timeout(5):
            while len(got) < 999:
                await asyncio.sleep(0.002)
    finally:
        outbox.close()
        inbox.close()
        context.destroy(linger=0)
    assert got == [str(number) for number in range(1000) if number != 10]
    assert len(told) == 1


ROOT = Path(__file__).parents[3]
FORKS = {"fork", "forkpty", "preexec_fn", "set_start_method", "multiprocessing", "ProcessPoolExecutor"}


def forks(tree: ast.AST) -> set[str]:
    """Whatever would start a process as a copy of this one, or hand it this one's descriptors."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {part for alias in names for part in alias.name.split(".")}
            case ast.ImportFrom(module=module, names=names):
                found |= {*(module or "").split("."), *(alias.name for alias in names)}
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.keyword(arg="preexec_fn", value=value) if not _is(value, None):
                found.add("preexec_fn")
            case ast.keyword(arg="close_fds", value=value) if not _is(value, True):
                found.add("preexec_fn")
    return found & FORKS


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_no_process_is_a_copy_of_one_that_has_sockets() -> None:
    """B069: a fork would share contexts and hold lifelines open; children are executed afresh."""
    sources = [file for folder in ("common", "gateway", "services") for file in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 50
    assert {str(file): found for file in sources if (found := forks(ast.parse(file.read_bytes())))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "os.fork()",
        "from os import fork",
        "import multiprocessing.pool",
        "from multiprocessing import Process",
        "from concurrent.futures import ProcessPoolExecutor",
        "subprocess.Popen(a, preexec_fn=f)",
        "subprocess.Popen(a, close_fds=False)",
    ],
)
def test_the_check_sees_a_fork(code: str) -> None:
    assert forks(ast.parse(code))
