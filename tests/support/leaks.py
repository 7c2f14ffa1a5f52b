"""Pytest plugin: a test that passes but leaves anything behind is an error, and the message says what.

Watched: processes (children, and orphans by a marker in their environment), descriptors, Python and ZeroMQ threads,
mappings of shared memory, files in /dev/shm and in the temporary folder, and asyncio tasks. What belongs to a fixture
of a wider scope may stay as long as the fixture, and is checked when the module and the session end. Things that end on
their own account get `PATIENCE_S`. Clients with a pool of connections belong into function-scoped fixtures: a
connection that a test opens in a wider one is told as its leak.
"""

import asyncio
import contextlib
import gc
import inspect
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

PATIENCE_S = 5.0
SCOPES = ("test", "class", "module", "package", "session")
_MARKER = "OMNI_TEST_SESSION"
_SHM = Path("/dev/shm")

#: What there is: identity (the first item is the kind) to words for people.
Things = dict[tuple[Any, ...], str]


class _Processes:
    """Live descendants of this process, and every process that was started by one, however it was orphaned."""

    def __init__(self) -> None:
        self.token = f"{os.getpid()}-{time.monotonic_ns()}"
        self._marked: dict[tuple[int, str], bool] = {}

    def __call__(self) -> tuple[Things, dict[int, int]]:
        """The processes, and the parent of every process of the machine."""
        parents: dict[int, int] = {}
        starts: dict[int, tuple[str, str]] = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                    parents[int(entry.name)] = int(fields[1])
                    starts[int(entry.name)] = (fields[19], fields[0])
        me = os.getpid()
        found: Things = {}
        for pid, (start, state) in starts.items():
            if pid != me and (_descends(pid, {me}, parents) or (state != "Z" and self._has_marker(pid, start))):
                found["process", pid, start] = f"process {pid}: {_command(pid)}"
        self._marked = {key: value for key, value in self._marked.items() if key[0] in starts}
        return found, parents

    def _has_marker(self, pid: int, start: str) -> bool:
        if (pid, start) not in self._marked:
            marker = f"{_MARKER}={self.token}".encode()
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                return False
            if not environ:
                return False
            self._marked[pid, start] = marker in environ.split(b"\0")
        return self._marked[pid, start]


def _descends(pid: int, ancestors: set[Any], parents: dict[int, int]) -> bool:
    seen = {pid}
    while (pid := parents.get(pid, 0)) and pid not in seen:
        if pid in ancestors:
            return True
        seen.add(pid)
    return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        if line:
            return line[:200]
    return "ended, but nobody waited for it"


def _descriptors() -> Iterator[tuple[tuple[Any, ...], str]]:
    """All but 0 to 2, which pytest replaces when it captures output."""
    for number in sorted(set(os.listdir("/proc/self/fd")) - {"0", "1", "2"}):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            yield ("descriptor", number, target), f"descriptor {number} -> {target}"


def _threads() -> Iterator[tuple[tuple[Any, ...], str]]:
    for thread in threading.enumerate():
        yield ("thread", id(thread)), f"thread {thread.name}"
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/self/task/{number}/comm").read_text().strip()
            if name.startswith("ZMQbg"):
                yield ("zmq", number), f"ZeroMQ context (thread {name})"


def _mappings() -> Iterator[tuple[tuple[Any, ...], str]]:
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "/memfd:" in line or "/dev/shm/" in line:
                fields = line.split(maxsplit=5)
                yield ("mapping", fields[4]), f"mapping of {fields[5].strip()}"


def _files(folder: Path) -> Iterator[tuple[tuple[Any, ...], str]]:
    for name in os.listdir(folder) if folder.is_dir() else ():
        yield ("file", name), f"file {folder / name}"


