"""Every frame type against the plain `msgpack` package: any implementation can speak the protocol."""

import contextlib
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from omni_common import frames
from omni_common.frames import AnyFrame, Batch, Chunk, Plain
from omni_common.wire import ProtocolError, decode, encode, encode_all

ROOT = Path(__file__).parents[3]
TYPES = get_args(Plain)
IDS = [kind.__name__ for kind in TYPES]


def sample(kind: inspect.Type, full: bool, default: Any = None) -> Any:
    """A value of the type as plain data; `full` fills optional fields, too, never with their default."""
    match kind:
        case inspect.StructType():
            data: dict[str, Any] = {kind.tag_field: kind.tag} if kind.tag_field else {}
            fields = [field for field in kind.fields if full or field.required]
            return data | {field.encode_name: sample(field.type, full, field.default) for field in fields}
        case inspect.UnionType():
            return sample(next(t for t in kind.types if not isinstance(t, inspect.NoneType)), full)
        case inspect.LiteralType():
            return next(value for value in kind.values if value != default)
        case inspect.ListType():
            return [sample(kind.item_type, full)]
        case inspect.TupleType():
            return [sample(item, full) for item in kind.item_types]
        case inspect.DictType():
            return {"key": sample(kind.value_type, full)}
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 0.5
        case inspect.StrType():
            return "Grüße 👋"
        case inspect.BytesType():
            return b"\x00\xff"
    raise AssertionError(f"no sample for {kind}")


def sample_of(kind: type, full: bool) -> dict[str, Any]:
    value = sample(inspect.type_info(kind), full)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("kind", TYPES, ids=IDS)
@pytest.mark.parametrize("full", [True, False], ids=["full", "required"])
def test_a_frame_is_a_plain_map_both_ways(kind: type, full: bool) -> None:
    data = sample_of(kind, full)
    [typed] = decode(msgpack.packb(data))
    assert type(typed) is kind
    assert msgpack.unpackb(encode(typed)) == data


@pytest.mark.parametrize("kind", TYPES, ids=IDS)
def test_the_tag_is_the_name_in_snake_case(kind: type) -> None:
    words = "".join(c if c.islower() else f" {c.lower()}" for c in kind.__name__).split()
    assert sample_of(kind, False)["type"] == "_".join(words)


def test_every_frame_of_the_module_is_part_of_the_protocol() -> None:
    defined = {kind for kind in vars(frames).values() if isinstance(kind, type) and issubclass(kind, frames.Frame)}
    assert defined == {*TYPES, Batch, frames.Frame}


@pytest.mark.parametrize("kind", TYPES, ids=IDS)
def test_unknown_fields_are_ignored_at_every_depth(kind: type) -> None:
    def extended(value: Any, of: inspect.Type) -> Any:
        if isinstance(of, inspect.StructType):
            types = {field.encode_name: field.type for field in of.fields}
            known = {key: extended(item, types[key]) if key in types else item for key, item in value.items()}
            return known | {"from_the_future": {"a": [1]}}
        if isinstance(of, inspect.ListType):
            return [extended(item, of.item_type) for item in value]
        return value

    data = sample_of(kind, True)
    assert decode(msgpack.packb(extended(data, inspect.type_info(kind)))) == decode(msgpack.packb(data))


@pytest.mark.parametrize("kind", TYPES, ids=IDS)
def test_a_missing_or_wrong_field_is_refused_by_name(kind: type) -> None:
    data = sample_of(kind, True)
    for field in msgspec.structs.fields(kind):
        if field.required:
            with pytest.raises(ProtocolError, match=f"missing required field `{field.encode_name}`"):
                decode(msgpack.packb({key: value for key, value in data.items() if key != field.encode_name}))
        with pytest.raises(ProtocolError, match=rf"\$\.{field.encode_name}`"):
            decode(msgpack.packb(data | {field.encode_name: msgpack.ExtType(5, b"")}))


@pytest.mark.parametrize(
    "data", [{"type": "teleport"}, {"type": 3}, {}, [], None, "bye", {"type": "frame"}, {"type": "Bye"}]
)
def test_an_unknown_type_is_refused(data: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(data))


