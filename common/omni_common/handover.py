"""Handing an arena over: its descriptor goes to each consumer once, over a Unix socket that then stays open.

The consumer sends its incarnation and a newline. The owner answers `<bytes of the arena> <its incarnation>` and a
newline, with the descriptor beside it (SCM_RIGHTS). Nothing more is sent. A consumer keeps the socket open for as long
as it has the arena mapped, so its end, however the consumer ended, proves that nobody reads there any more.

Raw sockets with the loop's readers: of what asyncio and uvloop have in common, only these carry descriptors.
"""

import asyncio
import contextlib
import errno
import logging
import mmap
import os
import re
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from omni_common.arena import Arena
from omni_common.errors import OmniError
from omni_common.frames import ArenaTensor
from omni_common.ids import is_incarnation
from omni_common.tensors import MappedArena

log = logging.getLogger(__name__)

#: Connections that have not said who they are; of more, the oldest is closed.
MAX_STRANGERS = 64
#: Longest wait for an owner's answer. A stopped owner does not answer, and its arena then counts as gone.
HANDOVER_S = 5.0
#: Pause when the process has no descriptor left for a new connection.
FULL_S = 0.1
_HELLO = re.compile(rb"([0-9a-f]{16})\n")
_ANSWER = re.compile(rb"([0-9]{1,15}) ([0-9a-f]{16})\n")


class _Peer:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.hello = b""
        #: Empty as long as it is a stranger.
        self.incarnation = ""