class LeakCheck:
    """Baselines of the open scopes, narrowest last."""

    def __init__(self) -> None:
        self._processes = _Processes()
        self._open: list[tuple[str, Things]] = []
        self._restore: dict[str, str | None] = {}
        #: An interrupted session tears down what is still up without a test that could be blamed.
        self.over = False
        #: A test that failed has cleaned up nothing, and its traceback holds its objects.
        self.failed = False

    def start(self) -> None:
        """Give this session a temporary folder of its own; pytest's `tmp_path` stays where it is, to be looked at."""
        before = tempfile.gettempdir()
        self._temporary = Path(tempfile.mkdtemp(prefix="omnitest-"))
        ours = {
            _MARKER: self._processes.token,
            "TMPDIR": str(self._temporary),
            "XDG_RUNTIME_DIR": str(self._temporary),
            "PYTEST_DEBUG_TEMPROOT": os.environ.get("PYTEST_DEBUG_TEMPROOT", before),
        }
        self._restore = {key: os.environ.get(key) for key in ours}
        os.environ.update(ours)
        tempfile.tempdir = None

    def stop(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
        for key, value in self._restore.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        tempfile.tempdir = None

    def look(self) -> tuple[Things, dict[int, int]]:
        things, parents = self._processes()
        for source in (_descriptors(), _threads(), _mappings(), _files(_SHM), _files(self._temporary)):
            things.update(source)
        return things, parents

    @contextlib.contextmanager
    def scope(self, name: str) -> Generator[None]:
        """Fails when what came up inside is not gone at the end."""
        baseline, _ = self.look()
        self._open.append((name, baseline))
        try:
            yield
        finally:
            self._open.pop()
        blameless = self.over or (name == "test" and self.failed)
        left = self._left(baseline, 0 if blameless else PATIENCE_S)
        for _, wider in self._open:
            wider.update(left)  # Told once, not again at the end of the module.
        if left and not blameless:
            pytest.fail("\n  ".join([f"the {name} left behind:", *left.values()]), pytrace=False)

    @contextlib.contextmanager
    def wider(self, scope: str) -> Generator[None]:
        """What comes up inside belongs to a fixture of `scope`, so narrower scopes may leave it."""
        before, _ = self.look()
        try:
            yield
        finally:
            after, _ = self.look()
            fresh = {key: words for key, words in after.items() if key not in before}
            for name, baseline in self._open:
                if SCOPES.index(name) < SCOPES.index(scope):
                    baseline.update(fresh)

    def _left(self, baseline: Things, patience_s: float) -> Things:
        deadline = time.monotonic() + patience_s
        pause = 0.002
        while left := self._difference(baseline):
            if time.monotonic() > deadline:
                break
            gc.collect()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return left

    def _difference(self, baseline: Things) -> Things:
        """A process below one of the baseline is that one's business: a supervisor may replace its children."""
        things, parents = self.look()
        fixtures = {key[1] for key in baseline if key[0] == "process"}
        return {
            key: words
            for key, words in things.items()
            if key not in baseline and not (key[0] == "process" and _descends(key[1], fixtures, parents))
        }


def pytest_configure(config: pytest.Config) -> None:
    check = LeakCheck()
    check.start()
    config.stash[_KEY] = check
    config.add_cleanup(check.stop)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_KEY].over = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.config.stash[_KEY].failed = report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function" or fixturedef.argname in ("no_leak_of_module", "no_leak_of_session"):
        return (yield)
    with request.config.stash[_KEY].wider(fixturedef.scope):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def no_leak_of_session(pytestconfig: pytest.Config) -> Iterator[None]:
    with pytestconfig.stash[_KEY].scope("session"):
        yield


@pytest.fixture(scope="module", autouse=True)
def no_leak_of_module(pytestconfig: pytest.Config) -> Iterator[None]:
    with pytestconfig.stash[_KEY].scope("module"):
        yield


@pytest.fixture(autouse=True)
def no_leak(pytestconfig: pytest.Config) -> Iterator[None]:
    with pytestconfig.stash[_KEY].scope("test"):
        yield


@pytest.fixture(autouse=True)
def no_task_left_if_async(no_leak: None, request: pytest.FixtureRequest) -> None:
    """Comes after `no_leak` is set up, so that the loop is closed, with its threads, before `no_leak` looks again."""
    if _runs_in_a_loop_of_its_own(request):
        request.getfixturevalue("no_task_left")


@pytest_asyncio.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Set up first and torn down last in the loop of an async test, so its other fixtures have ended their tasks."""
    before = asyncio.all_tasks()
    yield
    me = asyncio.current_task()
    deadline = time.monotonic() + PATIENCE_S
    while left := [task for task in asyncio.all_tasks() if task is not me and task not in before]:
        if time.monotonic() > deadline:
            pytest.fail("the test left tasks behind:\n" + "\n".join(f"  {task!r}" for task in left), pytrace=False)
        await asyncio.sleep(0.01)


def _runs_in_a_loop_of_its_own(request: pytest.FixtureRequest) -> bool:
    function: Callable[..., object] | None = getattr(request, "function", None)
    marker = request.node.get_closest_marker("asyncio")
    scope = marker.kwargs.get("loop_scope", "function") if marker else "function"
    return inspect.iscoroutinefunction(function) and scope == "function"


_KEY = pytest.StashKey[LeakCheck]()
