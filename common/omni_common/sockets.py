"""ZeroMQ sockets on an asyncio loop. The only module that touches ZeroMQ.

A raw socket is driven by its descriptor instead of by `zmq.asyncio`: no future per message (a cancelled one can lose
its message), and a hop costs about half. The descriptor is edge-triggered, and any send may swallow an edge, hence the
two rules below: read until nothing is left, and look at the events again after every send.

Frames for one peer that are sent in the same turn of the loop leave as one message.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import zmq

from omni_common import wire
from omni_common.frames import Error, Plain

log = logging.getLogger(__name__)

#: Messages read before the loop gets its turn again.
BURST = 64
#: A fuse, not the flow control: the sum of all credits granted to one inbox stays far below it.
HIGH_WATER = 20_000
MAX_MESSAGE_BYTES = 1 << 30
#: Frames kept for a peer whose pipe is full before it is given up.
MAX_BACKLOG = 100_000
RETRY_S = 0.002
# Plain integers: arithmetic on pyzmq's enumerations costs half a microsecond, several times a message.
_NOBLOCK, _EVENTS, _RCVMORE = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.RCVMORE)
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)

Context = zmq.Context[zmq.Socket[bytes]]
OnFrames = Callable[[list[Plain], list[memoryview]], None]


def _new_socket(context: Context, kind: int, address: str, linger_ms: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, linger_ms)
    socket.set(zmq.SNDHWM, HIGH_WATER)
    socket.set(zmq.RCVHWM, HIGH_WATER)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if not address.startswith("ipc://"):
        # From the C++ I/O thread: they find a half-open connection, not a hung process. On one host the kernel tells,
        # and a heartbeat would only break the connections of a process that is stopped for a while.
        socket.set(zmq.HEARTBEAT_IVL, 2000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 6000)
    if kind in (zmq.PUSH, zmq.DEALER):
        # Queue only for a connection that stands: otherwise mail for a dead peer is accepted without an error.
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
    if kind == zmq.ROUTER:
        # Without it a ROUTER drops silently what it cannot deliver.
        socket.set(zmq.ROUTER_MANDATORY, 1)
        # Who connects again is heard, although the end of the connection before has not been noticed yet.
        socket.set(zmq.ROUTER_HANDOVER, 1)
    return socket


def new_context() -> Context:
    """One a process. Contexts never cross a fork."""
    return zmq.Context()


class _Driven:
    """A socket whose readiness calls `_readable` and `_writable` on the running loop."""

    def __init__(self, context: Context, kind: int, address: str, linger_ms: int = 0) -> None:
        self._socket = _new_socket(context, kind, address, linger_ms)
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._ready)
        self._closed = False

    def _ready(self) -> None:
        if self._closed:
            return
        events = self._events()
        if events & _POLLIN:
            more = True
            try:
                more = self._readable()
            finally:
                # A handler that raises must not swallow the edge: what waits behind its frame would wait for ever.
                if more:
                    self._loop.call_soon(self._ready)
        if not self._closed and events & _POLLOUT:
            self._writable()

    def _events(self) -> int:
        return int(self._socket.get(_EVENTS))

    def _readable(self) -> bool:
        """Read a burst; true when more may wait."""
        return False

    def _writable(self) -> None:
        """The pipe may have room again."""

    def _receive(self) -> list[memoryview]:
        """One message; raises zmq.Again. The first part is copied, large tensor parts after it are not."""
        parts = [memoryview(self._socket.recv(_NOBLOCK))]
        while self._socket.get(_RCVMORE):
            parts.append(self._socket.recv(_NOBLOCK, copy=False).buffer)
        return parts

    def _sent(self) -> None:
        # A send may have consumed the edge that announced input.
        if not self._closed and self._events() & _POLLIN:
            self._loop.call_soon(self._ready)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.close()


class Inbox(_Driven):
    """PULL, bound: where chunks, grants and releases of all peers arrive."""

    def __init__(self, context: Context, address: str, on_frames: OnFrames) -> None:
        super().__init__(context, zmq.PULL, address)
        self._on_frames = on_frames
        self._socket.bind(address)
        #: The address peers connect to (a wildcard port resolved).
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _readable(self) -> bool:
        for _ in range(BURST):
            try:
                parts = self._receive()
            except zmq.Again:
                return False
            try:
                self._on_frames(wire.decode(parts[0]), parts[1:])
            except wire.ProtocolError as error:
                log.warning("dropped a message that is no frame: %s", error)
            # Asked, because zmq.Again as the answer costs more.
            if self._closed or not self._events() & _POLLIN:
                return False
        return True


class _Sender(_Driven):
    """A socket with one peer to send to."""

    def __init__(self, context: Context, kind: int, address: str, linger_ms: int = 0) -> None:
        super().__init__(context, kind, address, linger_ms)
        self._turn: list[Plain] = []
        self._backlog: deque[list[bytes | memoryview]] = deque()

    def send(self, frame: Plain) -> None:
        """Leaves at the end of this turn of the loop, in order; never blocks, never drops while the peer lives."""
        if not self._turn:
            self._loop.call_soon(self._end_turn)
        self._turn.append(frame)

    def send_with_parts(self, frame: Plain, parts: list[memoryview]) -> None:
        """A frame that refers to raw `parts`; the parts are copied before this returns, unless the pipe is full."""
        self._end_turn()
        self._put([wire.encode(frame), *parts])

    def _end_turn(self) -> None:
        if self._turn and not self._closed:
            frames, self._turn = self._turn, []
            self._put([wire.encode_all(frames)])

    def _put(self, message: list[bytes | memoryview]) -> None:
        if self._backlog or not self._try(message):
            if len(self._backlog) >= MAX_BACKLOG:
                log.error("gave up on a peer that takes nothing: %d messages wait", len(self._backlog))
                self.close()
                return
            self._backlog.append([bytes(part) for part in message])

    def _try(self, message: list[bytes | memoryview]) -> bool:
        try:
            if len(message) == 1:
                self._socket.send(message[0], _NOBLOCK)
            else:
                self._socket.send_multipart(message, _NOBLOCK)
        except zmq.Again:
            return False
        self._sent()
        return True

    def _writable(self) -> None:
        while self._backlog and self._try(self._backlog[0]):
            self._backlog.popleft()

    def flush(self) -> None:
        """Hand what was sent in this turn to ZeroMQ now, before a close."""
        self._end_turn()


class Outbox(_Sender):
    """PUSH, connected to exactly one peer's inbox."""

    def __init__(self, context: Context, address: str) -> None:
        super().__init__(context, zmq.PUSH, address)
        self._socket.connect(address)

    def _sent(self) -> None:
        """Nothing comes in here, so no edge can be lost."""


