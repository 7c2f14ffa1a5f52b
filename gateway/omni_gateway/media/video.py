"""From the bytes of a video to a few upright RGB frames at even times, and its sound.

As in `decode.py`, libav sees the bytes through a file object and may use what is on short lists. The packets are read
first, whole: they say how long the video is and how much there is to decode, whatever its header states, and nothing
is decoded before that was compared with the limits.

Frame k is what is to be seen at k / fps seconds after the first picture, as a player would show it, so frames that come
at uneven times are sampled evenly in time. `fps` is what was asked for, or less: as many as the video has, or as few as
`max_frames` allow over its length.
"""

import asyncio
import io
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from av.stream import Disposition

from omni_common.errors import OmniError, invalid
from omni_gateway.media.decode import decode_audio
from omni_gateway.media.graph import EMPTY, Samples
from omni_gateway.media.image import Pixels, fit
from omni_gateway.media.inline import too_large
from omni_gateway.media.pool import DECODERS

_CONTAINERS = "mov,mp4,matroska,webm,ogg,avi,mpegts"
#: There a lost packet is part of life, and a file has no end that it must reach.
_SELF_SYNCHRONISING = {"mpegts", "ogg"}
_CODECS = "h264,hevc,av1,libdav1d,libaom-av1,vp8,vp9,libvpx,libvpx-vp9,mpeg4,mpeg1video,mpeg2video,h263,mjpeg,theora"
#: Seconds of sound that every video with sound has.
_LEAST_SOUND_S = 0.1
#: Most packets a second; more are made to keep the reader busy.
_PACKETS_PER_SECOND = 1_000
#: What a second of video may cost, in pixels to decode: those of 1080p at 60 frames a second.
_WORK_PER_SECOND = 1920 * 1080 * 60


@dataclass(frozen=True, slots=True)
class VideoLimits:
    max_seconds: float
    max_bytes: int
    max_source_pixels: int
    #: Frames a second to sample, frames in all, pixels a frame.
    fps: float
    max_frames: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    #: uint8 [n, height, width, 3], RGB, upright; n is at least 1.
    frames: Pixels
    #: Frames a second: frame k stands for the time k / fps.
    fps: float
    #: Float32 [n], mono, from the first frame's time on; empty when it was not asked for.
    sound: Samples


async def decode_video(
    data: bytes, limits: VideoLimits, *, param: str, sound_s: float | None = None, rate: int = 16_000
) -> DecodedVideo:
    """Frames of a video, and with `sound_s` its sound at `rate` Hz, of at most so many seconds.

    Raises OmniError with `param`: 413 `video_too_large` for the bytes, 400 `video_too_large` for the pixels, 400
    `video_too_long`, 400 `invalid_video` for what is no video, damaged, or ends too early; for the sound as
    `decode_audio`. Decoding stops soon after its task was cancelled.
    """
    if len(data) > limits.max_bytes:
        raise too_large("video", len(data), limits.max_bytes, param)
    job = _Job(data, limits, sound_s is not None, param)
    try:
        frames, fps, lead_s = await DECODERS.run(job.run)
    except asyncio.CancelledError:
        job.stopped.set()
        raise
    if sound_s is None:
        return DecodedVideo(frames, fps, EMPTY)
    sound = await decode_audio(data, max_seconds=sound_s, max_bytes=limits.max_bytes, rate=rate, param=param)
    return DecodedVideo(frames, fps, _aligned(sound, lead_s, rate))


def _aligned(sound: Samples, lead_s: float, rate: int) -> Samples:
    """`sound` that begins `lead_s` seconds after the pictures (or before them), as if both began together."""
    lead = round(lead_s * rate)
    aligned = np.concatenate([np.zeros(lead, np.float32), sound]) if lead > 0 else sound[-lead:]
    # No model hears nothing at all: a sound that ended before the pictures began is silence.
    missing = round(_LEAST_SOUND_S * rate) - len(aligned)
    return np.pad(aligned, (0, missing)) if missing > 0 else aligned


