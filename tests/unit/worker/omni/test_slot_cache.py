"""The cache of slots and the attention over it, against attention that is written out."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omni_worker.engines.slot_cache import SlotCache, attend

HEADS, GROUPS, WIDTH, CONTEXT = 2, 3, 8, 12
QUERIES = HEADS * GROUPS


def cache_of(slots: int = 4, layers: int = 2, fill: float = 0.0) -> SlotCache:
    cache = SlotCache(
        layers=layers,
        slots=slots,
        context=CONTEXT,
        heads=HEADS,
        head_dim=WIDTH,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    for tensor in (*cache._keys, *cache._values):
        tensor.fill_(fill)
    return cache


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written_out(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last positions of a sequence: query [n, QUERIES, WIDTH], keys and values [length, HEADS, WIDTH]."""
    count, length = len(query), len(keys)
    output = torch.zeros(count, QUERIES, WIDTH, dtype=torch.float64)
    for position in range(count):
        seen = length - count + position + 1
        for head in range(QUERIES):
            of = head // GROUPS
            scores = keys[:seen, of] @ query[position, head] / math.sqrt(WIDTH)
            output[position, head] = scores.softmax(0) @ values[:seen, of]
    return output


class Row:
    """A sequence, and what its positions are."""

    def __init__(self, number: int) -> None:
        self.keys, self.values = drawn(number, CONTEXT, HEADS, WIDTH), drawn(number + 100, CONTEXT, HEADS, WIDTH)
        self.queries = drawn(number + 200, CONTEXT, QUERIES, WIDTH)
        self.length = 0


def compute(cache: SlotCache, rows: list[Row], count: int, layer: int = 1) -> Tensor:
    """What an attention module does: [rows, count, QUERIES, WIDTH] of the next positions of `rows`."""

    def of(tensors: list[Tensor]) -> Tensor:
        return torch.stack([tensor[r.length : r.length + count] for r, tensor in zip(rows, tensors, strict=True)])

    keys, values = (of([getattr(row, name) for row in rows]).transpose(1, 2) for name in ("keys", "values"))
    held_keys, held_values = cache.update(keys, values, layer)
    query = of([row.queries for row in rows]).transpose(1, 2)
    output, _ = attend(torch.nn.Module(), query, held_keys, held_values, None, slots=cache)
    return output


def assert_right(output: Tensor, row: Row, count: int) -> None:
    end = row.length + count
    expected = written_out(row.queries[row.length : end], row.keys[:end], row.values[:end])
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, CONTEXT - 1), min_size=1, max_size=4),
    pieces=st.integers(1, 5),
    idle=st.sets(st.integers(0, 3), max_size=2),
    garbage=st.sampled_from([0.0, 1e6]),
    fixed=st.booleans(),
)
def test_rows_of_any_lengths_are_each_their_own(lengths: Any, pieces: Any, idle: Any, garbage: Any, fixed: Any) -> None:
    cache, rows = cache_of(fill=garbage), [Row(number) for number in range(len(lengths))]
    for slot, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        while row.length < length:
            count = min(pieces, length - row.length)
            cache.prefill(slot, row.length, row.length + count)
            assert_right(compute(cache, [row], count)[0], row, count)
            row.length += count
    active = [slot for slot in range(len(rows)) if slot not in idle]
    if not active:
        return
    if fixed:
        at = [rows[slot].length if slot in active else CONTEXT for slot in range(len(rows))]
        cache.fixed(len(rows), CONTEXT, torch.tensor(at))
        first, last = 0, len(rows) - 1
    else:
        first, last = active[0], active[-1]
        cache.decode(first, [rows[s].length if s in active else CONTEXT for s in range(first, last + 1)])
    output = compute(cache, rows[first : last + 1], 1)
    for slot in active:
        assert_right(output[slot - first], rows[slot], 1)
        rows[slot].length += 1
    # Those that only were between are as they were.
    for slot in range(len(rows)):
        row = rows[slot]
        assert torch.equal(cache._keys[1][slot, :, : row.length], row.keys[: row.length].transpose(0, 1))
        assert torch.equal(cache._values[1][slot, :, : row.length], row.values[: row.length].transpose(0, 1))
        if slot in active:
            continue
        if row.length < CONTEXT:
            cache.decode(slot, [row.length])
            assert_right(compute(cache, [row], 1)[0], row, 1)


def test_the_last_position_of_a_context() -> None:
    cache, row = cache_of(slots=1), Row(1)
    cache.prefill(0, 0, CONTEXT - 1)
    assert_right(compute(cache, [row], CONTEXT - 1)[0], row, CONTEXT - 1)
    row.length = CONTEXT - 1
    cache.decode(0, [CONTEXT - 1])
    assert_right(compute(cache, [row], 1)[0], row, 1)


def test_layers_are_apart() -> None:
    cache, row, other = cache_of(slots=1), Row(1), Row(2)
    cache.prefill(0, 0, 5)
    compute(cache, [row], 5, layer=0)
    compute(cache, [other], 5, layer=1)
    cache.decode(0, [5])
    row.length = other.length = 5
    for layer, held in enumerate((row, other)):
        output = compute(cache, [held], 1, layer=layer)
        assert_right(output[0], held, 1)


def test_a_cleared_row_holds_no_numbers_that_are_none() -> None:
    cache, row, short = cache_of(slots=2, fill=math.nan), Row(1), Row(2)
    for slot in (0, 1):
        cache.clear(slot)
    cache.prefill(0, 0, 9)
    compute(cache, [row], 9)
    cache.prefill(1, 0, 2)
    compute(cache, [short], 2)
    row.length, short.length = 9, 2
    cache.decode(0, [9, 2])
    output = compute(cache, [row, short], 1)
    assert_right(output[0], row, 1)
    assert_right(output[1], short, 1)


def test_memory_is_taken_at_once_and_all_of_it() -> None:
    cache = cache_of(slots=3, layers=4)
    assert cache.nbytes == 2 * 4 * 3 * (CONTEXT + 1) * HEADS * WIDTH * 8


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_groups_of_heads_read_the_same_keys(heads: Any) -> None:
    """One head of keys for all, for some, and for each."""
    query, keys = drawn(1, 2, 6, 1, WIDTH), drawn(2, 2, heads, 5, WIDTH)
    cache = cache_of()
    cache.decode(0, [4, 2])
    output, _ = attend(torch.nn.Module(), query, keys, keys, None, scaling=0.3, slots=cache)
    for row, seen in ((0, 5), (1, 3)):
        for head in range(6):
            of = keys[row, head // (6 // heads), :seen]
            expected = (of @ query[row, head, 0] * 0.3).softmax(0) @ of
            torch.testing.assert_close(output[row, 0, head], expected)