class ControlClient(_Sender):
    """DEALER, connected to the scheduler; the routing identity is the incarnation."""

    def __init__(
        self,
        context: Context,
        address: str,
        incarnation: str,
        on_frame: Callable[[Plain], None],
    ) -> None:
        # A short linger lets `bye` and the last `closed` leave.
        super().__init__(context, zmq.DEALER, address, linger_ms=200)
        self._on_frame = on_frame
        self._socket.set(zmq.IDENTITY, incarnation.encode())
        self._socket.connect(address)

    def _readable(self) -> bool:
        for _ in range(BURST):
            try:
                parts = self._receive()
            except zmq.Again:
                return False
            try:
                frames = wire.decode(parts[0])
            except wire.ProtocolError as error:
                self.send(Error(code="bad_frame", message=str(error)))
                continue
            for frame in frames:
                self._on_frame(frame)
            if self._closed:
                return False
        return True


class ControlServer(_Driven):
    """ROUTER, bound: the scheduler's side of the control plane."""

    def __init__(
        self,
        context: Context,
        address: str,
        on_frame: Callable[[str, Plain], None],
        on_unreachable: Callable[[str], None],
    ) -> None:
        super().__init__(context, zmq.ROUTER, address, linger_ms=200)
        self._on_frame = on_frame
        self._on_unreachable = on_unreachable
        self._turn: dict[str, list[Plain]] = {}
        self._backlog: dict[str, deque[bytes]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._socket.bind(address)

    def _readable(self) -> bool:
        for _ in range(BURST):
            try:
                identity, *parts = self._receive()
            except zmq.Again:
                return False
            peer = bytes(identity).decode("latin-1")
            try:
                frames = wire.decode(parts[0] if parts else b"")
            except wire.ProtocolError as error:
                self.send(peer, Error(code="bad_frame", message=str(error)))
                continue
            for frame in frames:
                self._on_frame(peer, frame)
            if self._closed:
                return False
        return True

    def send(self, peer: str, frame: Plain) -> None:
        """Leaves at the end of this turn of the loop. A peer that is not there is reported to `on_unreachable`."""
        if not self._turn:
            self._loop.call_soon(self.flush)
        self._turn.setdefault(peer, []).append(frame)

    def flush(self) -> None:
        """Send what this turn has to say; what meets a full pipe waits, in order, and holds nobody else."""
        if self._closed:
            return
        turn, self._turn = self._turn, {}
        for peer, frames in turn.items():
            message = wire.encode_all(frames)
            backlog = self._backlog.get(peer)
            if backlog is not None:
                backlog.append(message)
            elif not self._try(peer, message):
                self._backlog[peer] = deque([message])
        if self._backlog and self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._flush_backlog)
        self._sent()

    def _flush_backlog(self) -> None:
        # A ROUTER is writable as soon as any of its pipes is, so its events do not tell when to try again.
        self._retry = None
        for peer, backlog in list(self._backlog.items()):
            while backlog and self._try(peer, backlog[0]):
                backlog.popleft()
            if len(backlog) > MAX_BACKLOG:
                log.error("gave up on %s, which takes nothing: %d messages wait", peer, len(backlog))
                self._on_unreachable(peer)
                backlog.clear()
            if not backlog:
                del self._backlog[peer]
        self.flush()

    def _try(self, peer: str, message: bytes) -> bool:
        """False when the peer's pipe is full."""
        try:
            self._socket.send_multipart([peer.encode("latin-1"), message], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # Told later, so that the receiver may send.
            self._loop.call_soon(self._on_unreachable, peer)
        return True

    def close(self) -> None:
        if self._retry:
            self._retry.cancel()
        super().close()
