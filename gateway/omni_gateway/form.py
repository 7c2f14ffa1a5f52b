"""Multipart forms with a file, read into memory part by part and never beyond their limits."""

import warnings
from dataclasses import dataclass, field
from typing import cast

from aiohttp import (
    BadContentDispositionHeader,
    BadContentDispositionParam,
    BodyPartReader,
    MultipartReader,
    StreamReader,
    web,
)
from aiohttp.http import HttpProcessingError

from omni_common.errors import OmniError, invalid
from omni_gateway.endpoint import receiving
from omni_gateway.errors import quoted

_CHUNK = 64 * 1024
_TEXT_BYTES = 64 * 1024
_PARTS = 64
#: Lines outside of the contents: headers, boundaries, what stands before the first of them. The parser has no limit for
#: these, and a preamble of line feeds would keep the event loop busy for a microsecond a byte.
_LINES = 16 * _PARTS
#: What leaves the contents as they are, of the header that RFC 7578 does away with.
_PLAIN = frozenset({"7bit", "8bit", "binary"})

# Python remembers the text of every warning that it ever showed, and here the text is a client's.
for _odd in (BadContentDispositionHeader, BadContentDispositionParam):
    warnings.filterwarnings("ignore", category=_odd)


@dataclass(slots=True)
class Form:
    #: Text fields in order of arrival; a trailing `[]` of a name is dropped.
    texts: dict[str, list[str]] = field(default_factory=dict)
    #: Contents of the file, whatever name the client gave it; `None`: there was none.
    file: bytes | None = None
    #: Media type that the client gave the file, in lower case and without parameters; empty: it gave none.
    file_type: str = ""

    def text(self, name: str) -> str | None:
        """The field's last value; empty counts as absent, as HTML forms send it."""
        return (self.texts.get(name) or [""])[-1].strip() or None


async def read_form(request: web.Request, file: str, max_file_bytes: int) -> Form:
    """Read a `multipart/form-data` body whose part `file` is the upload; other uploads are read past.

    Raises OmniError 415, 413, 408, and 400 for what is not a form.
    """
    if request.content_type != "multipart/form-data":
        raise invalid("The body must be multipart/form-data.", code="unsupported_media_type", status=415)
    try:
        async with receiving(request) as settings:
            content = cast(StreamReader, _Metered(request.content, settings.max_body_bytes))
            return await _read(MultipartReader(request.headers, content), file, max_file_bytes)
    except OmniError:
        raise
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError):
        # aiohttp's parser gives up in all these ways.
        raise invalid("The body is not a valid multipart form.", code="invalid_form") from None


class _Metered:
    """A body as the multipart parser reads it, with the limits that the parser lacks. Raises OmniError 413, 400."""

    def __init__(self, content: StreamReader, max_bytes: int) -> None:
        self._content = content
        self._max_bytes = max_bytes
        self._lines = 0
        self.at_eof = content.at_eof
        self.unread_data = content.unread_data

    async def read(self, size: int) -> bytes:
        return self._counted(await self._content.read(size))

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        self._lines += 1
        if self._lines > _LINES:
            raise invalid(f"The form has more than {_LINES} lines besides its contents.", code="invalid_form")
        return self._counted(await self._content.readline(max_line_length=max_line_length))

    def _counted(self, data: bytes) -> bytes:
        if self._content.total_bytes > self._max_bytes:
            raise invalid("The request body is too large.", code="body_too_large", status=413)
        return data


async def _read(reader: MultipartReader, file: str, max_file_bytes: int) -> Form:
    form = Form()
    parts = 0
    while (part := await reader.next()) is not None:
        parts += 1
        if parts > _PARTS:
            raise invalid(f"The form has more than {_PARTS} parts.", code="invalid_form")
        if not isinstance(part, BodyPartReader) or not part.name:
            raise invalid("Every part of the form must be a field with a name.", code="invalid_form")
        _check_encoding(part)
        name = part.name.removesuffix("[]")
        if name == file:
            if form.file is not None:
                raise invalid(f"{file} was given twice", file)
            form.file = await _take(part, max_file_bytes, file, "audio_too_large")
            form.file_type = part.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        elif part.filename is not None:
            await _take(part, max_file_bytes, name, "body_too_large")
        else:
            text = await _take(part, _TEXT_BYTES, name, "string_above_max_length")
            try:
                form.texts.setdefault(name, []).append(text.decode())
            except UnicodeDecodeError:
                raise invalid(f"{name} is not valid UTF-8", name) from None
    return form


def _check_encoding(part: BodyPartReader) -> None:
    for header, plain in (("Content-Encoding", {"identity"}), ("Content-Transfer-Encoding", _PLAIN)):
        encoding = part.headers.get(header)
        if encoding is not None and encoding.lower() not in plain:
            text = f"{header} {quoted(encoding)} is not supported in a form; send its parts as they are."
            raise invalid(text, header, code="unsupported_encoding", status=415)


async def _take(part: BodyPartReader, limit: int, name: str, code: str) -> bytes:
    data = bytearray()
    while chunk := await part.read_chunk(_CHUNK):
        data += chunk
        if len(data) > limit:
            raise invalid(f"{name} has more than {limit} bytes", name, code=code, status=413)
    return bytes(data)