class DescriptorServer:
    """The owner's side. `on_gone(incarnation)` is called on the loop when a consumer has no mapping any more."""

    def __init__(self, path: Path, arena: Arena, on_gone: Callable[[str], None]) -> None:
        self._path = path
        self._arena = arena
        self._on_gone = on_gone
        #: In the order in which they came.
        self._strangers: dict[_Peer, None] = {}
        #: A consumer may connect again before the end of its former socket is seen.
        self._consumers: dict[str, set[_Peer]] = {}
        self._listener: socket.socket | None = None

    async def start(self) -> None:
        """Listen at `path`, mode 0660. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        listener = _unix_socket()
        try:
            listener.bind(os.fspath(self._path))
            self._path.chmod(0o660)
            listener.listen(socket.SOMAXCONN)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    def is_connected(self, incarnation: str) -> bool:
        """Whether this consumer may have the arena mapped."""
        return incarnation in self._consumers

    async def close(self) -> None:
        """Let go of everybody without calling them gone. Idempotent."""
        if self._listener is None:
            return
        for peer in [*self._strangers, *(peer for peers in self._consumers.values() for peer in peers)]:
            self._hang_up(peer)
        self._strangers.clear()
        self._consumers.clear()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The connection stays in the queue, and would wake the loop without end.
                log.error("no descriptor left for a consumer of the arena")
                self._loop.remove_reader(self._listener)
                self._loop.call_later(FULL_S, self._resume)
            return
        sock.setblocking(False)
        peer = _Peer(sock)
        self._strangers[peer] = None
        self._loop.add_reader(sock, self._read, peer)
        self._read(peer)
        if len(self._strangers) > MAX_STRANGERS:
            self._end(next(iter(self._strangers)))

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(peer)
        elif not peer.incarnation:
            self._greet(peer, data)
        # What a consumer says later means nothing; only the end of the socket does.

    def _greet(self, peer: _Peer, data: bytes) -> None:
        peer.hello += data
        match = _HELLO.fullmatch(peer.hello)
        if match is None:
            if b"\n" in peer.hello or len(peer.hello) > 16:
                log.warning("closed a connection that did not say who it is")
                self._end(peer)
            return
        answer = f"{self._arena.size} {self._arena.incarnation}\n".encode()
        try:
            socket.send_fds(peer.sock, [answer], [self._arena.descriptor])
        except OSError:
            self._end(peer)
            return
        del self._strangers[peer]
        peer.incarnation = match[1].decode()
        self._consumers.setdefault(peer.incarnation, set()).add(peer)

    def _hang_up(self, peer: _Peer) -> None:
        self._loop.remove_reader(peer.sock)
        peer.sock.close()

    def _end(self, peer: _Peer) -> None:
        self._hang_up(peer)
        self._strangers.pop(peer, None)
        peers = self._consumers.get(peer.incarnation)
        if peers is not None:
            peers.discard(peer)
            if not peers:
                del self._consumers[peer.incarnation]
                self._on_gone(peer.incarnation)


class DescriptorClient:
    """A consumer's side: maps each owner's arena once."""

    def __init__(self, run_dir: Path, incarnation: str) -> None:
        self._run_dir = run_dir
        self._incarnation = incarnation
        self._arenas: dict[str, MappedArena] = {}
        #: Lives as long as somebody waits for that arena; `drop` removes it earlier.
        self._connecting: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def is_mapped(self, owner: str) -> bool:
        return owner in self._arenas

    async def arena_of(self, owner: str) -> MappedArena:
        """The arena of the incarnation `owner`. Raises OmniError `arena_gone` when it does not hand it out (any more).

        It stays mapped after its owner's death, until `drop`.
        """
        if owner in self._arenas:
            return self._arenas[owner]
        turn = self._connecting.setdefault(owner, asyncio.Lock())
        async with turn:
            if owner in self._arenas:
                return self._arenas[owner]
            arena = await self._connect(owner)
            if self._connecting.get(owner) is not turn:
                arena.close()
                raise _gone(owner, "it was dropped")
            self._arenas[owner] = arena
            return arena

    def view(self, ref: ArenaTensor, on_release: Callable[[int, int], None]) -> np.ndarray[Any, Any]:
        """`MappedArena.view` in an arena that `arena_of` has mapped, else OmniError `arena_gone`."""
        arena = self._arenas.get(ref.arena)
        if arena is None:
            raise _gone(ref.arena, "it is not mapped")
        return arena.view(ref, on_release)

    def drop(self, owner: str) -> None:
        """Unmap an arena and close its socket: now, or when the last view is gone. Idempotent."""
        self._connecting.pop(owner, None)
        arena = self._arenas.pop(owner, None)
        if arena is not None:
            arena.close()

    def close(self) -> None:
        """Drop all."""
        self._connecting.clear()
        for owner in list(self._arenas):
            self.drop(owner)

    async def _connect(self, owner: str) -> MappedArena:
        if not is_incarnation(owner):
            raise _gone(owner, "that is no incarnation")
        sock = _unix_socket()
        try:
            async with asyncio.timeout(HANDOVER_S):
                await _dial(sock, os.fspath(self._run_dir / f"{owner}.fd"))
                sock.send(f"{self._incarnation}\n".encode())
                await _readable(sock)
            memory = _receive(sock, owner)
            # Called after the unmapping: when the socket ends, nobody here can read any more.
            weakref.finalize(memory, os.close, sock.detach()).atexit = False
        except TimeoutError:
            raise _gone(owner, "it does not answer") from None
        except OSError as error:
            raise _gone(owner, error.strerror or str(error)) from None
        finally:
            sock.close()
        return MappedArena(owner, memory)


def _unix_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


async def _dial(sock: socket.socket, path: str) -> None:
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            # A Unix socket connects at once or not at all: the owner has a full queue of connections.
            await asyncio.sleep(0.01)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def _receive(sock: socket.socket, owner: str) -> mmap.mmap:
    """Map the descriptor in the owner's answer, which is there. Raises OSError, or OmniError for a wrong answer."""
    answer, descriptors, _, _ = socket.recv_fds(sock, 64, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        match = _ANSWER.fullmatch(answer)
        if match is None or not descriptors or match[2].decode() != owner:
            raise _gone(owner, "it closed the connection" if not answer else "it answered with something else")
        size = int(match[1])
        if os.fstat(descriptors[0]).st_size != size:
            raise _gone(owner, "its arena has another size than it says")
        return mmap.mmap(descriptors[0], size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), mmap.PROT_READ)


def _gone(owner: str, why: str) -> OmniError:
    return OmniError(f"the arena of {owner} cannot be had: {why}", code="arena_gone")
