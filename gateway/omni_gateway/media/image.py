"""From the bytes of an image to upright RGB pixels, with limits before anything is decoded.

Transparent images lie on white. Of an animation the first picture counts, of 16 bits the upper 8. Colour profiles are
not applied.
"""

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from omni_common.errors import OmniError, invalid
from omni_gateway.media.inline import too_large
from omni_gateway.media.pool import DECODERS

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

#: Formats that are pictures and nothing else: no scripts, no names of files.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_BITS_16 = ("I;16", "I;16L", "I;16B", "I;16N")
#: Numbers without a scale that would make them grey values.
_NO_COLOURS = ("I", "F")


async def decode_image(data: bytes, *, max_bytes: int, max_source_pixels: int, max_pixels: int, param: str) -> Pixels:
    """Return uint8 [height, width, 3], RGB, upright; scaled down to `max_pixels` if it has more.

    Raises OmniError with `param`: 413 `image_too_large` for the bytes, 400 `image_too_large` for more than
    `max_source_pixels`, 400 `invalid_image` for what is no image, damaged, or ends too early.
    """
    if len(data) > max_bytes:
        raise too_large("image", len(data), max_bytes, param)
    return await DECODERS.run(_Job(data, max_source_pixels, max_pixels, param).run)


def fit(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest width and height of the same proportions with at most `max_pixels`, each at least 1."""
    if width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    short = max(1, int(min(width, height) * scale))
    # Of a very thin one the short side cannot shrink with the long one.
    long = max(1, min(int(max(width, height) * scale), max_pixels // short))
    return (long, short) if width >= height else (short, long)


@dataclass(frozen=True, slots=True)
class _Job:
    data: bytes
    max_source_pixels: int
    max_pixels: int
    param: str

    def run(self) -> Pixels:
        try:
            with Image.open(io.BytesIO(self.data), formats=_FORMATS) as image:
                return self._decode(image)
        except OmniError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise self._too_many() from None
        except Exception:
            # On damaged bytes Pillow's readers raise whatever their parsing runs into.
            formats = ", ".join(_FORMATS)
            raise self._bad(f"it is damaged, or none of {formats}") from None

    def _decode(self, image: Image.Image) -> Pixels:
        width, height = image.size
        if width * height > self.max_source_pixels:
            raise self._too_many()
        if image.mode in _NO_COLOURS:
            raise self._bad("its pixels are numbers, not colours")
        size = fit(width, height, self.max_pixels)
        if size != image.size:
            # A JPEG can be decoded at a half, a quarter or an eighth; others ignore it.
            image.draft(None, size)
        image.load()
        upright = _rgb(_upright(image))
        # Again, because it may lie on its side now.
        size = fit(*upright.size, self.max_pixels)
        if size != upright.size:
            upright = upright.resize(size, Image.Resampling.LANCZOS)
        return np.array(upright, np.uint8)

    def _too_many(self) -> OmniError:
        text = f"the image has more than {self.max_source_pixels} pixels"
        return invalid(text, self.param, code="image_too_large")

    def _bad(self, reason: str) -> OmniError:
        return invalid(f"the image cannot be decoded: {reason}", self.param, code="invalid_image")


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        # Damaged notes about a picture are no damage to it.
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in _BITS_16:
        values = np.asarray(image).astype(np.uint16)
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    return Image.alpha_composite(white, clear).convert("RGB")
