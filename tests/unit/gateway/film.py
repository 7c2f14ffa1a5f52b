"""Short videos, made on the spot, whose frames can be told apart."""

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

RATE = 48_000
#: Ten frames a second for two seconds.
TENTHS = [number / 10 for number in range(20)]


def level(number: int) -> int:
    """The blue of the lower half of frame `number`, below 24."""
    return 10 + 10 * number


def film(
    *,
    fmt: str = "mp4",
    codec: str = "libx264",
    times: Sequence[float] = TENTHS,
    width: int = 64,
    height: int = 48,
    rotation: int = 0,
    sound: str | None = None,
    sound_from: float = 0.0,
    options: dict[str, str] | None = None,
    path: Path | None = None,
) -> bytes:
    """A video file with a frame at each of `times` (seconds): red above, `level` below.

    `sound` is the codec of a tone that begins at `sound_from` and lasts as long as there are frames at ten a second.
    `path` is where it is written, for what cannot be written in memory.
    """
    file = io.BytesIO()
    with av.open(str(path) if path else file, "w", format=fmt, options=options or {}) as container:
        pictures: Any = container.add_stream(codec, rate=10)
        pictures.width, pictures.height = width, height
        pictures.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        # AVI has a slot at every tick.
        pictures.codec_context.time_base = Fraction(1, 10 if fmt == "avi" else 1000)
        pictures.codec_context.thread_count = 1
        if rotation:
            pictures.set_display_rotation(rotation)
        tone: Any = container.add_stream(sound, rate=RATE, layout="mono") if sound else None
        for number, time in enumerate(times):
            pixels = np.full((height, width, 3), level(number), np.uint8)
            pixels[: height // 2] = (255, 0, 0)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.time_base, frame.pts = Fraction(1, 1000), round(time * 1000)
            container.mux(pictures.encode(frame))
            if tone:
                container.mux(tone.encode(_tone(number * RATE // 10, round(sound_from * RATE))))
        container.mux(pictures.encode(None))
        if tone:
            container.mux(tone.encode(None))
    return path.read_bytes() if path else file.getvalue()


def sound_file(seconds: float = 0.5) -> bytes:
    """Sound and no pictures."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        tone: Any = container.add_stream("aac", rate=RATE, layout="mono")
        for start in range(0, int(seconds * RATE), RATE // 10):
            container.mux(tone.encode(_tone(start, 0)))
        container.mux(tone.encode(None))
    return file.getvalue()


def _tone(start: int, offset: int) -> av.AudioFrame:
    """A tenth of a second of 300 Hz from sample `start` on, `offset` samples later."""
    samples = 0.3 * np.sin(2 * np.pi * 300 / RATE * np.arange(start, start + RATE // 10))
    frame = av.AudioFrame.from_ndarray(samples.astype(np.float32)[None], format="fltp", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = RATE, start + offset, Fraction(1, RATE)
    return frame