@dataclass(slots=True)
class _Read:
    """What a container holds of one video stream."""

    packets: list["av.Packet[Any]"] = field(default_factory=list)
    #: In seconds, of the packets that are shown.
    times: list[float] = field(default_factory=list)
    #: Where the last packet of any stream ends, in seconds.
    end: float = 0.0
    corrupt: int = 0

    @property
    def start(self) -> float:
        return min(self.times)

    @property
    def interval(self) -> float:
        """Mean time from one picture to the next; 0 when there is but one."""
        shown = len(self.times) - 1
        return (max(self.times) - self.start) / shown if shown else 0.0

    @property
    def duration(self) -> float:
        return max(self.times) - self.start + self.interval


@dataclass(slots=True)
class _Job:
    data: bytes
    limits: VideoLimits
    with_sound: bool
    param: str
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> tuple[Pixels, float, float]:
        """Frames, frames a second, and how many seconds after the first picture the sound begins."""
        # Frames of other sizes than the header states are refused by the decoder itself.
        limit = {"max_pixels": str(self.limits.max_source_pixels)}
        options = {"protocol_whitelist": "none", "format_whitelist": _CONTAINERS, "max_streams": "16", **limit}
        try:
            with av.open(io.BytesIO(self.data), "r", options=options, metadata_errors="replace") as container:
                stream = self._stream(container)
                stream.codec_context.options = limit
                read = self._read(container, stream)
                lead = self._lead(container, read) if self.with_sound else 0.0
                frames, fps = self._decode(stream, read)
                return frames, fps, lead
        except (FFmpegError, ValueError, OverflowError, MemoryError):
            # libav's message may hold anything; the client gets none of it.
            raise self._bad("it is damaged, or no video that this server reads") from None

    def _stream(self, container: "av.container.InputContainer") -> "av.VideoStream":
        pictures = (s for s in container.streams.video if not s.disposition & Disposition.attached_pic)
        stream = next(pictures, None)
        if stream is None:
            raise self._bad("it has no pictures")
        # PyAV leaves the context out when no decoder is known; its stubs do not say so.
        if getattr(stream.codec_context, "name", "") not in _CODECS.split(","):
            raise self._bad("its codec is not supported")
        if self.with_sound and not container.streams.audio:
            raise self._bad("it has no sound, which use_audio_in_video asks for")
        if stream.width * stream.height > self.limits.max_source_pixels:
            text = f"the video has frames of more than {self.limits.max_source_pixels} pixels"
            raise invalid(text, self.param, code="video_too_large")
        stated = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
        if stated > self.limits.max_seconds:
            raise self._too_long()
        stream.codec_context.thread_count = 1
        return stream

    def _read(self, container: "av.container.InputContainer", stream: "av.VideoStream") -> _Read:
        read = _Read()
        most = _PACKETS_PER_SECOND * (self.limits.max_seconds + 1)
        rate = float(stream.average_rate or stream.base_rate or 25)
        for count, packet in enumerate(container.demux()):
            self._go_on()
            if count > most:
                raise self._too_long()
            at = packet.pts if packet.pts is not None else packet.dts
            time = float(at * packet.time_base) if at is not None else None
            if time is not None:
                read.end = max(read.end, time + float((packet.duration or 0) * packet.time_base))
            if packet.stream.index != stream.index:
                continue
            read.packets.append(packet)
            if packet.size and not packet.is_discard:
                read.corrupt += packet.is_corrupt
                # Containers without times (some AVI) have their frames at even ones.
                read.times.append(len(read.times) / rate if time is None else time)
        if not read.times:
            raise self._bad("it has no pictures")
        if read.duration > self.limits.max_seconds:
            raise self._too_long()
        if len(read.times) * stream.width * stream.height > _WORK_PER_SECOND * self.limits.max_seconds:
            raise invalid("the video has too many and too large frames", self.param, code="video_too_large")
        self._check_end(container, read)
        return read

    def _check_end(self, container: "av.container.InputContainer", read: _Read) -> None:
        if set(container.format.name.split(",")) & _SELF_SYNCHRONISING:
            return
        stated = (container.duration or 0) / av.time_base
        reached = read.end - min(0.0, (container.start_time or 0) / av.time_base)
        lasts = [stream.index_entries[-1] for stream in container.streams if len(stream.index_entries)]
        beyond = any(last.pos + last.size > len(self.data) for last in lasts)
        if read.corrupt or beyond or reached < stated - max(0.5, 0.05 * stated):
            raise self._bad("it is damaged, or ends before the length that it states")

    def _lead(self, container: "av.container.InputContainer", read: _Read) -> float:
        sound = container.streams.audio[0]
        start = float(sound.start_time * sound.time_base) if sound.start_time and sound.time_base else 0.0
        return max(-self.limits.max_seconds, min(start - read.start, read.duration))

    def _decode(self, stream: "av.VideoStream", read: _Read) -> tuple[Pixels, float]:
        limits, duration = self.limits, read.duration
        fps = min(limits.fps, 1.0 / read.interval) if read.interval > 0.0 else limits.fps
        if duration * fps > limits.max_frames:
            fps = limits.max_frames / duration
        # Without what rounding leaves over a whole number.
        count = min(limits.max_frames, max(1, math.ceil(duration * fps - 1e-6)))
        frames: Pixels | None = None
        for number, frame in self._sampled(self._decoded(stream, read), read, fps, count):
            pixels = _pixels(frame, limits.max_pixels, None if frames is None else frames.shape[1:3])
            if frames is None:
                frames = np.empty((count, *pixels.shape), np.uint8)
            frames[number] = pixels
        if frames is None:
            raise self._bad("it is damaged")
        return frames, fps

    def _decoded(self, stream: "av.VideoStream", read: _Read) -> Iterator["av.VideoFrame"]:
        """Frames in the order of their times. Raises for more than one damaged packet in twenty."""
        damaged = 0
        for packet in read.packets:
            self._go_on()
            try:
                yield from packet.decode()
            except FFmpegError:
                damaged += 1
        if damaged > len(read.packets) // 20:
            raise self._bad("it is damaged")

    def _sampled(
        self, frames: Iterator["av.VideoFrame"], read: _Read, fps: float, count: int
    ) -> Iterator[tuple[int, "av.VideoFrame"]]:
        """(k, the frame that is to be seen at k / fps) for every k below `count`."""
        shown: av.VideoFrame | None = None
        number = 0
        for index, frame in enumerate(frames):
            time = frame.time - read.start if frame.time is not None else index * read.interval
            # Times are whole multiples of a container's unit: half a millisecond is none of a difference.
            while shown is not None and number < count and number / fps < time - 5e-4:
                yield number, shown
                number += 1
            shown = frame
        while shown is not None and number < count:
            yield number, shown
            number += 1

    def _go_on(self) -> None:
        if self.stopped.is_set():
            raise self._bad("the request was cancelled")

    def _too_long(self) -> OmniError:
        return invalid(f"the video is longer than {self.limits.max_seconds:g} s", self.param, code="video_too_long")

    def _bad(self, reason: str) -> OmniError:
        return invalid(f"the video cannot be decoded: {reason}", self.param, code="invalid_video")


def _pixels(frame: "av.VideoFrame", max_pixels: int, shape: tuple[Any, ...] | None) -> Pixels:
    """uint8 [height, width, 3], upright; of `shape` (height, width) if given, which a later frame may not have."""
    turns = round(frame.rotation / 90) % 4
    if shape is None:
        width, height = fit(frame.width, frame.height, max_pixels)
    else:
        height, width = shape if turns % 2 == 0 else reversed(shape)
    pixels = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="AREA")
    return np.rot90(pixels, turns)
