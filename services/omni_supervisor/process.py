"""The process port: start a child, hear its lines, signal it, know for certain when it has ended.

Children are executed fresh (a forked child would hold lifelines open), each in its own process group, so that the
terminal's Ctrl-C reaches the supervisor alone and what a killed child leaves behind can be ended with it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from omni_common.orphan import PARENT_PIPE
from omni_supervisor.merged_log import LineSplitter

#: Lines of a child that are kept for error messages.
TAIL_LINES = 20
#: A process that has left the child's group may hold its output open; the child is not waited for longer than this.
_OUTPUT_END_S = 1.0


class ParentPipe:
    """The pipe whose end tells children that the supervisor is gone. Only the supervisor holds the write end."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        os.close(self._write_fd)
        os.close(self.read_fd)


class _Output(asyncio.Protocol):
    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._splitter = LineSplitter()
        self._on_line = on_line
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        for line in self._splitter.feed(data):
            self._on_line(line)

    def connection_lost(self, exc: Exception | None) -> None:
        for line in self._splitter.end():
            self._on_line(line)
        self.ended.set()


class Child:
    """A running process. Made by `spawn`; `wait` must be awaited once, it frees everything."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", on_line: Callable[[str, str], None]) -> None:
        self.name = name
        self.pid = popen.pid
        #: Exit status, negative for the signal that ended it; None while it runs.
        self.status: int | None = None
        self._popen = popen
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pidfd = os.pidfd_open(popen.pid)
        self._exited = asyncio.Event()
        self._output = _Output(self._hear)
        self._transport: asyncio.ReadTransport | None = None
        asyncio.get_running_loop().add_reader(self._pidfd, self._exit)

    def _hear(self, line: str) -> None:
        if line.strip():
            self._tail.append(line)
        self._on_line(self.name, line)

    def _exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # Before the status is collected: until then the kernel gives the group's number to nobody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.status = self._popen.wait()
        os.close(self._pidfd)
        self._exited.set()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this very process, if it still runs."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def ends(self, within_s: float) -> bool:
        """Whether it ends within `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), within_s)
        return self.status is not None

    async def wait(self) -> int:
        """The exit status, once the child has ended and its last line has been heard."""
        await self._exited.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output.ended.wait(), _OUTPUT_END_S)
        if self._transport is not None:
            self._transport.close()
        assert self.status is not None
        return self.status

    def reason(self) -> str:
        """Why it ended, for people: the exit status and its last words."""
        assert self.status is not None
        how = f"exit status {self.status}"
        if self.status < 0:
            how = f"killed by {signal.Signals(-self.status).name}"
        return f"{how}: {self._tail[-1].strip()}" if self._tail else how

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._popen.stdout is not None
        self._transport, _ = await loop.connect_read_pipe(lambda: self._output, self._popen.stdout)


async def spawn(
    name: str,
    argv: Sequence[str],
    pipe: ParentPipe,
    on_line: Callable[[str, str], None],
    env: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
) -> Child:
    """Start `argv`; `on_line(name, line)` gets each line of its output and errors, in the order they were written.

    `env` is added to this process's environment; `fds` are inherited. Raises OSError when it cannot be executed,
    RuntimeError outside the main thread: the kernel's parent-death signal comes at the end of the thread that spawned.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("children must be started from the main thread: they end with the thread that starts them")
    child = Child(name, _execute(argv, (pipe.read_fd, *fds), {**(env or {}), PARENT_PIPE: str(pipe.read_fd)}), on_line)
    await child._listen()
    return child


def _execute(argv: Sequence[str], fds: Sequence[int], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=fds,
        process_group=0,
        env={**os.environ, **env},
    )
