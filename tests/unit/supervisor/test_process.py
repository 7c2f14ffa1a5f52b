import asyncio
import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator

import pytest

from omni_supervisor.merged_log import MAX_LINE_BYTES, LineSplitter, MergedLog
from omni_supervisor.process import Child, ParentPipe, spawn

#: Far beyond what a kill takes, even on a loaded machine.
DEATH_S = 10.0


class Lines:
    """Hears lines; `seen(text)` waits for one."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.all.append((name, line))
        self._changed.set()

    @property
    def texts(self) -> list[str]:
        return [line for _, line in self.all]

    async def seen(self, text: str) -> str:
        async with asyncio.timeout(DEATH_S):
            while not (found := [line for line in self.texts if text in line]):
                self._changed.clear()
                await self._changed.wait()
        return found[0]


@pytest.fixture
def pipe() -> Iterator[ParentPipe]:
    pipe = ParentPipe()
    yield pipe
    pipe.close()


@pytest.fixture
async def lines() -> Lines:
    return Lines()


@pytest.fixture
async def start(pipe: ParentPipe, lines: Lines) -> AsyncIterator:
    """Starts Python programs; kills and awaits at the end what still runs."""
    children: list[Child] = []

    async def start(program: str, name: str = "child-0") -> Child:
        child = await spawn(
            name, [sys.executable, "-c", textwrap.dedent(program)], pipe, lines, {"PYTHONUNBUFFERED": "1"}
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.signal(signal.SIGKILL)
        await child.wait()


async def test_lines_of_output_and_errors_keep_their_order(start, lines: Lines) -> None:
    child = await start("import sys; print('one'); print('two', file=sys.stderr); print('three')")
    assert await child.wait() == 0
    assert lines.all == [("child-0", "one"), ("child-0", "two"), ("child-0", "three")]


async def test_the_last_words_of_a_crash_are_heard_and_remembered(start, lines: Lines) -> None:
    child = await start(
        """
        import os, sys
        for i in range(2000):
            print(f"line {i}")
        sys.stderr.write("RuntimeError: no weights")
        sys.stderr.flush()
        os._exit(3)
        """
    )
    assert await child.wait() == 3
    assert lines.texts == [f"line {i}" for i in range(2000)] + ["RuntimeError: no weights"]
    assert child.reason() == "exit status 3: RuntimeError: no weights"


async def test_a_signal_is_named(start) -> None:
    child = await start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert await child.wait() == -signal.SIGSEGV
    assert child.reason() == "killed by SIGSEGV"


async def test_signals_reach_a_child_and_not_a_dead_one(start, lines: Lines) -> None:
    child = await start(
        """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: exit(5))
        print("armed")
        time.sleep(60)
        """
    )
    await lines.seen("armed")
    child.signal(signal.SIGTERM)
    assert await child.wait() == 5
    child.signal(signal.SIGTERM)


async def test_what_a_killed_child_leaves_in_its_group_ends_with_it(start, lines: Lines) -> None:
    child = await start(
        """
        import subprocess, sys, time
        engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("engine", engine.pid)
        time.sleep(60)
        """
    )
    engine = int((await lines.seen("engine")).split()[1])
    fd = os.pidfd_open(engine)
    child.signal(signal.SIGKILL)
    # Its output would stay open for a minute if the grandchild lived.
    assert await child.wait() == -signal.SIGKILL
    assert_ends(fd)
    os.close(fd)


async def test_a_child_has_a_group_of_its_own_and_nothing_to_read(start) -> None:
    child = await start("import os, sys; assert os.getpgid(0) == os.getpid(); assert sys.stdin.read() == ''")
    assert await child.wait() == 0


async def test_descriptors_are_handed_down_under_their_numbers(pipe: ParentPipe, lines: Lines) -> None:
    read, write = os.pipe()
    argv = [sys.executable, "-c", f"import os; os.write({write}, b'here')"]
    child = await spawn("child-0", argv, pipe, lines, fds=(write,))
    assert await child.wait() == 0
    assert os.read(read, 10) == b"here"
    os.close(read)
    os.close(write)


async def test_what_cannot_be_executed_is_an_error(pipe: ParentPipe, lines: Lines) -> None:
    with pytest.raises(FileNotFoundError):
        await spawn("ghost", ["/nonexistent/program"], pipe, lines)


async def test_children_are_refused_from_a_thread_that_may_end(pipe: ParentPipe, lines: Lines) -> None:
    with pytest.raises(RuntimeError, match="main thread"):
        await asyncio.to_thread(lambda: asyncio.run(spawn("x", [sys.executable, "-c", ""], pipe, lines)))


# ------------------------------------------------------------------------------------------------------------ orphans

CHILD = """
import os, sys, time
from omni_common.orphan import PARENT_PIPE, end_with_parent
fd = int(os.environ[PARENT_PIPE])
end_with_parent()
assert PARENT_PIPE not in os.environ
assert not os.get_inheritable(fd)
print("pid", os.getpid(), flush=True)
# Hung for good, with the interpreter in hand.
import ctypes
ctypes.PyDLL(None).sleep(60) if sys.argv[1] == "hung" else time.sleep(60)
"""

PARENT = """
import asyncio, os, sys
from omni_supervisor.process import ParentPipe, spawn

