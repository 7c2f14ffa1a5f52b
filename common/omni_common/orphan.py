"""A child ends with its parent, however the parent ends.

The parent holds the write end of a pipe and hands the read end down (`OMNI_PARENT_PIPE=<fd>`). Two notices, because
each has a hole: the kernel's parent-death signal is lost when the parent dies before it is asked for, or a set-user-id
program is executed; the pipe's end needs a thread of this process that still runs.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable

PARENT_PIPE = "OMNI_PARENT_PIPE"
_PR_SET_PDEATHSIG = 1


def end_with_parent(on_eof: Callable[[], None] | None = None, grace_s: float = 2.0) -> None:
    """End this process when the parent that set `OMNI_PARENT_PIPE` dies; without the variable do nothing.

    Call it first thing in `main`, before any other process or thread is started: the variable and the descriptor are
    kept from this process's own children here. When the pipe ends, `on_eof` runs in a thread (the event loop may hang),
    and the process ends with status 1 as soon as it returns, at the latest after `grace_s` seconds. When the parent is
    killed, SIGKILL usually comes first; the parent must have spawned this process from a thread that lives as long as
    itself, because the kernel sends it at the end of that thread.

    Raises OSError when the variable does not name an open descriptor, or when the kernel refuses the death signal.
    """
    given = os.environ.pop(PARENT_PIPE, None)
    if given is None:
        return
    fd = int(given)
    os.set_inheritable(fd, False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # A parent that died before prctl has closed its end already, so the watcher ends this process at once: that is
    # the check that getppid() would make, without its error where the new parent is not process 1.
    threading.Thread(target=_watch, args=(fd, on_eof, grace_s), name="end-with-parent", daemon=True).start()


def _watch(fd: int, on_eof: Callable[[], None] | None, grace_s: float) -> None:
    try:
        with contextlib.suppress(OSError):
            while os.read(fd, 64):
                pass
        if on_eof is not None:
            last_words = threading.Thread(target=on_eof, name="parent-is-gone", daemon=True)
            last_words.start()
            last_words.join(grace_s)
    finally:
        os._exit(1)
