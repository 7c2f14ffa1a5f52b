"""The `transformers` engine: continuous batching over the decoder modules of transformers.

Sequences join and leave between steps. A step runs at most one piece of one prompt (pieces end at multiples of
`prefill` positions) and then one position of every sequence that has its next input. What a model computes stands in a
module of `omni_worker.models` (the port below); this engine owns the slots of the cache, the batch and the turns.

Options: `part` (module of `omni_worker.models`), `context` (positions a slot, default 4096), `prefill` (512),
`prefix_cache` (true), `device` (cpu), `dtype` (float32).
"""

import importlib
import logging
from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from omni_common.errors import OmniError, invalid
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.cuda_graphs import CudaGraphs, bucket
from omni_worker.engines.sequence import Model, Sequence, States
from omni_worker.engines.slot_cache import SlotCache

log = logging.getLogger(__name__)

#: A held prefix shorter than this is not worth the slot of another.
MIN_REUSE = 16
#: Fewest positions that a recorded step reads; further ones double.
SHORTEST = 256


@dataclass(slots=True)
class _Slot:
    number: int
    taken: bool = False
    #: Keys of the positions that the cache holds.
    held: list[int] = field(default_factory=list)
    used: int = 0


class Autoregressive:
    """See the module's docstring, and `omni_worker.engine.Engine` for the contract."""

    in_flight = False
    resumes = True
    rebuilds = True

    def __init__(self) -> None:
        self.busy = False
        self._sequences: dict[str, Sequence] = {}

    def load(self, context: LoadContext) -> None:
        options = context.options
        part = str(options.get("part", ""))
        if not part.isidentifier():
            raise ValueError(f"options.part {part!r} is not a module of omni_worker.models")
        torch.set_num_threads(context.threads)
        torch.set_grad_enabled(False)
        self._prefill = int(options.get("prefill", 512))
        self._prefix_cache = bool(options.get("prefix_cache", True))
        self.hits = 0
        model: Model = importlib.import_module(f"omni_worker.models.{part}").Model()
        context.progress("weights", 0.1)
        model.load(Path(context.models) / context.model, context)
        self._model = model
        context.progress("cache", 0.9)
        shape, length = model.shape, int(options.get("context", 4096))
        self._cache = SlotCache(
            layers=shape.layers,
            slots=context.slots,
            context=length,
            heads=shape.heads,
            head_dim=shape.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        graphs = model.device.type == "cuda" and bool(options.get("graphs", True))
        self._graphs = CudaGraphs(model.device) if graphs else None
        self._memo: Tensor | None = None
        if shape.memo:
            self._memo = torch.zeros(context.slots, length, shape.memo, dtype=model.dtype, device=model.device)
        self._slots = [_Slot(number) for number in range(context.slots)]
        if self._graphs:
            self._record(self._graphs)
        self._uses = 0
        taken = self._cache.nbytes + (self._memo.nbytes if self._memo is not None else 0)
        log.info("%d slots of %d positions take %.1f MiB", context.slots, length, taken / 2**20)

    @torch.inference_mode()
    def _record(self, graphs: CudaGraphs) -> None:
        """The steps of short sequences, so that no request waits for their recording."""
        rows, shape, dtype = 1, self._model.shape, self._model.dtype
        while True:
            embeds = torch.zeros(rows, 1, shape.hidden, dtype=dtype)
            nothing = torch.zeros(shape.axes, rows, 1, dtype=torch.long)
            length = min(SHORTEST, self._cache.context)
            work = partial(self._fixed_step, rows, length)
            graphs.run((rows, length), work, nothing[0, :, 0], embeds, nothing)
            if rows == len(self._slots):
                return
            rows = min(2 * rows, len(self._slots))

    def add(self, job: Job) -> None:
        self._sequences[job.request_id] = self._model.open(job)
        self._look()

    def push(self, request_id: str, piece: Piece) -> None:
        self._sequences[request_id].push(piece)
        self._look()

    def cancel(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._leave(sequence)
        self._look()

    @torch.inference_mode()
    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        failures: list[Failure] = []
        able = {name: sequence for name, sequence in self._sequences.items() if name not in blocked}
        self._prepare_one(able, failures)
        placed = [sequence for sequence in able.values() if sequence.ready > 0 and self._place(sequence)]
        prompt = next((sequence for sequence in placed if sequence.ready > 1), None)
        if prompt is not None:
            self._prefill_piece(prompt, failures)
        rows = [sequence for sequence in placed if sequence is not prompt and sequence.ready == 1]
        if rows:
            self._decode(rows, failures)
        results: list[Output | Failure] = list(failures)
        for name, sequence in able.items():
            if name in self._sequences:
                results += self._collect(sequence)
        self._look()
        return results

    def close(self) -> None:
        self._sequences.clear()
        self.busy = False

    # ------------------------------------------------------------------------------------------------------- slots

    def _place(self, sequence: Sequence) -> bool:
        """Give the sequence a slot if it has none; false while none is free."""
        if sequence.slot >= 0:
            return True
        free = [slot for slot in self._slots if not slot.taken]
        if not free:
            return False
        shared = {slot.number: self._shared(slot, sequence) for slot in free}
        if self._graphs:
            # A step computes every slot up to the last that is in use.
            best = max(free, key=lambda slot: (shared[slot.number], -slot.number))
        else:
            best = max(free, key=lambda slot: (shared[slot.number], not slot.held, -slot.used))
        self._uses += 1
        best.taken, best.used = True, self._uses
        sequence.slot = best.number
        if shared[best.number]:
            self.hits += 1
            sequence.reuse(shared[best.number])
        best.held = []
        return True

    def _shared(self, slot: _Slot, sequence: Sequence) -> int:
        """Positions from the start that the slot holds and the sequence needs, but for the last, which is computed."""
        if not self._prefix_cache or not sequence.keys:
            return 0
        most = min(len(slot.held), len(sequence.keys) - 1)
        same = next((at for at in range(most) if slot.held[at] != sequence.keys[at]), most)
        return same if same >= MIN_REUSE else 0

    def _leave(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            slot = self._slots[sequence.slot]
            slot.taken, slot.held = False, sequence.keys[: sequence.length]
            sequence.slot = -1

    # ------------------------------------------------------------------------------------------------------ compute

    def _prepare_one(self, able: dict[str, Sequence], failures: list[Failure]) -> None:
        for name, sequence in able.items():
            if sequence.unprepared:
                try:
                    sequence.prepare()
                    if sequence.fed > self._cache.context:
                        raise invalid(
                            f"The prompt takes {sequence.fed} positions, and the context has {self._cache.context}.",
                            "messages",
                            code="context_length_exceeded",
                        )
                except Exception as error:
                    failures.append(failure(name, error))
                    self.cancel(name)
                return

    def _prefill_piece(self, sequence: Sequence, failures: list[Failure]) -> None:
        start = sequence.length
        end = min(sequence.fed, (start // self._prefill + 1) * self._prefill)
        embeds, positions = sequence.take(end - start)
        self._cache.prefill(sequence.slot, start, end)
        positions = positions.expand(self._model.shape.axes, -1)[:, None].to(embeds.device)
        states = self._model.forward(embeds[None], positions, self._cache, sequence.extras(start, end))
        sequence.length = end
        sequence.computed(start, embeds, states, 0, self._memo_of(sequence))
        self._decide([sequence], states.last[:, -1], failures)

    def _decode(self, sequences: list[Sequence], failures: list[Failure]) -> None:
        """One position each. The batch is a range of slots that holds them all, so that the cache is read in place;
        slots in between are computed along and write behind what they hold."""
        by_slot = {sequence.slot: sequence for sequence in sequences}
        first, stop = min(by_slot), max(by_slot) + 1
        if self._graphs:
            first, stop = 0, bucket(stop, 1, len(self._slots))
        inputs = {slot: sequence.take_one() for slot, sequence in by_slot.items()}
        filler = next(iter(inputs.values()))
        taken = [inputs.get(slot, filler) for slot in range(first, stop)]
        lengths = [self._length(slot, by_slot) for slot in range(first, stop)]
        embeds = torch.cat([embeds for embeds, _ in taken])[:, None]
        axes = self._model.shape.axes
        positions = torch.cat([places.expand(axes, -1) for _, places in taken], 1)[..., None]
        if self._graphs:
            longest = max(sequence.length for sequence in sequences)
            shape = stop, bucket(longest + 1, SHORTEST, self._cache.context)
            work = partial(self._fixed_step, *shape)
            states = self._graphs.run(shape, work, torch.tensor(lengths), embeds, positions)
        else:
            self._cache.decode(first, lengths)
            states = self._model.forward(embeds, positions.to(embeds.device), self._cache, {})
        for slot, sequence in by_slot.items():
            sequence.length += 1
            sequence.computed(sequence.length - 1, inputs[slot][0], states, slot - first, self._memo_of(sequence))
        at = torch.tensor([sequence.slot - first for sequence in sequences], device=embeds.device)
        self._decide(sequences, states.last[at, 0], failures)

    def _fixed_step(self, rows: int, length: int, at: Tensor, embeds: Tensor, positions: Tensor) -> States:
        """One position each of the first `rows` slots, at `at`, reading no further than `length`."""
        self._cache.fixed(rows, length, at)
        return self._model.forward(embeds, positions, self._cache, {})

    def _length(self, slot: int, by_slot: dict[int, Sequence]) -> int:
        """Where the row of a slot writes: its next position, and for one that only holds a prefix behind that."""
        if slot in by_slot:
            return by_slot[slot].length
        running = next((s for s in self._sequences.values() if s.slot == slot), None)
        return running.length if running else len(self._slots[slot].held)

    def _memo_of(self, sequence: Sequence) -> Tensor | None:
        return self._memo[sequence.slot] if self._memo is not None else None

    def _decide(self, sequences: list[Sequence], hidden: Tensor, failures: list[Failure]) -> None:
        """`hidden` [sequences, width] of their last positions."""
        due = [row for row, sequence in enumerate(sequences) if not sequence.ready and sequence.deciding]
        if not due:
            return
        chosen = [sequences[row] for row in due]
        bad = (~torch.isfinite(hidden[due]).all(-1)).tolist()
        for row, sequence in enumerate(chosen):
            if bad[row]:
                name = sequence.job.request_id
                failures.append(Failure(name, "the model's hidden states are not finite", "numerical_error"))
                self.cancel(name)
        good = [row for row, wrong in enumerate(bad) if not wrong]
        if not good:
            return
        kept = hidden[due] if len(good) == len(due) else hidden[due][good]
        for failed in self._model.decide([chosen[row] for row in good], kept):
            failures.append(failed)
            self.cancel(failed.request_id)

    def _collect(self, sequence: Sequence) -> list[Output]:
        outputs = list(sequence.outputs)
        sequence.outputs.clear()
        for output in outputs:
            if output.last:
                sequence.ended.update(sequence.job.sinks if output.sinks is None else output.sinks)
        if sequence.ended.issuperset(sequence.job.sinks):
            del self._sequences[sequence.job.request_id]
            self._leave(sequence)
        return outputs

    def _look(self) -> None:
        self.busy = any(s.unprepared or s.ready > 0 or s.outputs for s in self._sequences.values())


def failure(request_id: str, error: BaseException) -> Failure:
    """An error of one job as its failure."""
    if isinstance(error, OmniError):
        return Failure(request_id, error.message, error.code, error.status, error.param)
    log.exception("request %s failed", request_id, exc_info=error)
    return Failure(request_id, f"{type(error).__name__}: {error}")
