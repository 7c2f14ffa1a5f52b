"""A worker's or gateway's place in the instance: hello, beats, lifeline, and what the scheduler says about it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from omni_common.frames import Beat, Bye, Error, Fenced, Hello, Plain, Refused, Welcome
from omni_common.lifeline import Lifeline
from omni_common.run_dir import RunDir
from omni_common.sockets import Context, ControlClient

log = logging.getLogger(__name__)

#: Longest wait for the scheduler's answer to `bye`.
GOODBYE_S = 1.0


class Member:
    """Keeps the process registered with whatever scheduler lives in the run folder.

    `on_frame(frame)` gets every frame that is not about membership; `on_welcome(again)` is called when a scheduler took
    the process in (`again`: it is another scheduler than before); `on_end(reason)` when the process must end: it was
    refused or fenced.
    """

    def __init__(
        self,
        context: Context,
        run: RunDir,
        incarnation: str,
        hello: Callable[[], Hello],
        beat: Callable[[], Beat],
        on_frame: Callable[[Plain], None],
        on_welcome: Callable[[bool], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._hello = hello
        self._beat = beat
        self._on_frame = on_frame
        self._on_welcome = on_welcome
        self._on_end = on_end
        self._scheduler = ""
        #: A scheduler has taken this process in and is still there.
        self._registered = False
        #: Frames for a scheduler that is not there; bounded by the requests in flight.
        self._waiting: list[Plain] = []
        self._beat_s = 1.0
        self._control = ControlClient(context, run.control, incarnation, self._received)
        self._lifeline = Lifeline(run.lifeline, incarnation, self._held, self._lost)
        self._timer: asyncio.TimerHandle | None = None
        self._goodbye = asyncio.Event()

    def start(self) -> None:
        self._lifeline.start()

    @property
    def registered(self) -> bool:
        return self._registered

    def send(self, frame: Plain) -> None:
        """To the scheduler; while there is none, frames wait for its return."""
        if self._registered:
            self._control.send(frame)
        else:
            self._waiting.append(frame)

    def _held(self) -> None:
        self._control.send(self._hello())

    def _lost(self) -> None:
        self._registered = False
        log.warning("the scheduler is gone; waiting for its return")

    def _received(self, frame: Plain) -> None:
        if isinstance(frame, Welcome):
            again = bool(self._scheduler) and frame.scheduler != self._scheduler
            self._scheduler, self._beat_s = frame.scheduler, frame.beat_s
            self._registered = True
            waiting, self._waiting = self._waiting, []
            for frame_ in waiting:
                self._control.send(frame_)
            self._on_welcome(again)
            if self._timer is None:
                self._send_beat()
        elif isinstance(frame, Refused | Fenced):
            self._registered = False
            self._on_end(frame.reason)
        elif isinstance(frame, Bye):
            self._goodbye.set()
        elif isinstance(frame, Error) and frame.code == "unknown_peer":
            self._control.send(self._hello())
        elif isinstance(frame, Error):
            log.error("the scheduler did not understand: %s (%s)", frame.message, frame.code)
        else:
            self._on_frame(frame)

    def _send_beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._send_beat)
        if self._registered:
            self._control.send(self._beat())

    async def close(self, reason: str) -> None:
        """Say goodbye, wait a moment for the answer (else the lifeline's end looks like a death), and leave."""
        if self._timer:
            self._timer.cancel()
        if self._registered:
            self._control.send(Bye(reason))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._goodbye.wait(), GOODBYE_S)
        self._control.close()
        await self._lifeline.close()
