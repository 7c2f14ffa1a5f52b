"""A preallocated key-value cache with one row a slot, and the attention over it, for transformers' decoder modules.

A module gets the cache as `past_key_values` and calls its `update`; it attends by `attend`, under the name ATTENTION.
Where a forward writes, what it reads and which mask holds is set before it by `prefill` or `decode`, so nothing depends
on state that modules keep.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

#: Put into a text config as `_attn_implementation`: then transformers makes no masks of its own.
ATTENTION = "omni_slots"


class SlotCache:
    """Keys and values of `slots` sequences of up to `context` positions.

    Memory: 2 x layers x slots x (context + 1) x heads x head_dim elements, taken at once. The position after the last,
    `context`, is where rows of a decode batch write that take no part in it; nobody reads it.

    Attention reads positions behind a row's own and weighs them with 0, so all that is held must be finite: what is not
    is to be cleared.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        context: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots, heads, context + 1, head_dim)
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._device = device
        self.context = context
        self.mask: Tensor | None = None
        self._rows = slice(0, 0)
        self._length = 0
        self._at: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def clear(self, row: int) -> None:
        for tensor in (*self._keys, *self._values):
            tensor[row].zero_()

    def prefill(self, row: int, start: int, end: int) -> None:
        """The next forward is of one sequence, [1, end - start]: positions [start, end) of `row`."""
        self._rows, self._length = slice(row, row + 1), end
        self._at = (self._rows, slice(None), slice(start, end))
        self.mask = None
        if start and end - start > 1:
            reach = torch.arange(end, device=self._device)[None, :]
            self.mask = (reach <= torch.arange(start, end, device=self._device)[:, None])[None, None]

    def decode(self, first: int, lengths: list[int]) -> None:
        """The next forward is one position each of the rows from `first` on, which hold `lengths` positions now.

        A length of `context`: the row takes no part, and what comes of it means nothing.
        """
        count = len(lengths)
        longest = max(length for length in lengths if length < self.context)
        self._rows, self._length = slice(first, first + count), longest + 1
        at = torch.tensor(lengths, device=self._device)
        self._at = (torch.arange(first, first + count, device=self._device), slice(None), at)
        self.mask = None
        if count > 1:
            self.mask = (torch.arange(self._length, device=self._device)[None, :] <= at[:, None])[:, None, None]

    def fixed(self, rows: int, length: int, at: Tensor) -> None:
        """As `decode` of the first `rows` rows, with shapes that do not depend on what they hold: a graph's.

        `at` int64 [rows], on the device, is read when the forward runs; `context` as in `decode`. All is read up to
        `length` and masked.
        """
        self._rows, self._length = slice(0, rows), length
        self._at = (torch.arange(rows, device=self._device), slice(None), at)
        self.mask = (torch.arange(length, device=self._device)[None, :] <= at[:, None])[:, None, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [rows, heads, positions, head_dim] of a layer; returns all that its attention reads, as views."""
        held_keys, held_values = self._keys[layer_idx], self._values[layer_idx]
        if isinstance(self._at[0], Tensor):
            keys, values = keys[:, :, 0], values[:, :, 0]
        held_keys[self._at], held_values[self._at] = keys, values
        return held_keys[self._rows, :, : self._length], held_values[self._rows, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """For modules that ask; positions are always given to them."""
        return self._length


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    slots: SlotCache,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers' `sdpa_attention_forward`, with the mask of `slots`: the same kernels on the same operands.

    query [rows, heads, positions, head_dim]; returns [rows, positions, heads, head_dim].
    """
    mask = slots.mask
    rows, heads, count, width = query.shape
    groups = heads // key.shape[1]
    if count == 1 and mask is not None:
        # The heads of a group read the same keys: one head with as many queries, and nothing is repeated.
        output = functional.scaled_dot_product_attention(
            query.reshape(rows, -1, groups, width), key, value, attn_mask=mask, scale=scaling
        )
        return output.reshape(rows, 1, heads, width), None
    if mask is not None and groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=mask is None and count > 1,
        enable_gqa=mask is None and groups > 1,
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)
