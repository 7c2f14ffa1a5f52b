"""From the bytes of an upload to mono float32 samples: any common container, nothing but memory, limits all the way.

libav sees the bytes through a file object, probes them against a list of plain audio containers and decodes with a list
of audio codecs. Playlists, scripts and other formats that name files or addresses are on neither list, and every
protocol is switched off besides. Channels are mixed down and resampled as `graph.resample_to` says.

Containers that state their length must hold it, else the upload was cut short. MP3, AAC and Ogg are self-synchronising:
there a shorter stream is a whole one, and up to one packet in twenty may be damaged.
"""

import asyncio
import io
import struct
import threading
from dataclasses import dataclass, field

import av
import numpy as np
from av.error import FFmpegError

from omni_common.errors import OmniError, invalid
from omni_gateway.media.graph import FilterChain, Samples, resample_to
from omni_gateway.media.pool import DECODERS

_CONTAINERS = "wav,w64,aiff,caf,au,amr,mp3,flac,ogg,matroska,webm,mov,mp4,m4a,aac,avi,mpegts"
_SELF_SYNCHRONISING = {"mp3", "aac", "ogg"}
#: The duration is guessed from the bit rate there, so it refuses nothing.
_GUESSED = {"mp3", "aac"}
_CODECS = "mp3,mp3float,flac,opus,libopus,vorbis,libvorbis,aac,alac,amrnb,amrwb"
_CODEC_FAMILIES = ("pcm_", "adpcm_")
_OPTIONS = {"protocol_whitelist": "none", "format_whitelist": _CONTAINERS, "max_streams": "16"}
_CHANNELS = range(1, 9)
#: In Hz. A single packet at 1 Hz would become gigabytes at 16 kHz.
_RATES = range(4_000, 384_001)
#: Highest of the rates that a sound keeps: no model hears beyond it.
_HIGHEST_OWN = 48_000
#: A second of sound comes in 400 packets at most (Opus of 2.5 ms); more is made to keep the decoder busy.
_PACKETS_PER_SECOND = 1_000
#: Shorter than any recogniser can use; a file without a single frame ends here too.
_MIN_SECONDS = 0.01
#: Full scale is 1. Samples of 16 bits that somebody stored as floats are understood by models all the same; still
#: larger ones become features that are no numbers.
_LOUDEST = 2.0**16


async def decode_audio(
    data: bytes, *, max_seconds: float, max_bytes: int, rate: int = 16_000, param: str | None = None
) -> Samples:
    """Return mono float32 [n] at `rate` Hz, nominally in [-1, 1].

    Raises OmniError with `param`: 413 `audio_too_large`, 400 `audio_too_long`, 400 `invalid_audio` for bytes that are
    not audio, are damaged, or end too early. Decoding stops soon after its task was cancelled.
    """
    return await _decode(_Job(data, max_seconds, rate, param), max_bytes)


async def decode_at_own_rate(
    data: bytes, *, max_seconds: float, max_bytes: int, param: str | None = None
) -> tuple[Samples, int]:
    """As `decode_audio`, but at the sound's own rate, which comes along in Hz: at most 48 kHz."""
    job = _Job(data, max_seconds, 0, param)
    return await _decode(job, max_bytes), job.rate


async def _decode(job: "_Job", max_bytes: int) -> Samples:
    if len(job.data) > max_bytes:
        text = f"the audio has {len(job.data)} bytes, more than {max_bytes}"
        raise invalid(text, job.param, code="audio_too_large", status=413)
    try:
        return await DECODERS.run(job.run)
    except asyncio.CancelledError:
        job.stopped.set()
        raise


def _bad(reason: str, param: str | None) -> OmniError:
    return invalid(f"the audio cannot be decoded: {reason}", param, code="invalid_audio")


