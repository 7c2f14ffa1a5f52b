import gc
import math
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_common.arena import Arena
from omni_common.errors import OmniError
from omni_common.frames import ArenaTensor, InlineTensor, PartTensor
from omni_common.tensors import GRAIN, MappedArena, dtype_of, from_inline, from_part, header_at, inline, name_of

OWNER = "0123456789abcdef"
NAMES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
]
SHAPES = [(), (0,), (0, 3), (3, 0, 2), (1,), (7,), (2, 3, 5), (1, 5000)]


def some(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array with any bits (0 and 1 for bool)."""
    dtype = dtype_of(name)
    if name == "bool":
        return np.array([n % 3 == 0 for n in range(math.prod(shape))], dtype).reshape(shape)
    raw = np.random.default_rng(len(shape)).bytes(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(bytearray(raw or bytes(8)), dtype, math.prod(shape)).reshape(shape)


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def mapped(arena: Arena) -> MappedArena:
    memory = mmap.mmap(arena.descriptor, arena.size, mmap.MAP_SHARED, mmap.PROT_READ)
    return MappedArena(arena.incarnation, memory)


class Reader:
    """A consumer in the same process, which releases what it has read."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.mapped = mapped(arena)
        self.released: list[tuple[int, int]] = []

    def view(self, ref: ArenaTensor | None) -> np.ndarray[Any, Any]:
        assert ref is not None
        return self.mapped.view(ref, self.on_release)

    def on_release(self, offset: int, generation: int) -> None:
        self.released.append((offset, generation))
        self.arena.release("reader", [(offset, generation)])


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(OWNER, 1 << 20)
    yield arena
    arena.close()


@pytest.fixture
def reader(arena: Arena) -> Iterator[Reader]:
    reader = Reader(arena)
    yield reader
    reader.mapped.close()


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_have_one_name_in_both_directions(name: str) -> None:
    assert name_of(dtype_of(name)) == name
    assert name_of(np.zeros(1, getattr(ml_dtypes, name, name)).dtype) == name


@pytest.mark.parametrize("dtype", [">f4", "c8", "O", "M8[s]", "U3", "i4,f4"])
def test_other_dtypes_are_refused_by_the_sender(arena: Arena, dtype: str) -> None:
    array = np.zeros(2, dtype)
    with pytest.raises(OmniError) as caught:
        inline(array)
    assert caught.value.code == "bad_tensor"
    with pytest.raises(OmniError):
        arena.put(array, {"reader": 1})
    assert arena.used == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_way_keeps_dtype_shape_and_bits(reader: Reader, name: str, shape: tuple[int, ...]) -> None:
    array = some(name, shape)
    ref = reader.arena.put(array, {"reader": 1})
    view = reader.view(msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=ArenaTensor))
    part = from_part(PartTensor(name, list(shape), 1), [b"other", memoryview(array.tobytes())])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(inline(array)), type=InlineTensor)
    for got in (view, part, from_inline(sent)):
        assert same(got, array)
        assert not got.flags.writeable
    del view, got
    assert len(reader.released) == 1
    assert reader.arena.used == 0


def test_any_strides_are_packed(reader: Reader) -> None:
    base = some("bfloat16", (6, 8))
    for array in (base.T, base[::2, ::-1], np.broadcast_to(base[0], (3, 8)), base[1:2]):
        assert same(reader.view(reader.arena.put(array, {"reader": 1})), array)
        assert same(from_inline(inline(array)), array)


def test_a_payload_of_a_power_of_two_fills_its_block(arena: Arena) -> None:
    ref = arena.put(some("uint8", (1 << 20,)), {"reader": 1})
    assert ref is not None
    assert ref.offset % GRAIN == 0
    assert arena.used == arena.total == 1 << 20


def test_a_view_cannot_be_written(reader: Reader) -> None:
    view = reader.view(reader.arena.put(some("float32", (8,)), {"reader": 1}))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


def derived(view: np.ndarray[Any, Any]) -> list[Any]:
    return [view[1:3], view.reshape(-1)[::2], view.T, view.view(np.uint8), view.data, np.asarray(view)[0][None]]


@pytest.mark.parametrize("kind", range(6))
def test_whatever_is_made_from_a_view_keeps_the_slot(reader: Reader, kind: int) -> None:
    view = reader.view(reader.arena.put(some("float32", (4, 6)), {"reader": 1}))
    rest = derived(view)[kind]
    before = bytes(rest)
    del view
    gc.collect()
    assert reader.released == []
    assert reader.arena.put(some("float32", (4, 6)) * 0, {"other": 1}) is not None
    assert bytes(rest) == before
    del rest
    assert len(reader.released) == 1


@given(st.permutations(range(7)))
def test_the_release_comes_once_in_any_order_of_ends(order: list[int]) -> None:
    arena = Arena(OWNER, 1 << 16)
    reader = Reader(arena)
    view = reader.view(arena.put(some("float32", (4, 6)), {"reader": 1}))
    alive: dict[int, Any] = dict(enumerate([view, *derived(view)]))
    del view
    for left, n in zip(reversed(range(7)), order, strict=True):
        del alive[n]
        assert len(reader.released) == (0 if left else 1)
    assert arena.used == arena.bad_releases == 0
    arena.close()


def test_a_view_may_end_in_another_thread(reader: Reader) -> None:
    views = [reader.view(reader.arena.put(some("float32", (4, 6)), {"reader": 1}))]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert len(reader.released) == 1


