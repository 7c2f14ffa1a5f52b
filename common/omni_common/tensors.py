"""Tensors on the wire: the dtype table, the three ways to carry one, and reading an arena in place.

An arena is one file: first a table of 64-byte headers, one for each 4096 bytes of the file, then the payloads. A
payload begins at a multiple of 4096; its header, number `offset // 4096`, holds generation and nbytes while the slot
is in use and zeros otherwise. Headers stand apart so that no payload ever overwrites one: a stale reference is always
found, and a payload of 2**k bytes fills a block of 2**k bytes.
"""

import math
import mmap
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from omni_common.errors import OmniError
from omni_common.frames import ArenaTensor, InlineTensor, PartTensor

Array = np.ndarray[Any, Any]

#: Tensors up to this size travel inside the frame.
INLINE_BYTES = 16 * 1024

#: A payload's offset in the arena is a multiple of this.
GRAIN = 4096
HEADER_BYTES = 64
#: generation, nbytes
HEADER = struct.Struct("<QQ")

_DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype("?"),
    "int8": np.dtype("<i1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype (little endian) that `name` stands for on the wire. Raises OmniError `bad_tensor`."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise _bad(f"dtype {name!r} is none of {', '.join(_DTYPES)}")
    return dtype


def name_of(dtype: np.dtype[Any]) -> str:
    """The wire's name of a numpy dtype. Raises OmniError `bad_tensor`, for other byte orders too."""
    name = _NAMES.get(dtype)
    if name is None:
        raise _bad(f"tensors of dtype {dtype.str} cannot be sent, only {', '.join(_DTYPES)}")
    return name


def header_at(offset: int) -> int:
    """Where in the arena the header of the payload at `offset` stands."""
    return offset // GRAIN * HEADER_BYTES


def inline(array: Array) -> InlineTensor:
    """Copy `array`, of any strides, for the inside of a frame."""
    return InlineTensor(name_of(array.dtype), list(array.shape), array.tobytes())


def from_inline(tensor: InlineTensor) -> Array:
    """A read-only array over the frame's bytes. Raises OmniError `bad_tensor`."""
    return _over(tensor.data, tensor.dtype, tensor.shape)


def from_part(tensor: PartTensor, parts: Sequence[bytes | memoryview]) -> Array:
    """A read-only array over `parts[tensor.index]`; `parts` are those after the message's map.

    Raises OmniError `bad_tensor`.
    """
    if not 0 <= tensor.index < len(parts):
        raise _bad(f"part {tensor.index} of a message with {len(parts)}")
    return _over(parts[tensor.index], tensor.dtype, tensor.shape)


class MappedArena:
    """Another process's arena, mapped read-only into this one.

    The memory stays mapped until `close` was called and the last view is gone, in either order.
    """

    def __init__(self, owner: str, memory: mmap.mmap) -> None:
        self.owner = owner
        self._memory: mmap.mmap | None = memory

    def view(self, ref: ArenaTensor, on_release: Callable[[int, int], None]) -> Array:
        """The tensor in place, read-only.

        `on_release(offset, generation)` is called exactly once, when the array and everything made from it (slices,
        reshapes, buffers) is gone, in whatever thread that happens; not at the end of the interpreter. It may run
        inside a garbage collection, so it must not take a lock. One reference sent is one `view` or one release.

        Raises OmniError: `bad_tensor` for a reference that contradicts itself or the arena, `stale_tensor` when its
        slot was given to something else, `arena_gone` after `close`. Nothing is released then.
        """
        memory = self._memory
        if memory is None or ref.arena != self.owner:
            raise OmniError(f"the arena of {ref.arena} is not mapped", code="arena_gone")
        dtype = dtype_of(ref.dtype)
        _check_nbytes(dtype, ref.shape, ref.nbytes)
        if ref.offset < GRAIN or ref.offset % GRAIN or ref.offset + ref.nbytes > len(memory) or ref.generation < 1:
            raise _bad(f"{ref.nbytes} bytes at {ref.offset} (use {ref.generation}) in an arena of {len(memory)}")
        if HEADER.unpack_from(memory, header_at(ref.offset)) != (ref.generation, ref.nbytes):
            raise OmniError(
                f"the tensor at {ref.offset} in the arena of {ref.arena} is no longer use {ref.generation}",
                code="stale_tensor",
            )
        # Everything that numpy derives from `flat` refers to `flat`, and `flat` to the mapping.
        flat: Array = np.frombuffer(memory, dtype, ref.nbytes // dtype.itemsize, ref.offset)
        shaped = _reshape(flat, ref.shape)
        weakref.finalize(flat, on_release, ref.offset, ref.generation).atexit = False
        return shaped

    def close(self) -> None:
        """Make no more views; unmap when the last one is gone. Idempotent."""
        self._memory = None


def _over(data: bytes | memoryview, name: str, shape: Sequence[int]) -> Array:
    dtype = dtype_of(name)
    view = memoryview(data).toreadonly()
    _check_nbytes(dtype, shape, view.nbytes)
    # frombuffer refuses an empty buffer, not an empty piece of one.
    return _reshape(np.frombuffer(view or bytes(1), dtype, view.nbytes // dtype.itemsize), shape)


def _check_nbytes(dtype: np.dtype[Any], shape: Sequence[int], nbytes: int) -> None:
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != nbytes:
        raise _bad(f"shape {list(shape)} of {_NAMES[dtype]} does not have {nbytes} bytes")


def _reshape(flat: Array, shape: Sequence[int]) -> Array:
    """numpy has limits of its own: dimensions, and lengths beside a zero."""
    try:
        return flat.reshape(shape)
    except ValueError as error:
        raise _bad(f"shape {list(shape)[:8]}: {error}") from None


def _bad(message: str) -> OmniError:
    return OmniError(message, code="bad_tensor")