@dataclass(slots=True)
class _Job:
    data: bytes
    max_seconds: float
    #: Of the samples that come out; 0: the sound's own, which is then written here.
    rate: int
    param: str | None
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Samples:
        if not self.data:
            raise _bad("it is empty", self.param)
        if _cut_wav(self.data):
            raise _bad("it ends before the length that its header states", self.param)
        try:
            with av.open(io.BytesIO(self.data), "r", options=_OPTIONS, metadata_errors="replace") as container:
                return self._decode(container)
        except (FFmpegError, ValueError, OverflowError):
            # libav's message may hold anything; the client gets none of it.
            raise _bad("it is damaged, or no audio that this server reads", self.param) from None

    def _decode(self, container: "av.container.InputContainer") -> Samples:
        if not container.streams.audio:
            raise _bad("it has no audio track", self.param)
        stream = container.streams.audio[0]
        # PyAV leaves the context out when no decoder is known; its stubs do not say so.
        codec = getattr(stream.codec_context, "name", "")
        if codec not in _CODECS.split(",") and not codec.startswith(_CODEC_FAMILIES):
            raise _bad("its codec is not supported", self.param)
        names = set(container.format.name.split(","))
        stated = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
        if stated > self.max_seconds and not names & _GUESSED:
            raise self._too_long()
        stream.codec_context.thread_count = 1

        mixer: _Mixer | None = None
        blocks: list[Samples] = []
        have = packets = damaged = 0
        for packet in container.demux(stream):
            if self.stopped.is_set():
                raise _bad("the request was cancelled", self.param)
            packets += 1
            if packets > _PACKETS_PER_SECOND * (self.max_seconds + 1):
                raise self._too_long()
            try:
                frames = packet.decode()
            except FFmpegError:
                damaged += 1
                continue
            for frame in frames:
                if mixer is None:
                    # What the container says may be half of it, where the codec doubles the rate (HE-AAC).
                    self.rate = self.rate or min(frame.sample_rate, _HIGHEST_OWN)
                    mixer = _Mixer(self.rate)
                blocks.append(mixer.push(frame))
                have += blocks[-1].size
            if have > self.max_seconds * self.rate:
                raise self._too_long()
        if mixer is None:
            raise _bad("it holds no sound", self.param)
        blocks.append(mixer.finish())
        samples = np.concatenate(blocks)
        seconds = samples.size / self.rate
        if seconds > self.max_seconds:
            raise self._too_long()
        if seconds < _MIN_SECONDS:
            raise _bad("it holds no sound", self.param)
        if names & _SELF_SYNCHRONISING:
            if damaged > max(1, packets // 20):
                raise _bad("it is damaged", self.param)
        elif damaged or seconds < stated - max(0.5, 0.02 * stated):
            raise _bad("it is damaged, or ends before the length that it states", self.param)
        if not np.isfinite(samples).all():
            raise _bad("it holds samples that are not numbers", self.param)
        if np.abs(samples).max() > _LOUDEST:
            raise _bad("its samples are far beyond full scale", self.param)
        return samples

    def _too_long(self) -> OmniError:
        return invalid(f"the audio is longer than {self.max_seconds:g} s", self.param, code="audio_too_long")


class _Mixer:
    """Frames of any layout and rate to mono; a stream may change both on its way (chained Ogg, spliced MP3)."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._shape: tuple[int, str, str] | None = None
        self._chain: FilterChain | None = None

    def push(self, frame: av.AudioFrame) -> Samples:
        shape = (frame.sample_rate, frame.layout.name, frame.format.name)
        if shape == self._shape and self._chain is not None:
            return self._chain.push(frame)
        if frame.sample_rate not in _RATES or frame.layout.nb_channels not in _CHANNELS:
            raise ValueError(f"frames of shape {shape}")
        before = self.finish()
        self._shape, self._chain = shape, FilterChain(*shape, [resample_to(self._rate)])
        return np.concatenate([before, self._chain.push(frame)])

    def finish(self) -> Samples:
        return self._chain.push(None) if self._chain is not None else np.zeros(0, np.float32)


def _cut_wav(data: bytes) -> bool:
    """True when a WAV states more data than there is: libav would take the file as a shorter one.

    Sizes that recorders write before they know better (0, and 0x7FFFF000 or more) state nothing.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return False
    at = 12
    while at + 8 <= len(data):
        size = struct.unpack_from("<I", data, at + 4)[0]
        if data[at : at + 4] == b"data":
            return bool(size < 0x7FFFF000 and at + 8 + size > len(data))
        at += 8 + size + size % 2
    return False
