"""Bytes that stand inside a request: plain base64, and data URLs."""

import base64
import binascii
from typing import Literal

from omni_common.errors import OmniError, invalid
from omni_gateway.media.pool import DECODERS

Kind = Literal["audio", "image", "video"]
#: Characters of base64 that the event loop decodes itself, within a millisecond or so.
_ON_LOOP = 1 << 20


def too_large(kind: Kind, nbytes: int, max_bytes: int, param: str) -> OmniError:
    """413 `audio_too_large`, `image_too_large` or `video_too_large`."""
    text = f"the {kind} has {nbytes} bytes, more than {max_bytes}"
    return invalid(text, param, code=f"{kind}_too_large", status=413)


async def decode_base64(data: str, kind: Kind, max_bytes: int, param: str) -> bytes:
    """The bytes that `data` stands for, which are never made when they would be more than `max_bytes`.

    Raises OmniError with `param`: 413 as `too_large`, 400 `invalid_base64`, 400 `invalid_audio` (`_image`, `_video`)
    when there are none.
    """
    nbytes = len(data) * 3 // 4
    # Up to two of these are padding.
    if nbytes - 2 > max_bytes:
        raise too_large(kind, nbytes, max_bytes, param)
    try:
        if len(data) <= _ON_LOOP:
            decoded = base64.b64decode(data, validate=True)
        else:
            decoded = await DECODERS.run(base64.b64decode, data, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"{param} is not valid base64", param, code="invalid_base64") from None
    if not decoded:
        raise invalid(f"{param} is empty", param, code=f"invalid_{kind}")
    return decoded


async def decode_data_url(url: str, kind: Kind, max_bytes: int, param: str) -> bytes:
    """The bytes of `data:[type][;name=value]*;base64,...`; the type is not looked at, the bytes say what they are.

    Raises OmniError as `decode_base64`, and 400 `invalid_url` for a data URL of another form.
    """
    comma = url.find(",", 0, 1024)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        text = f"{param}: a data URL must have the form data:TYPE;base64,DATA"
        raise invalid(text, param, code="invalid_url")
    return await decode_base64(url[comma + 1 :], kind, max_bytes, param)
