"""Work of fixed shapes as CUDA graphs: one launch instead of some thousand."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class CudaGraphs:
    """Records a piece of work when its key first comes, and replays it from then on.

    Work gets tensors on the device and returns tensors (or a structure of them) that the next run of the same key
    overwrites. It must not wait for the host. Recording runs it once more, so it must give the same when repeated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Hashable, tuple[Any, list[Tensor], Any]] = {}

    def run(self, key: Hashable, work: Callable[..., Any], *inputs: Tensor) -> Any:
        """`work(*inputs)`. Equal keys mean equal work on equal shapes."""
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(work, inputs)
        graph, held, outputs = recorded
        for mine, given in zip(held, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        graph.replay()
        return outputs

    def _record(self, work: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Any, list[Tensor], Any]:
        held = [given.to(self._device, copy=True) for given in inputs]
        # Once as it is, so that libraries choose their kernels and take their memory outside the recording.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work(*held)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = work(*held)
        return graph, held, outputs


def bucket(count: int, least: int, most: int) -> int:
    """The smallest `least` x 2^n that holds `count`, but not more than `most`."""
    size = least
    while size < count:
        size *= 2
    return min(size, most)
