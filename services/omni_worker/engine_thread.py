"""The engine thread: drives one engine, and is the only thread that calls it.

In come commands from the event loop, out go batches of results, one `call_soon_threadsafe` a batch. The thread sleeps
when the engine has nothing to do, and copies tensors into the arena, so that the loop never does.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from omni_common.errors import OmniError
from omni_common.frames import Tensor
from omni_worker.engine import Arrays, Engine, Failure, Job, LoadContext, Output, Piece
from omni_worker.whole_inputs import WholeInputs

log = logging.getLogger("omni.worker")

#: Pause before another step when every job that could go on waits for its consumer.
BLOCKED_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class Add:
    job: Job


@dataclass(frozen=True, slots=True)
class Push:
    request_id: str
    edge: str
    piece: Piece
    nbytes: int


@dataclass(frozen=True, slots=True)
class Drop:
    request_id: str


@dataclass(frozen=True, slots=True)
class Quit:
    pass


@dataclass(frozen=True, slots=True)
class Published:
    """An output whose tensors are in the arena, held once per sink."""

    output: Output
    sinks: tuple[str, ...]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Used:
    """The engine has taken a piece."""

    request_id: str
    edge: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The engine has forgotten a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Loaded:
    pass


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine cannot go on (or never could): `reason` is for people."""

    reason: str


Command = Add | Push | Drop | Quit | None
Result = Published | Failure | Used | Dropped | Loaded | Broken