def test_a_batch_keeps_order_and_does_not_nest() -> None:
    several: list[Plain] = [frames.Done("a"), frames.Bye("x"), frames.Done("b")]
    data = encode_all(several)
    assert msgpack.unpackb(data) == {
        "type": "batch",
        "frames": [
            {"type": "done", "request_id": "a"},
            {"type": "bye", "reason": "x"},
            {"type": "done", "request_id": "b"},
        ],
    }
    assert decode(data) == several
    assert decode(encode_all(several[:1])) == several[:1]
    with pytest.raises(ProtocolError):
        decode(msgpack.packb({"type": "batch", "frames": [{"type": "batch", "frames": []}]}))


GOLDEN: list[tuple[AnyFrame, dict[str, Any]]] = [
    (
        Chunk(
            request_id="r1",
            edge="talker>code2wav",
            source="i1",
            attempt=1,
            opening=2,
            seq=3,
            start=80,
            end=160,
            last=True,
            body=frames.Latent(text="Hi.", characters=(0, 3), end_of_unit=True),
            tensors={
                "a": frames.InlineTensor(dtype="float32", shape=[1], data=b"\0\0\x80?"),
                "b": frames.ArenaTensor(dtype="bfloat16", shape=[2, 0], arena="i1", offset=64, nbytes=0, generation=9),
                "c": frames.PartTensor(dtype="int64", shape=[], index=1),
            },
        ),
        {
            "type": "chunk",
            "request_id": "r1",
            "edge": "talker>code2wav",
            "source": "i1",
            "attempt": 1,
            "opening": 2,
            "seq": 3,
            "start": 80,
            "end": 160,
            "last": True,
            "body": {"kind": "latent", "text": "Hi.", "characters": [0, 3], "end_of_unit": True},
            "tensors": {
                "a": {"at": "inline", "dtype": "float32", "shape": [1], "data": b"\0\0\x80?"},
                "b": {
                    "at": "arena", "dtype": "bfloat16", "shape": [2, 0],
                    "arena": "i1", "offset": 64, "nbytes": 0, "generation": 9,
                },
                "c": {"at": "part", "dtype": "int64", "shape": [], "index": 1},
            },
        },
    ),
    (
        frames.Grant("r1", "client>thinker", source="i2", attempt=2, opening=1, position=5, chunks=4, nbytes=1 << 40),
        {
            "type": "grant", "request_id": "r1", "edge": "client>thinker", "source": "i2",
            "attempt": 2, "opening": 1, "position": 5, "chunks": 4, "nbytes": 1 << 40,
        },
    ),
    (
        frames.Release(source="i2", slots=[(64, 1), (128, 2)]),
        {"type": "release", "source": "i2", "slots": [[64, 1], [128, 2]]},
    ),
    (
        frames.Rejected(request_id="r1", code="queue_full", message="full", status=429, retry_after_s=1.5),
        {
            "type": "rejected", "request_id": "r1", "code": "queue_full", "message": "full",
            "status": 429, "retry_after_s": 1.5,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "plain"), GOLDEN, ids=[plain["type"] for _, plain in GOLDEN])
def test_golden_frames(frame: Plain, plain: dict[str, Any]) -> None:
    assert msgpack.unpackb(encode(frame)) == plain
    assert decode(msgpack.packb(plain)) == [frame]


class Explosive:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was opened",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_opened(protocol: int) -> None:
    with pytest.raises(ProtocolError):
        decode(pickle.dumps(Explosive(), protocol))


@given(st.binary(max_size=200))
def test_garbage_raises_protocol_errors_only(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.data())
def test_damaged_frames_raise_protocol_errors_only(data: st.DataObject) -> None:
    good = bytearray(encode(GOLDEN[0][0]))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode(bytes(good[: data.draw(st.integers(0, len(good)))]))


def test_deep_nesting_is_refused() -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    with pytest.raises(ProtocolError):
        decode(msgpack.packb({"type": "bye", "x": 1})[:-1] + b"\x91" * 100_000)
    with pytest.raises(ProtocolError):
        decode(msgpack.packb({"type": "bye", "reason": deep}))


def test_the_protocol_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "tools/protocol_doc.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run tools/protocol_doc.py"


def test_the_protocol_page_explains_every_frame_once() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    assert len({title.lower() for title in titles}) == len(titles)
    assert {sample_of(kind, False)["type"] for kind in (*TYPES, Batch)} <= set(titles)
    assert {link.lower() for link in re.findall(r"\(#(.+?)\)", page)} <= {title.lower() for title in titles}
