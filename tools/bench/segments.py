"""The other ways to hand a tensor to another process, from scratch: a segment each, inline bytes, and plain control.

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

    #: `segment`: open the file `name`; `inline`: the second part is the tensor; `control`: only answer.
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

    def inline(self, tensor: Floats, read: bool) -> None:
        """The bytes inside the message."""
        self._ask(Order("inline", read=read), tensor)

    def control(self, nbytes: int) -> None:
        """A round trip of a small message."""
        self._ask(Order("control", filler=bytes(nbytes)))

    def _ask(self, order: Order, *parts: Floats) -> None:
        self._socket.send_multipart([msgspec.msgpack.encode(order), *parts])
        self._socket.recv()

    def close(self) -> None:
        self._socket.close()


def consume(address: str) -> None:
    context = zmq.Context()
    peer = context.socket(zmq.PAIR)
    peer.connect(address)
    decoder = msgspec.msgpack.Decoder(Order)
    while True:
        order = decoder.decode(peer.recv())
        if order.way == "segment":
            descriptor = os.open(SHM / order.name, os.O_RDONLY | os.O_CLOEXEC)
            memory = mmap.mmap(descriptor, order.nbytes, prot=mmap.PROT_READ)
            os.close(descriptor)
            use(np.frombuffer(memory, np.float32), order.read)
            memory.close()
            (SHM / order.name).unlink()
        elif order.way == "inline":
            use(np.frombuffer(peer.recv(copy=False).buffer, np.float32), order.read)
        peer.send(b"")


if __name__ == "__main__":
    consume(sys.argv[1])
