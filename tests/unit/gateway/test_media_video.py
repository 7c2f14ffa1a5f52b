"""Videos of every kind that clients send: which frames are seen, what is heard, what is refused."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_common.errors import OmniError
from omni_gateway.media import video as module
from omni_gateway.media.image import Pixels
from omni_gateway.media.video import DecodedVideo, VideoLimits, decode_video
from unit.gateway.film import film, level, sound_file

PARAM = "messages[0].content[0].video_url.url"
LIMITS = VideoLimits(
    max_seconds=10, max_bytes=1 << 20, max_source_pixels=1 << 16, fps=2, max_frames=8, max_pixels=1 << 16
)


async def decoded(data: bytes, *, sound_s: float | None = None, **limits: Any) -> DecodedVideo:
    return await decode_video(data, replace(LIMITS, **limits), param=PARAM, sound_s=sound_s)


def seen(frames: Pixels) -> list[int]:
    """Numbers of the frames."""
    levels = frames[:, -4, 4, 2].astype(int)
    return [min(range(25), key=lambda number: abs(level(number) - found)) for found in levels]


async def refused(
    data: bytes, code: str = "invalid_video", status: int = 400, sound_s: float | None = None, **limits: Any
) -> OmniError:
    with pytest.raises(OmniError) as raised:
        await decoded(data, sound_s=sound_s, **limits)
    assert (raised.value.code, raised.value.status, raised.value.param) == (code, status, PARAM), raised.value
    return raised.value


# ------------------------------------------------------------------------------------------------------------- frames


@pytest.mark.parametrize(
    ("fmt", "codec"),
    [("mp4", "libx264"), ("mov", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx-vp9"), ("webm", "libvpx"),
     ("avi", "mjpeg"), ("mpegts", "libx264"), ("3gp", "mpeg4")],
)  # fmt: skip
async def test_every_container(fmt: str, codec: str) -> None:
    video = await decoded(film(fmt=fmt, codec=codec))
    assert video.frames.shape == (4, 48, 64, 3) and video.frames.dtype == np.uint8 and video.frames.flags.c_contiguous
    assert video.fps == 2 and seen(video.frames) == [0, 5, 10, 15] and not video.sound.size
    assert np.abs(video.frames[:, 4, 4].astype(int) - (255, 0, 0)).max() < 20


async def test_a_video_without_a_stated_length() -> None:
    """As browsers record it."""
    video = await decoded(film(fmt="webm", codec="libvpx", options={"live": "1"}))
    assert seen(video.frames) == [0, 5, 10, 15]


@pytest.mark.parametrize(
    ("limits", "fps", "numbers"),
    [
        ({"fps": 4}, 4, [0, 2, 5, 7, 10, 12, 15, 17]),
        ({"fps": 1}, 1, [0, 10]),
        ({"fps": 0.1}, 0.1, [0]),
        # No more than there are, no more than are allowed.
        ({"fps": 50, "max_frames": 99}, 10, list(range(20))),
        ({"max_frames": 3}, 1.5, [0, 6, 13]),
        ({"max_frames": 1}, 0.5, [0]),
    ],
)
async def test_the_rate(limits: dict[str, Any], fps: float, numbers: list[int]) -> None:
    video = await decoded(film(), **limits)
    assert video.fps == pytest.approx(fps) and seen(video.frames) == numbers


async def test_frames_at_uneven_times_are_sampled_evenly() -> None:
    video = await decoded(film(times=(0, 0.1, 0.2, 1.0, 1.1, 1.2, 3.0), fmt="matroska"))
    assert video.fps == pytest.approx(2) and seen(video.frames) == [0, 2, 3, 5, 5, 5, 6]


async def test_times_count_from_the_first_picture() -> None:
    video = await decoded(film(times=[4 + number / 10 for number in range(10)], fmt="matroska"))
    assert video.fps == 2 and seen(video.frames) == [0, 5]


async def test_a_single_picture() -> None:
    video = await decoded(film(times=(0.0,)))
    assert seen(video.frames) == [0] and video.fps == 2


@pytest.mark.parametrize(("rotation", "red"), [(90, "left"), (180, "bottom"), (-90, "right"), (270, "right")])
async def test_rotation(rotation: int, red: str) -> None:
    """Counterclockwise, as players show it."""
    for max_pixels in (1 << 16, 700):
        (frame, *_) = (await decoded(film(rotation=rotation), max_pixels=max_pixels)).frames
        height, width, _ = frame.shape
        assert (height > width) == (rotation != 180)
        edges = {
            "left": frame[height // 2, 1],
            "right": frame[height // 2, -2],
            "top": frame[1, width // 2],
            "bottom": frame[-2, width // 2],
        }
        assert max(edges, key=lambda name: int(edges[name][0]) - int(edges[name][2])) == red


async def test_frames_are_scaled_down() -> None:
    video = await decoded(film(width=320, height=200), max_pixels=1000)
    assert video.frames.shape == (4, 25, 40, 3) and seen(video.frames) == [0, 5, 10, 15]
    assert np.abs(video.frames[:, 4, 4].astype(int) - (255, 0, 0)).max() < 20


# -------------------------------------------------------------------------------------------------------------- sound


@pytest.mark.parametrize(
    ("fmt", "codec", "sound"),
    [("mp4", "libx264", "aac"), ("webm", "libvpx", "libopus"), ("matroska", "mpeg4", "flac")],
)
async def test_sound(fmt: str, codec: str, sound: str) -> None:
    video = await decoded(film(fmt=fmt, codec=codec, sound=sound), sound_s=5)
    assert video.sound.dtype == np.float32 and len(video.sound) == pytest.approx(32_000, abs=1200)
    assert np.sqrt(np.mean(video.sound[1600:30_000] ** 2)) == pytest.approx(0.3 / np.sqrt(2), rel=0.05)
    assert seen(video.frames) == [0, 5, 10, 15]
    spectrum = np.abs(np.fft.rfft(video.sound[:16_000]))
    assert spectrum.argmax() == pytest.approx(300, abs=2)


async def test_sound_that_is_not_asked_for_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(module, "decode_audio", fail)
    assert not (await decoded(film(sound="aac"))).sound.size


@pytest.mark.parametrize(("sound_from", "times_from"), [(0.5, 0.0), (0.0, 0.5)])
async def test_sound_and_pictures_that_do_not_begin_together(sound_from: float, times_from: float) -> None:
    data = film(
        fmt="matroska",
        times=[times_from + number / 10 for number in range(20)],
        sound="flac",
        sound_from=sound_from,
    )
    video = await decoded(data, sound_s=5)
    silent = 8000 if sound_from else 0
    assert not video.sound[: max(0, silent - 40)].any()
    assert np.abs(video.sound[silent + 40 : silent + 400]).max() > 0.25
    assert len(video.sound) == pytest.approx(40_000 if sound_from else 24_000, abs=40)


async def test_refused_sound() -> None:
    assert "use_audio_in_video" in (await refused(film(), sound_s=5)).message
    await refused(film(sound="aac"), "audio_too_long", sound_s=1)


# ------------------------------------------------------------------------------------------------------------- limits


async def test_limits() -> None:
    data = film(width=128, height=128)
    await refused(data, "video_too_long", max_seconds=1.9)
    await refused(film(fmt="webm", codec="libvpx", options={"live": "1"}), "video_too_long", max_seconds=1.9)
    await refused(data, "video_too_large", max_source_pixels=128 * 128 - 1)
    await refused(data, "video_too_large", 413, max_bytes=len(data) - 1)
    assert (await decoded(data, max_source_pixels=128 * 128, max_seconds=2, max_bytes=len(data))).fps == 2


async def test_the_work_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORK_PER_SECOND", 20 * 64 * 48 // 10 - 1)
    decodes: list[object] = []
    monkeypatch.setattr(module._Job, "_decode", lambda *_: decodes.append(1))
    await refused(film(), "video_too_large")
    monkeypatch.setattr(module, "_PACKETS_PER_SECOND", 1)
    await refused(film(), "video_too_long")
    assert not decodes


async def test_frames_that_are_larger_than_the_header_says() -> None:
    """Joined from two files whose headers differ: a transport stream has no header for the whole."""
    small, large = film(fmt="mpegts"), film(fmt="mpegts", width=256, height=256)
    await refused(small + large * 2, max_source_pixels=64 * 64)


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("fmt", ["mp4", "matroska", "avi"])
@pytest.mark.parametrize("kept", ["nothing", "a byte", "half"])
async def test_truncated(fmt: str, kept: str) -> None:
    """B102"""
    data = film(fmt=fmt, codec="mpeg4")
    await refused(data[: {"nothing": 0, "a byte": 1, "half": len(data) // 2}[kept]])


async def test_truncated_behind_its_index(tmp_path: Path) -> None:
    data = film(options={"movflags": "faststart"}, path=tmp_path / "film.mp4")
    assert data.index(b"moov") < data.index(b"mdat")
    for cut in (1, 10, 128, len(data) // 3):
        await refused(data[:-cut])


NO_VIDEOS = {
    "text": b"this is no video, but it is long enough",
    "playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "concat": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
    "sound": sound_file(),
    "a codec that is not listed": film(fmt="matroska", codec="ffv1"),
}


@pytest.mark.parametrize("name", NO_VIDEOS)
async def test_no_video(name: str) -> None:
    error = await refused(NO_VIDEOS[name])
    assert "passwd" not in error.message


@pytest.mark.parametrize(("fmt", "codec"), [("mp4", "libx264"), ("webm", "libvpx"), ("avi", "mjpeg")])
async def test_flipped_bytes_give_frames_or_a_refusal(fmt: str, codec: str) -> None:
    """B102"""
    chance = np.random.default_rng(3)
    whole = film(fmt=fmt, codec=codec, times=[number / 10 for number in range(8)], width=32, height=32)
    for _ in range(40):
        data = bytearray(whole)
        for at in chance.integers(0, len(data), 3):
            data[at] = chance.integers(0, 256)
        try:
            video = await decoded(bytes(data))
        except OmniError as error:
            assert error.code in ("invalid_video", "video_too_large", "video_too_long")
        else:
            assert video.frames.ndim == 4 and len(video.frames) <= 8 and video.fps > 0


async def test_who_leaves_stops_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    run = module._Job.run

    def noted(job: module._Job) -> Any:
        begun.set()
        assert job.stopped.wait(5)
        try:
            return run(job)
        finally:
            ended.set()

    monkeypatch.setattr(module._Job, "run", noted)
    monkeypatch.setattr(module._Job, "_decode", lambda *_: pytest.fail("it went on"))
    task = asyncio.create_task(decoded(film()))
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 5)
