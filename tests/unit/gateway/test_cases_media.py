"""Cases of media that the tests of each decoder leave out: odd depths, sound that is hardly any, lying files."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from omni_common.errors import OmniError
from omni_gateway.media.decode import decode_audio
from omni_gateway.media.encode import FORMATS, Encoder
from omni_gateway.media.image import decode_image
from unit.gateway.film import film
from unit.gateway.test_media_image import BLUE, LIMITS, RED, UPRIGHT, encoded, halves, near
from unit.gateway.test_media_image import refused as refused_image
from unit.gateway.test_media_video import decoded

RATE = 16_000


def wav(samples: Any, rate: int = RATE, subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.asarray(samples), rate, format="WAV", subtype=subtype)
    return file.getvalue()


async def heard(data: bytes) -> Any:
    return await decode_audio(data, max_seconds=30.0, max_bytes=1 << 22, param="file")


async def deaf(data: bytes) -> str:
    with pytest.raises(OmniError) as refused:
        await heard(data)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_audio", "file")
    return refused.value.message


def square(level: float, count: int = 8000) -> Any:
    """Slow enough to come through any resampler."""
    return np.where(np.arange(count) // 50 % 2, level, -level).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- images


def png(width: int, height: int, depth: int, colour: int, pixels: bytes) -> bytes:
    """A PNG as Pillow does not write it; `pixels` are the rows, each behind a 0."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("colour", "pixel", "seen"),
    [
        (2, (0x80FF, 0x1000, 0xFF00), (0x80, 0x10, 0xFF)),
        (4, (0x80FF, 0xFFFF), (0x80, 0x80, 0x80)),
        (4, (0x80FF, 0x0000), (255, 255, 255)),
        (6, (0x80FF, 0x1000, 0xFF00, 0xFFFF), (0x80, 0x10, 0xFF)),
        (6, (0x80FF, 0x1000, 0xFF00, 0x0000), (255, 255, 255)),
    ],
)
async def test_colours_of_16_bits(colour: int, pixel: tuple[int, ...], seen: tuple[int, ...]) -> None:
    data = png(1, 1, 16, colour, b"\0" + struct.pack(f">{len(pixel)}H", *pixel))
    pixels = await decode_image(data, **LIMITS)
    assert np.abs(pixels[0, 0].astype(int) - seen).max() <= 1


@pytest.mark.parametrize("fmt", ["TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", UPRIGHT)
async def test_orientation_in_containers_that_turn_by_themselves(fmt: str, orientation: int) -> None:
    """B100: turned once, not twice."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if fmt == "AVIF" else {}
    pixels = await decode_image(encoded(halves(), fmt, exif=exif, **options), **LIMITS)
    assert pixels.shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
    red, blue = UPRIGHT[orientation]
    assert near(pixels[red], RED, 12) and near(pixels[blue], BLUE, 12)


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (0, 0)])
async def test_a_picture_without_pixels(size: tuple[int, int]) -> None:
    await refused_image(png(*size, 8, 2, b"\0"))
    await refused_image(b"GIF89a" + struct.pack("<HH", *size) + b"\0\0\0;")


async def test_one_pixel() -> None:
    for fmt in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        assert (await decode_image(encoded(Image.new("RGB", (1, 1), RED), fmt), **LIMITS)).shape == (1, 1, 3)


async def test_a_frame_larger_than_its_gif() -> None:
    """The screen's size in the header is 1 x 1, and the frame's is not."""
    data = bytearray(encoded(Image.new("P", (8, 8)), "GIF"))
    data[6:10] = struct.pack("<HH", 1, 1)
    at = data.index(b"\x2c", 13)
    data[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    await refused_image(bytes(data), "image_too_large")


# ------------------------------------------------------------------------------------------------------------- sound


@pytest.mark.parametrize("level", [1e5, 1e30, 3e38])
@pytest.mark.parametrize("rate", [RATE, 44_100])
async def test_sound_far_beyond_full_scale_is_no_sound(level: float, rate: int) -> None:
    """It becomes features that are no numbers, and a 500 of a stage far away."""
    await deaf(wav(square(level), rate))


@pytest.mark.parametrize("level", [1.5, 32_768.0])
async def test_sound_beyond_full_scale_is_heard_as_it_is(level: float) -> None:
    assert np.abs(await heard(wav(square(level)))).max() == level


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rate", [RATE, 44_100])
async def test_a_sample_that_is_no_number(bad: float, rate: int) -> None:
    samples = np.zeros(8000, np.float32)
    samples[4000] = bad
    await deaf(wav(samples, rate))


@pytest.mark.parametrize("count", [0, 1, 2, 159])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
async def test_hardly_any_samples(count: int, subtype: str) -> None:
    await deaf(wav(np.full(count, 0.5), subtype=subtype))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-42])
async def test_silence_and_what_does_not_move(value: float) -> None:
    samples = await heard(wav(np.full(RATE, value, np.float32)))
    assert len(samples) == RATE and np.allclose(samples, value, atol=1e-6)


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 2), (11_025, 1), (32_000, 4), (96_000, 8), (192_000, 1)])
async def test_odd_rates_and_channels(rate: int, channels: int) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 / rate * np.arange(rate))
    samples = await heard(wav(np.repeat(tone[:, None], channels, 1), rate, "PCM_24"))
    assert len(samples) == pytest.approx(RATE, abs=1)
    inner = samples[1600:-1600] * np.hanning(len(samples) - 3200)
    assert np.argmax(np.abs(np.fft.rfft(inner))) * RATE / len(inner) == pytest.approx(440, abs=2)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("count", [1, 2, 3, 100])
@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer_of_a_few_samples_is_a_file(fmt: str, count: int, whole: bool) -> None:
    encoder = Encoder(fmt, 24_000, whole=whole)
    try:
        data = await encoder.feed(np.full(count, 0.5, np.float32)) + await encoder.finish()
    finally:
        await encoder.close()
    if fmt in ("pcm", "pcm16"):
        assert np.frombuffer(data, "<i2").tolist() == [16384] * count
    elif fmt in ("wav", "flac"):
        assert soundfile.read(io.BytesIO(data), frames=1000)[0].tolist() == pytest.approx([0.5] * count, abs=1e-4)
    else:
        assert len(data) > 50


# ------------------------------------------------------------------------------------------------------------- videos


@pytest.mark.parametrize("first", [4.0, 0.9, 0.995])
async def test_a_sound_that_ends_before_the_pictures_begin_is_silence(first: float) -> None:
    """Of no samples a model makes no features: a 500 of the thinker."""
    early = film(times=[first + number / 10 for number in range(10)], sound="aac", fmt="matroska")
    video = await decoded(early, sound_s=10.0)
    assert len(video.sound) >= RATE // 10
    if first == 4.0:
        assert not video.sound.any()


async def test_one_frame_with_a_long_sound() -> None:
    video = await decoded(film(times=(0.0,), sound="aac"), sound_s=10.0)
    assert len(video.frames) == 1 and len(video.sound) >= RATE // 10
