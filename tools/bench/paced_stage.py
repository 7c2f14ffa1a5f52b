"""A stage that writes one token every `GAP_S` and stamps it: the worker as it is, with an engine of the benchmark.

`python -m tools.bench.paced_stage --stage NAME ...`, arguments as of `omni-worker`.
"""

import argparse
import time
from collections.abc import Set

from omni_common.frames import Text
from omni_common.params import Sampling
from omni_common.service import Common, Stop, run_service
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.main import find_stage
from omni_worker.shell import Worker

#: What a token of a small model takes; all others sleep meanwhile, as they do then.
GAP_S = 0.003


class Pacer:
    """`max_tokens` tokens, one a step, each the time at which it left the engine (`time.monotonic_ns`)."""

    in_flight = False
    resumes = False
    rebuilds = False

    def __init__(self) -> None:
        self.busy = False
        self._written: dict[str, int] = {}
        self._wanted: dict[str, int] = {}

    def load(self, context: LoadContext) -> None:
        pass

    def add(self, job: Job) -> None:
        assert isinstance(job.params, Sampling)
        self._wanted[job.request_id] = job.params.max_tokens

    def push(self, request_id: str, piece: Piece) -> None:
        self._written[request_id] = 0
        self.busy = True

    def cancel(self, request_id: str) -> None:
        self._written.pop(request_id, None)
        self._wanted.pop(request_id, None)
        self.busy = bool(self._written)

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        able = [request_id for request_id in self._written if request_id not in blocked]
        if able:
            time.sleep(GAP_S)
        return [self._write(request_id) for request_id in able]

    def close(self) -> None:
        self._written.clear()

    def _write(self, request_id: str) -> Output:
        start = self._written[request_id]
        self._written[request_id] = end = start + 1
        last = end >= self._wanted[request_id]
        if last:
            self.cancel(request_id)
        return Output(request_id, start, end, last, Text(str(time.monotonic_ns()), [start]))


async def serve(arguments: argparse.Namespace, common: Common, stop: Stop) -> None:
    stage = find_stage(common, arguments.stage)
    await Worker(common.run, arguments.stage, arguments.stage, stage, Pacer(), "", stop).serve()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--stage", required=True)
    raise SystemExit(run_service(options, serve))
