"""Images of every kind that clients send, and what only looks like one."""

import asyncio
import io
import struct
import threading
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omni_common.errors import OmniError
from omni_gateway.media import image as module
from omni_gateway.media.image import decode_image, fit

LIMITS: dict[str, Any] = {
    "max_bytes": 1 << 20,
    "max_source_pixels": 1 << 20,
    "max_pixels": 1 << 20,
    "param": "messages[0].content[1].image_url.url",
}
RED, BLUE = (255, 0, 0), (0, 0, 255)


def halves(width: int = 24, height: int = 16) -> Image.Image:
    """Red above blue."""
    picture = Image.new("RGB", (width, height), RED)
    picture.paste(BLUE, (0, height // 2, width, height))
    return picture


def encoded(picture: Image.Image, fmt: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, fmt, **options)
    return file.getvalue()


async def refused(data: bytes, code: str = "invalid_image", status: int = 400, **limits: Any) -> OmniError:
    with pytest.raises(OmniError) as raised:
        await decode_image(data, **{**LIMITS, **limits})
    assert (raised.value.code, raised.value.status) == (code, status)
    assert raised.value.param == LIMITS["param"]
    return raised.value


def near(pixel: Any, colour: tuple[int, int, int], tolerance: int = 6) -> bool:
    return bool(np.abs(pixel.astype(int) - colour).max() <= tolerance)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [("PNG", {}), ("JPEG", {"quality": 95, "subsampling": 0}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}),
     ("GIF", {}), ("AVIF", {"quality": 95})],
)  # fmt: skip
async def test_every_format(fmt: str, options: dict[str, Any]) -> None:
    pixels = await decode_image(encoded(halves(), fmt, **options), **LIMITS)
    assert pixels.shape == (16, 24, 3) and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert near(pixels[2, 12], RED) and near(pixels[13, 12], BLUE)
    if fmt in ("PNG", "BMP", "TIFF", "WEBP"):
        assert (pixels == np.asarray(halves())).all()


