"""The leak plugin itself: it must fail on every kind of thing left, and stay quiet otherwise."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
HEAD = """
import asyncio, mmap, os, socket, subprocess, sys, tempfile, threading
import pytest, zmq
from support import leaks
leaks.PATIENCE_S = 0.1
KEEP = []
"""


Run = Callable[..., str]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Runs a test module under the plugin, checks the outcomes, returns the output."""
    pytester.makeini(
        f"[pytest]\npythonpath = {TESTS}\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\naddopts = -p no:cacheprovider --import-mode=importlib\n"
    )
    pytester.makeconftest('pytest_plugins = ["support.leaks"]')

    def go(code: str, **outcomes: int) -> str:
        pytester.makepyfile(HEAD + code)
        result = pytester.runpytest_subprocess()
        text = result.stdout.str()
        assert result.parseoutcomes() == outcomes, text
        return text

    return go


LEFT = {
    "process": ("KEEP.append(subprocess.Popen(['sleep', '2']))", r"process \d+: sleep 2"),
    "orphan": ("subprocess.run(['sh', '-c', 'setsid sleep 2 >/dev/null 2>&1 &'])", r"process \d+: sleep 2"),
    "zombie": ("KEEP.append(subprocess.Popen(['true']))", "nobody waited for it"),
    "pipe": ("KEEP.append(os.pipe())", r"descriptor \d+ -> pipe:"),
    "socket": ("KEEP.append(socket.socket())", r"descriptor \d+ -> socket:"),
    "file": ("KEEP.append(open(os.devnull))", r"descriptor \d+ -> /dev/null"),
    "thread": (
        "e = threading.Event(); KEEP.append(e); threading.Thread(target=e.wait, name='lost', daemon=True).start()",
        "thread lost",
    ),
    "zmq": ("KEEP.append(zmq.Context().socket(zmq.PUSH))", "ZeroMQ context"),
    "memfd": (
        "fd = os.memfd_create('lost'); os.ftruncate(fd, 4096); KEEP.append(mmap.mmap(fd, 4096)); os.close(fd)",
        "mapping of /memfd:lost",
    ),
    "shm": ("open(f'/dev/shm/omnitest-{os.getpid()}', 'w').close()", "file /dev/shm/omnitest-"),
    "folder": ("tempfile.mkdtemp(prefix='omnibus-')", r"file \S+/omnibus-"),
}


def test_what_a_test_leaves_is_its_error_and_told_once(run: Run) -> None:
    tests = "".join(f"def test_{what}():\n    {code}\n\n" for what, (code, _) in LEFT.items())
    text = run(
        f"""
@pytest.fixture(scope="session", autouse=True)
def tidy():
    yield
    [os.unlink(entry.path) for entry in os.scandir("/dev/shm") if entry.name == f"omnitest-{{os.getpid()}}"]
    for process in [thing for thing in KEEP if isinstance(thing, subprocess.Popen)]:
        process.kill()
        process.wait()

{tests}
def test_is_not_blamed_for_those_before():
    pass
""",
        passed=len(LEFT) + 1,
        errors=len(LEFT),
    )
    told = dict(re.findall(r"ERROR at teardown of test_(\w+) _+\nthe test left behind:\n((?:  .*\n)+)", text))
    assert told.keys() == LEFT.keys()
    for what, (_, words) in LEFT.items():
        assert re.search(words, told[what]), told[what]


def test_a_pending_task_is_an_error(run: Run) -> None:
    text = run(
        """
async def forever():
    await asyncio.Event().wait()

async def test_leaks():
    KEEP.append(asyncio.create_task(forever()))

async def test_is_clean():
    asyncio.create_task(forever()).cancel()
""",
        passed=2,
        errors=1,
    )
    assert "the test left tasks behind:\n  <Task pending" in text
    assert "forever()" in text


def test_what_ends_by_itself_or_is_closed_is_fine(run: Run) -> None:
    run(
        """
@pytest.fixture
async def ticking():
    task = asyncio.create_task(asyncio.sleep(60))
    yield
    task.cancel()

async def test_async(ticking):
    reader, writer = os.pipe()
    os.close(reader), os.close(writer)
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()

def test_sync():
    leaks.PATIENCE_S = 30  # On a busy machine `sleep 0.1` takes longer than 0.1 s to start and end.
    threading.Timer(0.1, lambda: None).start()
    subprocess.Popen(["sleep", "0.1"]).wait()
    subprocess.run(["sh", "-c", "sleep 0.1 &"])
    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.connect("tcp://127.0.0.1:9")
    with tempfile.TemporaryDirectory():
        pass

def test_own_folder(tmp_path):
    (tmp_path / "x").touch()
    assert not str(tmp_path).startswith(tempfile.gettempdir())
""",
        passed=3,
    )


SERVER = """
def children(process):
    with open(f"/proc/{{process.pid}}/task/{{process.pid}}/children") as file:
        return file.read()

@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(["sh", "-c", "read line; sleep 3 & wait"], stdin=subprocess.PIPE)
    folder = tempfile.mkdtemp()
    yield process
    {end}

def test_before():
    pass

def test_uses(server):
    pass

def test_makes_it_start_a_child(server):
    server.stdin.write(b"go\\n")
    server.stdin.close()
    while not children(server):
        pass
"""


def test_a_server_of_the_module_may_stay_and_change_its_children(run: Run) -> None:
    run(
        SERVER.format(end="os.kill(int(children(process)), 9); process.wait(); os.rmdir(folder)"),
        passed=3,
    )


def test_what_a_server_of_the_module_leaves_is_told_at_the_end(run: Run) -> None:
    text = run(SERVER.format(end="process.kill(); process.wait()"), passed=3, errors=1)
    assert re.search(r"the module left behind:\n  process \d+: sleep 3\n  file ", text), text


def test_a_failed_test_is_not_told_what_it_left(run: Run) -> None:
    run(
        """
def test_fails():
    process = subprocess.Popen(["sleep", "1"])
    assert process is None

def test_is_not_blamed_for_the_one_before():
    pass
""",
        passed=1,
        failed=1,
    )


def test_an_interrupted_session_blames_nobody(run: Run) -> None:
    text = run(
        """
@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(["sleep", "3"])
    yield
    process.kill()
    KEEP.append(process)

def test_passes():
    pass

def test_is_interrupted(server):
    raise KeyboardInterrupt

@pytest.fixture(scope="session", autouse=True)
def tidy():
    yield
    for process in KEEP:
        process.wait()
""",
        passed=1,
    )
    assert "left behind" not in text
