"""The consuming process of the bus in `hop`: a Node with one edge in, and one back for what is not in an arena.

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
from omni_common.tensors import INLINE_BYTES

REQUEST = "hop"
THERE, BACK = "producer>consumer", "consumer>producer"


def link(run: RunDir, edge: str, stage: str, incarnation: str) -> Link:
    return Link(edge, stage, incarnation, run.inbox(incarnation))


async def consume(run: RunDir, producer: str, me: str) -> None:
    answers = 0

    def on_piece(delivery: Delivery) -> None:
        nonlocal answers
        tensor = delivery.arrays["x"]
        # A chunk with a body is to be read.
        use(tensor, delivery.chunk.body is not None)
        node.used(REQUEST, THERE, delivery.nbytes)
        if tensor.nbytes <= INLINE_BYTES:
            # No release tells that it was used.
            node.emit(REQUEST, [BACK], answers, answers + 1, False, None, {})
            answers += 1

    node = Node(new_context(), run, me, 1 << 20, on_piece, lambda _: None, lambda _, why: sys.exit(why))
    await node.start()
    node.open(REQUEST, 1, [link(run, THERE, "producer", producer)], [link(run, BACK, "producer", producer)])
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(consume(RunDir(sys.argv[1]), sys.argv[2], sys.argv[3]))
