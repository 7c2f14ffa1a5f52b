"""Multipart forms with a file, read into memory part by part and never beyond their limits."""

import asyncio
from dataclasses import dataclass, field

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http import HttpProcessingError

from omni_common.errors import OmniError, invalid
from omni_gateway.context import SETTINGS

_CHUNK = 64 * 1024
_TEXT_BYTES = 64 * 1024
_PARTS = 64


@dataclass(slots=True)
class Form:
    #: Text fields in order of arrival; a trailing `[]` of a name is dropped.
    texts: dict[str, list[str]] = field(default_factory=dict)
    #: Contents of the file, whatever name the client gave it; `None`: there was none.
    file: bytes | None = None

    def text(self, name: str) -> str | None:
        """The field's last value; empty counts as absent, as HTML forms send it."""
        return (self.texts.get(name) or [""])[-1].strip() or None


async def read_form(request: web.Request, file: str, max_file_bytes: int) -> Form:
    """Read a `multipart/form-data` body whose part `file` is the upload; other uploads are read past.

    Raises OmniError 415, 413, 408, and 400 for what is not a form.
    """
    if request.content_type != "multipart/form-data":
        raise invalid("The body must be multipart/form-data.", code="unsupported_media_type", status=415)
    settings = request.app[SETTINGS]
    if (request.content_length or 0) > settings.max_body_bytes:
        raise invalid("The request body is too large.", code="body_too_large", status=413)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _read(await request.multipart(), file, max_file_bytes)
    except TimeoutError:
        raise invalid("The request body took too long to arrive.", code="request_timeout", status=408) from None
    except OmniError:
        raise
    except (ValueError, AssertionError, HttpProcessingError, web.HTTPException):
        # aiohttp's parser gives up in all these ways.
        raise invalid("The body is not a valid multipart form.", code="invalid_form") from None


async def _read(reader: MultipartReader, file: str, max_file_bytes: int) -> Form:
    form = Form()
    parts = 0
    while (part := await reader.next()) is not None:
        parts += 1
        if parts > _PARTS:
            raise invalid(f"The form has more than {_PARTS} parts.", code="invalid_form")
        if not isinstance(part, BodyPartReader) or not part.name:
            raise invalid("Every part of the form must be a field with a name.", code="invalid_form")
        name = part.name.removesuffix("[]")
        if name == file:
            if form.file is not None:
                raise invalid(f"{file} was given twice", file)
            form.file = await _take(part, max_file_bytes, file, "audio_too_large")
        elif part.filename is not None:
            await _take(part, max_file_bytes, name, "body_too_large")
        else:
            text = await _take(part, _TEXT_BYTES, name, "string_above_max_length")
            try:
                form.texts.setdefault(name, []).append(text.decode())
            except UnicodeDecodeError:
                raise invalid(f"{name} is not valid UTF-8", name) from None
    return form


async def _take(part: BodyPartReader, limit: int, name: str, code: str) -> bytes:
    data = bytearray()
    while chunk := await part.read_chunk(_CHUNK):
        data += chunk
        if len(data) > limit:
            raise invalid(f"{name} has more than {limit} bytes", name, code=code, status=413)
    return bytes(data)
