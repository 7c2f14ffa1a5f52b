"""What a fake stage writes down, and how a test makes it die at an exact event.

The option `notes` names a folder. Each process appends a line for every job and output to `<pid>.log` there,
unbuffered, so that the lines outlive a SIGKILL. A file in the folder whose name is an event is an order: the first
process in which the event happens takes it (renames it to `<event>.<pid>`) and sends itself the signal whose number the
file holds.
"""

import os
import signal
import threading
import time
from pathlib import Path

#: Seconds from a job's last output to the signal, by event. `sent`: the output has just left; `idle`: the stage has
#: turned to something else.
AFTER_LAST_S = {"sent": 0.003, "idle": 0.03}


class Notes:
    """Events in the order of a job's life: `placed`, `first` (input is there, no output yet), `mid`, `last` (the last
    output is computed and has not left), `sent`, `idle`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        self._log = os.open(self._folder / f"{os.getpid()}.log", flags, 0o600)

    def close(self) -> None:
        os.close(self._log)

    def write(self, *words: object) -> None:
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def job(self, request_id: str) -> None:
        self.write("job", request_id)
        self.event("placed", request_id)

    def output(self, request_id: str, start: int, end: int, last: bool) -> None:
        """Before the output leaves the engine."""
        if start == 0:
            self.event("first", request_id)
        elif not last:
            self.event("mid", request_id)
        self.write("out", request_id, start, end, int(last))
        if last:
            self.event("last", request_id)
            for event, seconds in AFTER_LAST_S.items():
                self.event(event, request_id, seconds)

    def event(self, event: str, request_id: str, after_s: float = 0.0) -> None:
        """Die here if a test ordered it, or (`after_s`) that much later."""
        taken = self._folder / f"{event}.{os.getpid()}"
        try:
            (self._folder / event).rename(taken)
        except FileNotFoundError:
            return
        number = int(taken.read_text())
        self.write("end", request_id, event)
        if after_s:
            threading.Thread(target=_later, args=(after_s, number), daemon=True).start()
        else:
            _later(0.0, number)


def _later(seconds: float, number: int) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), number)
    if number == signal.SIGKILL:
        # Another thread may have got the signal; nothing more may happen in this one.
        time.sleep(60)
