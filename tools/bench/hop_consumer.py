"""The consuming process of the bus in `hop`: a Node with one edge in, and one back, which says that a tensor was read.

Requests are numbered from 0; each is opened when the one before has ended.

`python -m tools.bench.hop_consumer RUN_DIR PRODUCER ME`
"""

import asyncio
import sys

import uvloop
from tools.bench.segments import use

from omni_common.frames import Link
from omni_common.node import Delivery, Node
from omni_common.run_dir import RunDir
from omni_common.sockets import new_context

THERE, BACK = "producer>consumer", "consumer>producer"


def link(run: RunDir, edge: str, stage: str, incarnation: str) -> Link:
    return Link(edge, stage, incarnation, run.inbox(incarnation))


async def consume(run: RunDir, producer: str, me: str) -> None:
    def on_piece(delivery: Delivery) -> None:
        chunk = delivery.chunk
        # A chunk with a body is to be read.
        use(delivery.arrays["x"], chunk.body is not None)
        node.used(chunk.request_id, THERE, delivery.nbytes)
        node.emit(chunk.request_id, [BACK], chunk.start, chunk.end, chunk.last, None, {})
        if chunk.last:
            node.close_request(chunk.request_id)
            open_request(int(chunk.request_id) + 1)

    def open_request(number: int) -> None:
        node.open(str(number), 1, [link(run, THERE, "producer", producer)], [link(run, BACK, "producer", producer)])

    node = Node(new_context(), run, me, 1 << 20, on_piece, lambda _: None, lambda _, why: sys.exit(why))
    await node.start()
    open_request(0)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(consume(RunDir(sys.argv[1]), sys.argv[2], sys.argv[3]))