class EngineThread:
    """`publish` is Node.publish; `on_results(list)` and `on_starved()` (the arena is full) run on the
    loop; `inputs` keeps what the engine is to get when it is complete."""

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[str, Arrays, int], dict[str, Tensor] | None],
        on_results: Callable[[list[Result]], None],
        on_starved: Callable[[], object],
        inputs: WholeInputs,
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._on_results = on_results
        self._on_starved = on_starved
        self._inputs = inputs
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._results: deque[Result] = deque()
        self._handover_due = False
        #: Sinks that still wait for the end of each job.
        self._open: dict[str, set[str]] = {}
        #: Outputs for which the arena had no room, in order.
        self._starved: deque[Output] = deque()
        #: Requests whose consumers take no more for now. Replaced by the loop, never changed in place.
        self.blocked: frozenset[str] = frozenset()
        #: The loop's own progress, for the heartbeat.
        self.steps = 0
        self.step_s = 0.0
        self.produced = 0
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> int:
        return len(self._open)

    @property
    def starving(self) -> bool:
        """Outputs wait for room in the arena."""
        return bool(self._starved)

    @property
    def resumes(self) -> bool:
        return self._engine.resumes

    @property
    def rebuilds(self) -> bool:
        return self._engine.rebuilds

    @property
    def busy(self) -> bool:
        """Work is due: what makes a still step counter suspicious."""
        return (self._engine.busy or self._engine.in_flight) and not self._open.keys() <= self.blocked

    def start(self, context: LoadContext) -> None:
        # A daemon: a hung engine must not keep a process alive that was told to end.
        self._thread = threading.Thread(target=self._run, args=(context,), name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def wake(self) -> None:
        """Make the thread look again; from any thread."""
        self._commands.put(None)

    async def stop(self, timeout_s: float) -> None:
        """End the thread after its current step; a hung one is left behind."""
        self._commands.put(Quit())
        if self._thread is not None:
            await self._loop.run_in_executor(None, self._thread.join, timeout_s)

    # ------------------------------------------------------------------------------------------------ in the thread

    def _run(self, context: LoadContext) -> None:
        try:
            self._engine.load(context)
            self._tell(Loaded())
            self._serve()
        except Exception as error:
            log.debug("the engine broke", exc_info=True)
            reason = error.message if isinstance(error, OmniError) else f"{type(error).__name__}: {error}"
            self._tell(Broken(reason))
        finally:
            self._engine.close()

    def _serve(self) -> None:
        idle_pause: float | None = None
        while True:
            for command in self._take(idle_pause):
                if isinstance(command, Quit):
                    return
                self._obey(command)
            self._feed_starved()
            blocked = self.blocked
            if self._starved:
                blocked = blocked.union(output.request_id for output in self._starved)
            before = time.perf_counter()
            outputs = self._engine.step(blocked)
            self.step_s += time.perf_counter() - before
            self.steps += 1
            for output in outputs:
                self._handle(output)
            if not self._engine.busy:
                idle_pause = None
            elif outputs or not blocked:
                idle_pause = 0.0
            else:
                idle_pause = BLOCKED_PAUSE_S

    def _take(self, pause: float | None) -> list[Command]:
        """All waiting commands; waits up to `pause` seconds (None: for ever) for the first."""
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(timeout=pause) if pause != 0.0 else self._commands.get_nowait())
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _obey(self, command: Command) -> None:
        if isinstance(command, Add):
            job = command.job
            self._open[job.request_id] = set(job.sinks)
            self._inputs.drop(job.request_id)
            self._guard(job.request_id, lambda: self._engine.add(job))
        elif isinstance(command, Push):
            if command.request_id in self._open:
                self._guard(command.request_id, lambda: self._push(command))
            self._tell(Used(command.request_id, command.edge, command.nbytes))
        elif isinstance(command, Drop):
            self._open.pop(command.request_id, None)
            self._starved = deque(output for output in self._starved if output.request_id != command.request_id)
            self._inputs.drop(command.request_id)
            self._engine.cancel(command.request_id)
            self._tell(Dropped(command.request_id))

    def _push(self, push: Push) -> None:
        for piece in self._inputs.take(push.request_id, push.piece, push.nbytes):
            self._engine.push(push.request_id, piece)

    def _guard(self, request_id: str, act: Callable[[], None]) -> None:
        """An input that an engine cannot take fails its request, not the stage."""
        try:
            act()
        except OmniError as error:
            self._fail(Failure(request_id, error.message, error.code, error.status, error.param))
        except Exception as error:
            log.exception("the engine refused an input of %s", request_id)
            self._fail(Failure(request_id, f"{type(error).__name__}: {error}"))

    def _fail(self, failure: Failure) -> None:
        if self._open.pop(failure.request_id, None) is not None:
            self._inputs.drop(failure.request_id)
            self._engine.cancel(failure.request_id)
            self._tell(failure)

    def _handle(self, output: Output | Failure) -> None:
        if isinstance(output, Failure):
            self._fail(output)
        elif output.request_id in self._open:
            if self._starved and any(waiting.request_id == output.request_id for waiting in self._starved):
                self._starved.append(output)
            else:
                self._emit(output)

    def _emit(self, output: Output) -> bool:
        """Publish one output; false (and it waits) when the arena has no room."""
        open_sinks = self._open[output.request_id]
        sinks = tuple(sorted(open_sinks)) if output.sinks is None else output.sinks
        try:
            tensors = self._publish(output.request_id, output.arrays, len(sinks))
        except OmniError as error:
            self._fail(Failure(output.request_id, error.message, error.code))
            return True
        if tensors is None:
            self._starved.append(output)
            self._loop.call_soon_threadsafe(self._on_starved)
            return False
        self.produced += output.end - output.start
        self._tell(Published(output, sinks, tensors))
        if output.last:
            open_sinks.difference_update(sinks)
            if not open_sinks:
                del self._open[output.request_id]
        return True

    def _feed_starved(self) -> None:
        for _ in range(len(self._starved)):
            output = self._starved.popleft()
            if output.request_id in self._open and not self._emit(output):
                # It went to the back; the ones behind it keep their order by going behind it.
                self._starved.rotate(1)
                return

    def _tell(self, result: Result) -> None:
        self._results.append(result)
        if not self._handover_due:
            self._handover_due = True
            self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        """On the loop: everything the thread had to say up to now."""
        self._handover_due = False
        results = []
        while self._results:
            results.append(self._results.popleft())
        self._on_results(results)
