"""The load of `stream`: many event streams at a time, read by one thread on raw sockets; only the standard library.

`python -m tools.bench.sse_client PORT STREAMS PATH BODY` prints a line of JSON: events, bytes, elapsed and CPU seconds.
"""

import json
import selectors
import socket
import sys
import time

EVENT = b"data:"
#: Of the last event and of the chunked body.
END = b"\n\n\r\n0\r\n\r\n"
BUFFER = bytearray(1 << 18)


class Reader:
    def __init__(self, port: int, request: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.sendall(request)
        self.sock.setblocking(False)
        self.events = 0
        self.nbytes = 0
        #: The end of what was read: a mark may come in two pieces.
        self._tail = b""

    def read(self) -> bool:
        """Take what is there; false at the end of the stream. Raises RuntimeError when it is not one."""
        size = self.sock.recv_into(BUFFER)
        if not size:
            raise RuntimeError(f"the server hung up after {self.events} events")
        if not self.nbytes and not BUFFER.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(BUFFER[:size].decode(errors="replace"))
        self.nbytes += size
        data = self._tail + BUFFER[:size]
        self.events += data.count(EVENT) - self._tail.count(EVENT)
        self._tail = data[-len(END) :]
        return not data.endswith(END)


def load(port: int, streams: int, path: str, body: str) -> dict[str, float]:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with selectors.DefaultSelector() as selector:
        began, cpu = time.perf_counter(), time.process_time()
        readers = [Reader(port, (head + body).encode()) for _ in range(streams)]
        for reader in readers:
            selector.register(reader.sock, selectors.EVENT_READ, reader)
        left = streams
        while left:
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.data.sock)
                    left -= 1
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    for reader in readers:
        reader.sock.close()
    return {
        "events": sum(reader.events for reader in readers),
        "bytes": sum(reader.nbytes for reader in readers),
        "elapsed_s": elapsed,
        "cpu_s": cpu,
    }


if __name__ == "__main__":
    print(json.dumps(load(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])))
