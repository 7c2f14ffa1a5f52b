"""Frames to bytes and back. What comes in is checked against the types of `frames.py`; nothing else is ever decoded."""

import msgspec

from omni_common.frames import AnyFrame, Batch, Plain

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyFrame)

encode = _encoder.encode


class ProtocolError(Exception):
    """Bytes that are no frame of this protocol."""


def encode_all(frames: list[Plain]) -> bytes:
    """One message for all `frames` (at least one), in order."""
    return encode(frames[0] if len(frames) == 1 else Batch(frames))


def decode(data: bytes | memoryview) -> list[Plain]:
    """Raises ProtocolError with the path of the wrong field."""
    try:
        frame = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from None
    return frame.frames if isinstance(frame, Batch) else [frame]
