"""The run folder: where the processes of one instance on one host meet. It holds sockets and a lock, no data."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

from omni_common.errors import OmniError
from omni_common.ids import is_incarnation

#: Bytes of a Unix socket's path on Linux (sun_path is 108 with its terminating zero).
SOCKET_PATH_BYTES = 107
#: Run folders that `omni serve` makes are named so, below `default_base()`.
PREFIX = "omnibus-"
_LIFELINE = "scheduler.life"


def default_base() -> Path:
    """`$XDG_RUNTIME_DIR` where it is a folder that can be written to, else the system's temporary folder."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(given) if given and os.access(given, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def find_running() -> Path:
    """The run folder to join when none is named: `$OMNI_RUN_DIR`, else the only one here with a live scheduler.

    Raises OmniError when there is none, or more than one.
    """
    given = os.environ.get("OMNI_RUN_DIR")
    if given:
        return Path(given)
    running = [path for path in default_base().glob(PREFIX + "*") if _is_alive(path / _LIFELINE)]
    if len(running) == 1:
        return running[0]
    found = f"several run: {', '.join(map(str, sorted(running)))}" if running else "none runs here (`omni serve`)"
    raise OmniError(f"which run folder? {found}; name one with --run-dir or OMNI_RUN_DIR", code="run_dir")


def _is_alive(lifeline: Path) -> bool:
    """A scheduler listens there. Connecting disturbs nobody, unlike trying the scheduler's lock."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(lifeline))
        except OSError:
            return False
    return True


def _is_refused(path: Path) -> bool:
    """The process that listened there has ended: a stopped one's takes connections, and other errors prove nothing."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


class RunDir:
    """Paths in the run folder of one instance.

    Mode 0770: in containers the processes may be different users of one group. Raises OmniError when the path is too
    long for a socket or cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        longest = len(os.fsencode(self.path / ("0" * 16 + ".life")))
        if longest > SOCKET_PATH_BYTES:
            raise OmniError(
                f"run folder {self.path} is too long: its sockets would have paths of {longest} bytes, "
                f"{SOCKET_PATH_BYTES} are possible; choose a shorter one with --run-dir",
                code="run_dir_too_long",
            )
        try:
            self.path.mkdir(mode=0o770, parents=True, exist_ok=True)
        except OSError as error:
            raise OmniError(f"run folder {self.path}: {error.strerror}", code="run_dir") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise OmniError(
                f"run folder {self.path}: user {os.getuid()} may not write there; it has to be in the folder's group",
                code="run_dir",
            )

    @property
    def control(self) -> str:
        """ZeroMQ address of the scheduler."""
        return f"ipc://{self.path}/scheduler"

    @property
    def lifeline(self) -> Path:
        """Unix socket of the scheduler that every process holds open."""
        return self.path / _LIFELINE

    def inbox(self, incarnation: str) -> str:
        """ZeroMQ address of a process's data inbox."""
        return f"ipc://{self.path}/{incarnation}.in"

    def descriptor(self, incarnation: str) -> Path:
        """Unix socket over which a process hands out its arena."""
        return self.path / f"{incarnation}.fd"

    def clear(self, incarnation: str) -> None:
        """Remove the sockets of a process that is gone. What is no incarnation has none."""
        if not is_incarnation(incarnation):
            return
        for name in (f"{incarnation}.in", f"{incarnation}.fd"):
            (self.path / name).unlink(missing_ok=True)

    def dead(self) -> list[str]:
        """Incarnations that have both sockets here and live no more: nobody listens."""
        # A process that starts has its inbox last: with that, it listens at the other one.
        found = [path.stem for path in self.path.glob("*.in") if is_incarnation(path.stem)]
        return [incarnation for incarnation in found if _is_refused(self.descriptor(incarnation))]

    def clear_control(self) -> None:
        """Remove the scheduler's socket; for the scheduler that ends."""
        (self.path / "scheduler").unlink(missing_ok=True)

    def lock_scheduler(self) -> int:
        """Take the lock that makes the scheduler of a run folder the only one; held until the process ends.

        Returns the descriptor that holds it. Raises OmniError when another scheduler lives.
        """
        descriptor = os.open(self.path / "scheduler.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise OmniError(f"another scheduler runs in {self.path}", code="scheduler_running") from None
        return descriptor
