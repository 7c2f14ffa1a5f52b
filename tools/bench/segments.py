"""The other ways to hand a tensor to another process, from scratch: a segment each, inline bytes, and the bare minimum.

Blocking ZeroMQ sockets carry the words: they wake sooner than an event loop does, so these sides have no handicap.
`python -m tools.bench.segments ADDRESS` is the consuming process.
"""

import mmap
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

Floats = np.ndarray[Any, np.dtype[np.float32]]

SHM = Path("/dev/shm")


class Order(msgspec.Struct):
    """What the consumer is to do with one message."""

    #: `segment`: open the file `name`, once; `warm`: it stays open; `inline`: the second part is the tensor; `control`:
    #: only answer.
    way: str
    name: str = ""
    nbytes: int = 0
    read: bool = False
    #: Makes a control message as long as a chunk's.
    filler: bytes = b""


def use(tensor: Floats, read: bool) -> None:
    """What a consumer does with a tensor, in every way that is compared: read each byte once, or nothing."""
    if read:
        tensor.max()


class Segments:
    """The producing side, with one peer process; each method returns when the peer has answered."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self._warm: Floats | None = None
        self._warm_name = f"omni-bench-{secrets.token_hex(8)}"

    def segment(self, tensor: Floats, read: bool) -> None:
        """A new segment, filled, named to the peer, who maps, reads and removes it."""
        name = f"omni-bench-{secrets.token_hex(8)}"
        descriptor = os.open(SHM / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, tensor.nbytes)
            memory = mmap.mmap(descriptor, tensor.nbytes)
        finally:
            os.close(descriptor)
        np.copyto(np.frombuffer(memory, np.float32), tensor)
        self._ask(Order("segment", name, tensor.nbytes, read))
        memory.close()

    def warm(self, tensor: Floats, read: bool, filler: int) -> None:
        """Copied into memory that both have mapped and used before; nothing else but the answer."""
        if self._warm is None or self._warm.nbytes != tensor.nbytes:
            self._forget_warm()
            descriptor = os.open(SHM / self._warm_name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.ftruncate(descriptor, tensor.nbytes)
            self._warm = np.frombuffer(mmap.mmap(descriptor, tensor.nbytes), np.float32)
            os.close(descriptor)
        np.copyto(self._warm, tensor)
        self._ask(Order("warm", self._warm_name, tensor.nbytes, read, bytes(filler)))

    def _forget_warm(self) -> None:
        self._warm = None
        (SHM / self._warm_name).unlink(missing_ok=True)

    def inline(self, tensor: Floats, read: bool) -> None:
        """The bytes inside the message."""
        self._ask(Order("inline", read=read), tensor)

    def control(self, nbytes: int) -> None:
        """A round trip of a small message."""
        self._ask(Order("control", filler=bytes(nbytes)))

    def _ask(self, order: Order, *parts: Floats) -> None:
        self._socket.send_multipart([msgspec.msgpack.encode(order), *(part.data for part in parts)])
        self._socket.recv()

    def close(self) -> None:
        self._forget_warm()
        self._socket.close()


def consume(address: str) -> None:
    context = zmq.Context()
    peer = context.socket(zmq.PAIR)
    peer.connect(address)
    decoder = msgspec.msgpack.Decoder(Order)
    warm = np.zeros(0, np.float32)
    while True:
        order = decoder.decode(peer.recv())
        if order.way == "warm":
            if warm.nbytes != order.nbytes:
                warm = np.frombuffer(_map(order), np.float32)
            use(warm, order.read)
        elif order.way == "segment":
            memory = _map(order)
            use(np.frombuffer(memory, np.float32), order.read)
            memory.close()
            (SHM / order.name).unlink()
        elif order.way == "inline":
            use(np.frombuffer(peer.recv(copy=False).buffer, np.float32), order.read)
        peer.send(b"")


def _map(order: Order) -> mmap.mmap:
    descriptor = os.open(SHM / order.name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, order.nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    consume(sys.argv[1])
