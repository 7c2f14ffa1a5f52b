"""An engine in a test's hands: jobs, their input, and steps."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from omni_common.frames import CLIENT, Decision, Features, Text
from omni_common.params import Generation
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from unit.worker.omni.fake_decoder import LISTENER, PACER

NOBODY: frozenset[str] = frozenset()


def context(slots: int, model: str = "", models: str = "", **options: Any) -> LoadContext:
    return LoadContext(model, options, models, slots, 1, lambda *_: None, lambda: None)


class Driver:
    """An autoregressive engine with the fake decoder; keeps what comes out and checks what holds for all output."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.model = engine._model
        self.outputs: dict[str, list[Output]] = {}
        self.failures: dict[str, Failure] = {}
        #: By name: what may still come out.
        self._open: set[str] = set()
        self._sinks: dict[str, tuple[str, ...]] = {}

    def add(
        self, name: str, resume: Iterable[int] = (), *, heard: bool = False, paced: bool = False, **params: Any
    ) -> None:
        decided = tuple(Decision(at, at + 1, False, Text("", [token])) for at, token in enumerate(resume))
        sources = ("preprocessor", PACER) if paced else ("preprocessor",)
        sinks = (CLIENT, LISTENER) if heard else (CLIENT,)
        self.engine.add(Job(name, 1, Generation(**({"max_tokens": 4} | params)), sources, sinks, resume=decided))
        self._open.add(name)
        self._sinks[name] = sinks

    def give(self, name: str, ids: list[int]) -> None:
        arrays = {"ids": np.array(ids, np.int64)}
        self.engine.push(name, Piece("preprocessor", 0, 1, True, Features(), arrays))

    def pace(self, name: str, number: int) -> None:
        self.engine.push(name, Piece(PACER, number, number + 1, False, Text("")))

    def ask(self, name: str, ids: list[int], **params: Any) -> None:
        self.add(name, **params)
        self.give(name, ids)

    def cancel(self, name: str) -> None:
        self.engine.cancel(name)
        self._open.discard(name)

    def step(self, blocked: frozenset[str] = NOBODY) -> list[Output | Failure]:
        results: list[Output | Failure] = self.engine.step(blocked)
        for result in results:
            name = result.request_id
            assert name in self._open, f"{name} is over"
            assert isinstance(result, Failure) or name not in blocked, f"{name} is blocked"
            if isinstance(result, Failure):
                self.failures[name] = result
                self._open.discard(name)
                continue
            kept = self.outputs.setdefault(name, [])
            if result.sinks == (CLIENT,):
                # In order, without gaps.
                assert (result.start, result.end) == (len(self.said(name)), len(self.said(name)) + 1)
            kept.append(result)
            if sum(output.last for output in kept) == len(self._sinks[name]):
                self._open.discard(name)
        return results

    def run(self, blocked: frozenset[str] = NOBODY, most: int = 2000) -> None:
        """Until there is nothing to do."""
        steps = 0
        while self.engine.busy:
            self.step(blocked)
            steps += 1
            assert steps < most, "the engine is busy with nothing"

    def said(self, name: str) -> list[int]:
        outputs = [output for output in self.outputs.get(name, []) if output.sinks == (CLIENT,)]
        return [token for output in outputs for token in output.body.ids]  # type: ignore[union-attr]

    def finish(self, name: str) -> str:
        return next((o.body.finish for o in self.outputs[name] if o.last and o.sinks == (CLIENT,)), "")  # type: ignore[union-attr]

    def heard(self, name: str) -> list[float]:
        """What the listener got of the prompt."""
        return next(output.arrays["notes"].tolist() for output in self.outputs[name] if "notes" in output.arrays)

    @property
    def free(self) -> int:
        return sum(not slot.taken for slot in self.engine._slots)

    def assert_nothing_left(self) -> None:
        for name in list(self._open):
            self.cancel(name)
        assert not self.engine._sequences
        assert not self.engine.busy
        assert self.free == len(self.engine._slots)