def test_a_view_in_a_cycle_is_released_by_the_collector(reader: Reader) -> None:
    cycle: dict[str, Any] = {"view": reader.view(reader.arena.put(some("float32", (4, 6)), {"reader": 1}))}
    cycle["self"] = cycle
    del cycle
    gc.collect()
    assert len(reader.released) == 1


def test_views_outlive_the_mapping_and_the_arena(reader: Reader) -> None:
    """B063: closing early must neither show another request's data nor crash."""
    array = some("float32", (64, 64))
    view = reader.view(reader.arena.put(array, {"reader": 1}))
    reader.mapped.close()
    reader.arena.close()
    assert same(view, array)
    with pytest.raises(OmniError) as caught:
        reader.mapped.view(ArenaTensor("uint8", [0], OWNER, GRAIN, 0, 1), reader.on_release)
    assert caught.value.code == "arena_gone"


def test_nothing_is_released_at_the_end_of_the_interpreter() -> None:
    script = f"""
import mmap, numpy as np
from omni_common.arena import Arena
from omni_common.tensors import MappedArena
arena = Arena({OWNER!r}, 65536)
mapped = MappedArena({OWNER!r}, mmap.mmap(arena.descriptor, arena.size, mmap.MAP_SHARED, mmap.PROT_READ))
kept = mapped.view(arena.put(np.ones(9), {{"reader": 1}}), lambda *slot: print("released"))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stale_reference_is_told_apart(reader: Reader) -> None:
    old = reader.arena.put(some("float32", (8,)), {"reader": 1})
    reader.view(old)
    with pytest.raises(OmniError, match="no longer use 1") as free:
        reader.view(old)
    new = reader.arena.put(some("float32", (8,)), {"other": 1})
    assert old is not None
    assert new is not None
    assert new.offset == old.offset
    with pytest.raises(OmniError, match="no longer use 1") as used:
        reader.view(old)
    assert free.value.code == used.value.code == "stale_tensor"
    assert len(reader.released) == 1


def change(ref: ArenaTensor, **fields: Any) -> ArenaTensor:
    return msgspec.structs.replace(ref, **fields)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"dtype": "object"}, "bad_tensor"),
        ({"dtype": ""}, "bad_tensor"),
        ({"dtype": "float64"}, "bad_tensor"),
        ({"shape": [4, 7]}, "bad_tensor"),
        ({"shape": [-4, -6]}, "bad_tensor"),
        ({"shape": [4, 6, 2**62, 2**62]}, "bad_tensor"),
        ({"shape": [0, 2**62, 2**62], "nbytes": 0}, "stale_tensor"),
        ({"shape": [1] * 70, "nbytes": 4}, "stale_tensor"),
        ({"nbytes": 92}, "bad_tensor"),
        ({"nbytes": 0, "shape": [0]}, "stale_tensor"),
        ({"offset": 0}, "bad_tensor"),
        ({"offset": 64}, "bad_tensor"),
        ({"offset": -GRAIN}, "bad_tensor"),
        ({"offset": 1 << 40}, "bad_tensor"),
        ({"offset": GRAIN, "generation": 0}, "bad_tensor"),
        ({"shape": [1 << 38], "nbytes": 1 << 40}, "bad_tensor"),
        ({"generation": 2}, "stale_tensor"),
        ({"generation": 2**70}, "stale_tensor"),
        ({"arena": "f" * 16}, "arena_gone"),
    ],
)
def test_a_wrong_reference_is_refused(reader: Reader, fields: dict[str, Any], code: str) -> None:
    ref = reader.arena.put(some("float32", (4, 6)), {"reader": 1})
    assert ref is not None
    with pytest.raises(OmniError) as caught:
        reader.view(change(ref, **fields))
    assert caught.value.code == code
    assert reader.released == []
    assert same(reader.view(ref), some("float32", (4, 6)))


@pytest.mark.parametrize("shape", [[1] * 70, [0, 2**62, 2**62]])
def test_shapes_beyond_numpy_are_refused(reader: Reader, shape: list[int]) -> None:
    data = np.zeros(math.prod(shape), np.uint8)
    ref = reader.arena.put(data, {"reader": 1})
    assert ref is not None
    tries: list[Callable[[], object]] = [
        lambda: reader.view(change(ref, shape=shape)),
        lambda: from_inline(InlineTensor("uint8", shape, data.tobytes())),
        lambda: from_part(PartTensor("uint8", shape, 0), [data.tobytes()]),
    ]
    for attempt in tries:
        with pytest.raises(OmniError) as caught:
            attempt()
        assert caught.value.code == "bad_tensor"
    assert reader.released == []


@pytest.mark.parametrize(
    "part", [PartTensor("float32", [2], 1), PartTensor("float32", [2], -1), PartTensor("float32", [3], 0)]
)
def test_a_part_that_is_not_there_is_refused(part: PartTensor) -> None:
    with pytest.raises(OmniError) as caught:
        from_part(part, [b"12345678"])
    assert caught.value.code == "bad_tensor"


def test_a_part_is_not_copied_and_not_writable() -> None:
    data = bytearray(8)
    array = from_part(PartTensor("uint8", [8], 0), [memoryview(data)])
    data[3] = 7
    assert array[3] == 7
    assert not array.flags.writeable


def test_headers_do_not_meet_payloads(arena: Arena) -> None:
    refs = [arena.put(np.full(GRAIN, n, np.uint8), {"reader": 1}) for n in range(arena.total // GRAIN)]
    first = min(ref.offset for ref in refs if ref)
    last = max(ref.offset for ref in refs if ref)
    assert header_at(last) + 64 <= first
    assert last + GRAIN == arena.size