async def main():
    pipe = ParentPipe()
    line = lambda name, text: print(text, flush=True)
    for kind in ("calm", "hung"):
        await spawn(kind, [sys.executable, "-c", os.environ["CHILD"], kind], pipe, line)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@contextlib.contextmanager
def parent_with_children() -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A parent like the supervisor, and descriptors of its two children."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env={**os.environ, "CHILD": CHILD}
    ) as parent:
        fds = []
        try:
            assert parent.stdout is not None
            fds = [os.pidfd_open(int(parent.stdout.readline().split()[1])) for _ in range(2)]
            yield parent, fds
        finally:
            parent.kill()
            for fd in fds:
                os.close(fd)


def assert_ends(fd: int) -> None:
    """The process behind a pidfd ends."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(DEATH_S * 1000), "still alive"


def test_no_orphan_after_a_killed_parent() -> None:
    with parent_with_children() as (parent, fds):
        parent.kill()
        for fd in fds:
            assert_ends(fd)


def test_no_orphan_while_loading_when_the_parent_is_gone_before_the_signal_is_asked_for(tmp_path) -> None:
    """The parent closes its end before the child has come to `end_with_parent`: the pipe alone must do."""
    read, write = os.pipe()
    program = "import time\nfrom omni_common.orphan import end_with_parent\ninput()\nend_with_parent()\ntime.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        pass_fds=(read,),
        env={**os.environ, "OMNI_PARENT_PIPE": str(read)},
    ) as child:
        os.close(write)
        os.close(read)
        child.communicate(b"\n", timeout=DEATH_S)
        assert child.returncode == 1


@pytest.mark.parametrize("last_word", ["print('bye', flush=True)", "time.sleep(60)", "1 / 0"])
def test_the_end_of_the_pipe_allows_last_words_but_not_for_long(last_word: str) -> None:
    program = f"""
import sys, threading, time
from omni_common.orphan import end_with_parent
threading.excepthook = lambda _: None
end_with_parent(lambda: {last_word}, grace_s=0.1)
print("up", flush=True)
time.sleep(60)
"""
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(read,),
        env={**os.environ, "OMNI_PARENT_PIPE": str(read)},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        os.close(write)
        os.close(read)
        said, _ = child.communicate(timeout=DEATH_S)
    assert child.returncode == 1
    assert said == ("bye\n" if "bye" in last_word else "")


def test_without_a_supervisor_nothing_is_watched() -> None:
    program = "import threading\nfrom omni_common.orphan import end_with_parent\nend_with_parent()\n"
    program += "assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------------------------------------------------------- log


def test_lines_are_cut_at_newlines_only() -> None:
    splitter = LineSplitter()
    assert splitter.feed("Gr\u00fc".encode()[:3]) == []
    assert splitter.feed("Gr\u00fc\u00dfe\ntwo\r\n10%\r50%\r100%\nrest".encode()[3:]) == [
        "Gr\u00fc\u00dfe",
        "two",
        "100%",
    ]
    assert splitter.end() == ["rest"]
    assert splitter.end() == []


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (MAX_LINE_BYTES + 1)) == ["x" * (MAX_LINE_BYTES + 1)]
    assert splitter.end() == []


def test_names_are_aligned_and_coloured_on_a_terminal_only(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = io.StringIO()
    MergedLog(plain, width=8).line("omni", "hello")
    assert plain.getvalue() == "omni     | hello\n"
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    MergedLog(terminal).line("omni", "hello")
    assert terminal.getvalue().startswith("\033[") and terminal.getvalue().endswith("\033[0m hello\n")


def test_a_log_whose_reader_is_gone_does_not_end_the_service() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as broken:
        log = MergedLog(broken)
        log.line("omni", "one")
        log.line("omni", "two")
        with contextlib.suppress(BrokenPipeError):
            broken.close()