# Orientation -> corners of the stored picture, which is red above blue, as (row, column) of a red and a blue pixel of
# the upright one.
UPRIGHT = {
    1: ((0, 0), (-1, 0)), 2: ((0, 0), (-1, 0)), 3: ((-1, 0), (0, 0)), 4: ((-1, 0), (0, 0)),
    5: ((0, 0), (0, -1)), 6: ((0, -1), (0, 0)), 7: ((0, -1), (0, 0)), 8: ((0, 0), (0, -1)),
}  # fmt: skip


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(
    ("fmt", "options"), [("JPEG", {"quality": 95, "subsampling": 0}), ("PNG", {}), ("WEBP", {"lossless": True})]
)
async def test_orientation(fmt: str, options: dict[str, Any], orientation: int) -> None:
    """B100: a photo of a phone stands upright, whatever container says how it was held."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = await decode_image(encoded(halves(), fmt, exif=exif, **options), **LIMITS)
    assert pixels.shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
    red, blue = UPRIGHT[orientation]
    assert near(pixels[red], RED) and near(pixels[blue], BLUE)


async def test_damaged_notes_about_a_picture_are_no_damage_to_it() -> None:
    data = encoded(halves(), exif=b"Exif\0\0MM\0\x2a\0\0\0\x08\xff\xff\x01\x12")
    assert (await decode_image(data, **LIMITS) == np.asarray(halves())).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B"])
async def test_every_mode(mode: str) -> None:
    """A white picture with a black half, as each mode stores it."""
    grey = np.full((16, 24), 255, np.uint8)
    grey[8:] = 0
    if mode.startswith("I;16"):
        picture = Image.fromarray(grey.astype("<u2") * 257)
        if mode == "I;16B":
            picture = Image.frombytes(mode, picture.size, (grey.astype(">u2") * 257).tobytes())
    elif mode == "PA":
        picture = Image.fromarray(grey).convert("RGBA").quantize(2).convert("PA")
    else:
        picture = Image.fromarray(grey).convert("RGB").convert(mode)
    fmt = {"CMYK": "TIFF", "YCbCr": "TIFF", "I;16B": "TIFF", "PA": "PNG"}.get(mode, "PNG")
    pixels = await decode_image(encoded(picture if mode != "PA" else picture.convert("RGBA"), fmt), **LIMITS)
    assert pixels.shape == (16, 24, 3)
    assert (pixels[:8] >= 254).all() and (pixels[8:] <= 1).all()


async def test_grey_of_16_bits_keeps_its_upper_ones() -> None:
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16) + 37
    pixels = await decode_image(encoded(Image.fromarray(values)), **LIMITS)
    assert (pixels == (values >> 8)[:, :, None]).all()


async def test_transparent_is_white() -> None:
    picture = Image.new("RGBA", (4, 1))
    for x, pixel in enumerate([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 51)]):
        picture.putpixel((x, 0), pixel)
    assert (await decode_image(encoded(picture), **LIMITS)).tolist() == [
        [[255, 0, 0], [255, 255, 255], [255, 255, 255], [204, 204, 204]]
    ]
    # A palette's, a grey's and a colour's own way to say it.
    for mode, key in (("P", 0), ("L", 0), ("RGB", (0, 0, 0))):
        black = Image.new(mode, (3, 3))
        assert (await decode_image(encoded(black, transparency=key), **LIMITS) == 255).all()
    grey = Image.new("LA", (2, 2), (0, 0))
    assert (await decode_image(encoded(grey), **LIMITS) == 255).all()


async def test_cmyk_of_a_jpeg() -> None:
    data = encoded(halves().convert("CMYK"), "JPEG", quality=95)
    pixels = await decode_image(data, **LIMITS)
    assert near(pixels[2, 12], RED, 12) and near(pixels[13, 12], BLUE, 12)


@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG"])
async def test_of_an_animation_the_first_picture_counts(fmt: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE, RED)]
    data = encoded(frames[0], fmt, save_all=True, append_images=frames[1:], duration=100)
    assert all(near(pixel, RED) for pixel in (await decode_image(data, **LIMITS)).reshape(-1, 3))


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("fmt", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [1, 6])
async def test_a_large_image_is_scaled_down(fmt: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(halves(640, 400), fmt, exif=exif)
    pixels = await decode_image(data, **{**LIMITS, "max_pixels": 1000})
    assert pixels.shape == ((25, 40, 3) if orientation == 1 else (40, 25, 3))
    top, bottom = ((2, 20), (-3, 20)) if orientation == 1 else ((20, -3), (20, 2))
    assert near(pixels[top], RED, 12) and near(pixels[bottom], BLUE, 12)


@pytest.mark.parametrize("size", [(1000, 1), (1, 1000), (3, 5), (640, 480), (1, 1), (99_999, 7)])
@pytest.mark.parametrize("most", [1, 6, 100, 10_000])
def test_what_fits(size: tuple[int, int], most: int) -> None:
    width, height = fit(*size, most)
    assert (width >= 1 and height >= 1 and width * height <= most) or (width, height) == size
    if size[0] * size[1] > most and min(width, height) > 10:
        assert width / height == pytest.approx(size[0] / size[1], rel=0.1)


async def test_too_many_pixels_are_refused_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("1", (2000, 2000)))
    loaded: list[object] = []
    monkeypatch.setattr(Image.Image, "load", lambda self: loaded.append(self))
    assert len(data) < 2000
    await refused(data, "image_too_large")
    assert not loaded


async def test_a_decompression_bomb() -> None:
    """A header that states what its few bytes could never hold, and one that nearly could."""
    for side in (60_000, 10_000):
        data = bytearray(encoded(Image.new("1", (16, 16))))
        data[16:24] = struct.pack(">II", side, side)
        data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
        await refused(bytes(data), "image_too_large")


async def test_too_many_bytes() -> None:
    await refused(encoded(halves()), "image_too_large", 413, max_bytes=50)


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("kept", ["nothing", "a byte", "half", "all but 128"])
async def test_truncated(fmt: str, kept: str) -> None:
    """B102"""
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(noise), fmt)
    await refused(data[: {"nothing": 0, "a byte": 1, "half": len(data) // 2, "all but 128": len(data) - 128}[kept]])


NO_IMAGES = {
    "text": b"this is no image, but it is long enough",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    "numbers": encoded(Image.new("I", (4, 4)), "TIFF"),
    "floats": encoded(Image.new("F", (4, 4)), "TIFF"),
    "another format": encoded(halves(), "PPM"),
}


@pytest.mark.parametrize("name", NO_IMAGES)
async def test_no_image(name: str) -> None:
    await refused(NO_IMAGES[name])


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
@pytest.mark.filterwarnings("ignore")
async def test_flipped_bytes_give_an_image_or_a_refusal(fmt: str) -> None:
    """B102"""
    chance = np.random.default_rng(2)
    whole = encoded(halves(), fmt)
    for _ in range(60):
        data = bytearray(whole)
        for at in chance.integers(0, len(data), 4):
            data[at] = chance.integers(0, 256)
        try:
            pixels = await decode_image(bytes(data), **LIMITS)
        except OmniError as error:
            assert error.code in ("invalid_image", "image_too_large")
        else:
            assert pixels.ndim == 3


async def test_the_loop_does_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """B049"""
    threads: set[int] = set()
    run = module._Job.run

    def noted(job: module._Job) -> module.Pixels:
        threads.add(threading.get_ident())
        return run(job)

    monkeypatch.setattr(module._Job, "run", noted)
    await asyncio.gather(*(decode_image(encoded(halves()), **LIMITS) for _ in range(4)))
    assert threads and threading.get_ident() not in threads
