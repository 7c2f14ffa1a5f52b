"""`omni serve` as a user starts it: the real command, its log, and what it leaves behind when it is stopped."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from support.http import free_port

#: Models are loaded on a machine that may be busy.
PATIENCE_S = 120.0


def command(name: str) -> str:
    """Path of a console command of this checkout."""
    return str(Path(sys.executable).with_name(name))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for an event that only shows as state."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


class Logged:
    """A process whose output goes to a file."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def said(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first line that matches and begins after so many characters of the log."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(re.compile(pattern, re.MULTILINE).finditer(self.log, after))
            assert found or self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log}"
            return bool(found)

        wait_until(look, f"{pattern!r} in:\n{self.log}")
        return found[0]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


class Instance(Logged):
    """A running `omni serve`, ready."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        super().__init__([command("omni"), "serve", "--port", str(self.port), *flags], folder / "serve.log")
        self.said(r"^omni +\| ready after")
        self.run = Path(self.said(r"serving .* in (/\S+)$")[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> dict[str, psutil.Process]:
        """By module, and by name for workers; `serve` is the supervisor."""
        supervisor = psutil.Process(self.process.pid)
        found = {"serve": supervisor}
        for child in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = child.cmdline()
                module = line[line.index("-m") + 1].split(".")[0] if "-m" in line else " ".join(line)
                found[line[line.index("--name") + 1] if "--name" in line else module] = child
        return found

    def omni(self, *arguments: str) -> str:
        """What a client command prints; it must succeed."""
        done = subprocess.run(
            [command("omni"), *arguments, "--url", self.url], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Instance]:
    """An instance that must stop clean: exit status 0, no process, no run folder, nothing bad in its log."""
    instance = Instance(folder, *flags)
    try:
        yield instance
        processes = instance.processes()
        status = instance.end()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(instance.process.pid, signal.SIGKILL)
        instance.process.wait()
        raise
    assert status == 0, instance.log
    assert not [name for name, process in processes.items() if process.is_running()], instance.log
    assert not instance.run.exists()
    for bad in ("Traceback", "leaked", "never retrieved", "never awaited"):
        assert bad not in instance.log, instance.log
