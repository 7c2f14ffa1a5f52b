"""The run folder of one `omni serve`: made, locked, removed; and the sweeping of those that dead instances left."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from omni_common.errors import OmniError
from omni_common.run_dir import PREFIX, RunDir

#: Held locked as long as the supervisor lives, whatever ends it.
LOCK = "supervisor.lock"


@contextlib.contextmanager
def run_folder(given: Path | None, base: Path) -> Iterator[RunDir]:
    """The folder `given`, or a fresh one below `base`; locked inside the block.

    What was made here is removed at the end: the folder, or in a folder that was there only the lock and the sockets of
    dead processes. Raises OmniError when it is in use, its path is too long, or it cannot be made.
    """
    if given is None:
        sweep(base)
        path, lock = _make(base)
        try:
            yield RunDir(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
        return
    existed = given.exists()
    run = RunDir(given)
    try:
        held = _lock(run.path)
    except OSError as error:
        raise OmniError(f"run folder {run.path}: {error.strerror}", code="run_dir") from None
    if held is None:
        raise OmniError(f"another omni serve uses the run folder {run.path}", code="run_dir_in_use")
    try:
        if existed:
            clear_dead(run.path)
        else:
            run.path.chmod(0o770)
        yield run
    finally:
        if existed:
            clear_dead(run.path)
            (run.path / LOCK).unlink(missing_ok=True)
        else:
            shutil.rmtree(run.path, ignore_errors=True)
        os.close(held)


def sweep(base: Path) -> list[Path]:
    """Remove run folders of this user below `base` whose supervisor is dead; returns them.

    Only real folders with our prefix and a lock file that nobody holds: others have not been made here.
    """
    swept = []
    for path in base.glob(f"{PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid() or not (path / LOCK).is_file():
                continue
            lock = _lock(path)
        except OSError:
            continue
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            swept.append(path)
    return swept


def clear_dead(folder: Path) -> None:
    """Remove the sockets in `folder` that nobody listens at. Connecting disturbs nobody who does."""
    for path in folder.iterdir():
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink(missing_ok=True)
                except OSError:
                    continue


def _make(base: Path) -> tuple[Path, int]:
    """A fresh folder, which appears under its name only when it is locked: a sweeper never sees it unlocked."""
    name = f"{PREFIX}{secrets.token_hex(4)}"
    hidden = base / f".{name}"
    try:
        hidden.mkdir(mode=0o700)
        lock = _lock(hidden)
        assert lock is not None
        # Not left to the umask: in containers the processes may be different users of one group.
        hidden.chmod(0o770)
        hidden.rename(base / name)
    except OSError as error:
        raise OmniError(f"cannot make a run folder in {base}: {error.strerror}", code="run_dir") from None
    return base / name, lock


def _lock(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None when another process holds it."""
    while True:
        descriptor = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), (path / LOCK).stat()):
                return descriptor
        # Its former holder removed the file between the two calls: this lock guards nothing.
        os.close(descriptor)
