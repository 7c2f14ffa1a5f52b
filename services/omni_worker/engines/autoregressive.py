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

from omni_common.errors import invalid
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece, failure
from omni_worker.engines.cuda_graphs import CudaGraphs, bucket
from omni_worker.engines.sequence import Model, Sequence, States, not_finite
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
    #: Keys of the positions that the cache holds, and of how many the memo is there too.
    held: list[int] = field(default_factory=list)
    noted: int = 0
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
        if self._prefill < 1:
            raise ValueError("options.prefill must be at least 1")
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

    def _fail(self, sequence: Sequence, error: BaseException | Failure, failures: list[Failure]) -> None:
        """This one cannot go on, and what it left in the cache is of no use. Raises where the device is lost: then
        nobody can."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        name = sequence.job.request_id
        failures.append(error if isinstance(error, Failure) else failure(name, error))
        del self._sequences[name]
        self._leave(sequence, keep=False)

    @torch.inference_mode()
    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        failures: list[Failure] = []
        able = {name: sequence for name, sequence in self._sequences.items() if name not in blocked}
        self._prepare_one(able, failures)
        # Without the one that has just failed.
        able = {name: sequence for name, sequence in able.items() if name in self._sequences}
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
        best.held, best.noted = [], min(best.noted, shared[best.number])
        return True

    def _shared(self, slot: _Slot, sequence: Sequence) -> int:
        """Positions from the start that the slot holds and the sequence needs, but for the last, which is computed."""
        if not self._prefix_cache or not sequence.keys:
            return 0
        most = min(len(slot.held), len(sequence.keys) - 1)
        if sequence.notes:
            most = min(most, slot.noted)
        same = next((at for at in range(most) if slot.held[at] != sequence.keys[at]), most)
        return same if same >= MIN_REUSE else 0

    def _leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        if sequence.slot < 0:
            return
        slot = self._slots[sequence.slot]
        slot.taken, sequence.slot = False, -1
        if keep:
            slot.held = sequence.keys[: sequence.length]
            slot.noted = sequence.length if sequence.notes else slot.noted
        else:
            self._cache.clear(slot.number)

    # ------------------------------------------------------------------------------------------------------ compute

    def _prepare_one(self, able: dict[str, Sequence], failures: list[Failure]) -> None:
        for sequence in able.values():
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
                    self._fail(sequence, error, failures)
                return

    def _prefill_piece(self, sequence: Sequence, failures: list[Failure]) -> None:
        start = sequence.length
        end = min(sequence.fed, (start // self._prefill + 1) * self._prefill)
        try:
            embeds, positions = sequence.take(end - start)
            self._cache.prefill(sequence.slot, start, end)
            positions = positions.expand(self._model.shape.axes, -1)[:, None].to(embeds.device)
            states = self._model.forward(embeds[None], positions, self._cache, sequence.extras(start, end))
            finite = bool(torch.isfinite(states.last).all())
        except Exception as error:
            self._fail(sequence, error, failures)
            return
        if self._computed(sequence, embeds, states, 0, finite, failures):
            self._decide([sequence], states.last[:, -1], failures)

    def _decode(self, sequences: list[Sequence], failures: list[Failure]) -> None:
        """One position each. Where that fails, one after another, to find who is to blame."""
        try:
            embeds, states, at = self._next_position(sequences)
            hidden = states.last[at, 0]
            finite = torch.isfinite(hidden).all(-1).tolist()
        except Exception as error:
            if len(sequences) == 1:
                self._fail(sequences[0], error, failures)
                return
            log.warning("a step of %d sequences failed: %s", len(sequences), error)
            for sequence in sequences:
                self._decode([sequence], failures)
            return
        good = [
            number
            for number, sequence in enumerate(sequences)
            if self._computed(sequence, embeds[number], states, at[number], finite[number], failures)
        ]
        if good:
            kept = hidden if len(good) == len(sequences) else hidden[good]
            self._decide([sequences[number] for number in good], kept, failures)

    def _next_position(self, sequences: list[Sequence]) -> tuple[list[Tensor], States, list[int]]:
        """The inputs, [1, hidden] each, and what came of them: for each sequence its row of the states.

        The batch is a range of slots that holds them all, so that the cache is read in place; slots in between are
        computed along.
        """
        slots = [sequence.slot for sequence in sequences]
        first, stop = min(slots), max(slots) + 1
        if self._graphs:
            first, stop = 0, bucket(stop, 1, len(self._slots))
        at = [slot - first for slot in slots]
        inputs = [sequence.take_one() for sequence in sequences]
        rows, lengths = [inputs[0]] * (stop - first), [self._cache.context] * (stop - first)
        for row, taken, sequence in zip(at, inputs, sequences, strict=True):
            rows[row], lengths[row] = taken, sequence.length
        embeds = torch.cat([embeds for embeds, _ in rows])[:, None]
        axes = self._model.shape.axes
        positions = torch.cat([places.expand(axes, -1) for _, places in rows], 1)[..., None]
        if self._graphs:
            longest = max(sequence.length for sequence in sequences)
            shape = stop, bucket(longest + 1, SHORTEST, self._cache.context)
            work = partial(self._fixed_step, *shape)
            states = self._graphs.run(shape, work, torch.tensor(lengths), embeds, positions)
        else:
            self._cache.decode(first, lengths)
            states = self._model.forward(embeds, positions.to(embeds.device), self._cache, {})
        return [embeds for embeds, _ in inputs], states, at

    def _fixed_step(self, rows: int, length: int, at: Tensor, embeds: Tensor, positions: Tensor) -> States:
        """One position each of the first `rows` slots, at `at`, reading no further than `length`."""
        self._cache.fixed(rows, length, at)
        return self._model.forward(embeds, positions, self._cache, {})

    def _computed(
        self, sequence: Sequence, embeds: Tensor, states: States, row: int, finite: bool, failures: list[Failure]
    ) -> bool:
        """The next positions of a sequence are in the cache; false when it cannot go on from there."""
        if not finite:
            self._fail(sequence, not_finite(sequence), failures)
            return False
        start = sequence.length
        sequence.length = start + len(embeds)
        try:
            sequence.computed(start, embeds, states, row, self._memo_of(sequence))
        except Exception as error:
            self._fail(sequence, error, failures)
            return False
        return True

    def _memo_of(self, sequence: Sequence) -> Tensor | None:
        return self._memo[sequence.slot] if self._memo is not None else None

    def _decide(self, sequences: list[Sequence], hidden: Tensor, failures: list[Failure]) -> None:
        """`hidden` [sequences, width] of their last positions. Where the model fails, one after another."""
        due = [row for row, sequence in enumerate(sequences) if not sequence.ready and sequence.deciding]
        if not due:
            return
        chosen = [sequences[row] for row in due]
        kept = hidden if len(due) == len(sequences) else hidden[due]
        try:
            failed = self._model.decide(chosen, kept)
        except Exception as error:
            if len(chosen) == 1:
                self._fail(chosen[0], error, failures)
                return
            log.warning("a decision of %d sequences failed: %s", len(chosen), error)
            for row, sequence in enumerate(chosen):
                self._decide([sequence], kept[row : row + 1], failures)
            return
        for one in failed:
            self._fail(self._sequences[one.request_id], one, failures)

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
        free = any(not slot.taken for slot in self._slots)
        self.busy = any(
            sequence.unprepared or sequence.outputs or (sequence.ready > 0 and (free or sequence.slot >= 0))
            for sequence in self._sequences.values()
        )
