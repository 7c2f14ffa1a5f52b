"""From float32 samples to the bytes of one container, piece by piece.

Every format gets the same 16-bit samples: clipped to [-1, 1], times 32767, rounded. `wav`, `flac` and `pcm` hold
exactly those; `opus` in Ogg is cut to the exact length by its own header. A streamed `mp3` begins with the encoder's
delay (1105 samples) and ends with padding (up to a frame), `aac` the same with 1024 samples, 30 to 85 ms in all:
neither has a place to say so. A whole `mp3` says so, and players cut it. LAME leaves
`mp3` 0.45 dB quieter, as a guard against clipping. A streamed `flac` leaves its number of samples open.
"""

import io
import struct
from dataclasses import dataclass, field
from typing import Any, Protocol

import av
import numpy as np

from omni_common.errors import OmniError, invalid
from omni_gateway.media.graph import EMPTY, MonoChain, Samples, mono_frame, resample_to
from omni_gateway.media.owned import Owned

Int16 = np.ndarray[Any, np.dtype[np.int16]]

CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
FORMATS = tuple(CONTENT_TYPES)
#: `pcm` has no header: clients take it as 16-bit little endian mono of this rate, whatever rate a model has.
PCM_RATE = 24_000
_UNKNOWN = 0xFFFFFFFF


class Encoder(Owned):
    """One response's encoder. `fmt` is one of FORMATS, `rate` that of the samples in Hz.

    With `whole` every byte comes from `finish`, and the container states its true length. Otherwise each `feed` returns
    what can leave now, which may be nothing. `stage` is named when the samples are not numbers.
    """

    def __init__(self, fmt: str, rate: int, *, whole: bool = False, stage: str = "") -> None:
        super().__init__()
        if fmt not in CONTENT_TYPES:
            raise invalid(f"unknown audio format {fmt!r}: use one of {', '.join(FORMATS)}")
        self._fmt, self._rate, self._whole, self._stage = fmt, rate, whole, stage
        # Made by the first call in a pool thread: opening a codec takes milliseconds.
        self._writer: _Writer | None = None
        self._resampler: MonoChain | None = None

    async def feed(self, samples: Samples) -> bytes:
        """Bytes for float32 [n]. Raises OmniError 500 `numerical_error` for NaN and infinity."""
        return await self._call(self._feed, samples)

    async def finish(self) -> bytes:
        """The rest of the container. Nothing may be fed afterwards."""
        return await self._call(self._finish)

    def _open(self) -> "_Writer":
        if self._writer is None:
            self._writer = _open_writer(self._fmt, self._rate, self._whole)
            if self._writer.rate != self._rate:
                self._resampler = MonoChain(self._rate, [resample_to(self._writer.rate)])
        return self._writer

    def _feed(self, samples: Samples) -> bytes:
        if not np.isfinite(samples).all():
            raise OmniError("the model gave sound that is not a number", code="numerical_error", stage=self._stage)
        writer = self._open()
        ready = self._resampler.push(samples) if self._resampler else samples
        return writer.write(to_int16(ready)) if ready.size else b""

    def _finish(self) -> bytes:
        writer = self._open()
        rest = self._resampler.finish() if self._resampler else EMPTY
        return (writer.write(to_int16(rest)) if rest.size else b"") + writer.end()

    def _free(self) -> None:
        if self._writer is not None:
            self._writer.free()
        self._writer = self._resampler = None


async def encode(samples: Samples, fmt: str, rate: int, *, stage: str = "") -> bytes:
    """A whole file, with true lengths in its headers, from float32 [n]."""
    encoder = Encoder(fmt, rate, whole=True, stage=stage)
    try:
        return await encoder.feed(samples) + await encoder.finish()
    finally:
        await encoder.close()


def wav_header(rate: int, samples: int | None) -> bytes:
    """The 44 bytes before 16-bit mono samples. `None`: their number is not known yet (both sizes are 0xFFFFFFFF)."""
    data, riff = (_UNKNOWN, _UNKNOWN) if samples is None else (samples * 2, samples * 2 + 36)
    fields = (b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16, b"data", data)
    return struct.pack("<4sI4s4sIHHIIHH4sI", *fields)


def to_int16(samples: Samples) -> Int16:
    """Clip, then scale symmetrically, little endian."""
    return np.asarray(np.rint(np.clip(samples, -1.0, 1.0) * 32767.0), "<i2")


class _Writer(Protocol):
    """One format, synchronously: samples in, bytes out."""

    #: Of the samples that `write` takes, in Hz.
    rate: int

    def write(self, samples: Int16) -> bytes: ...

    def end(self) -> bytes: ...

    def free(self) -> None: ...


class _PcmWriter:
    def __init__(self) -> None:
        self.rate = PCM_RATE

    def write(self, samples: Int16) -> bytes:
        return samples.tobytes()

    def end(self) -> bytes:
        return b""

    def free(self) -> None:
        """Nothing is held."""


class _WavWriter:
    def __init__(self, rate: int, whole: bool) -> None:
        self.rate = rate
        self._blocks: list[bytes] | None = [] if whole else None
        self._begun = False

    def write(self, samples: Int16) -> bytes:
        if self._blocks is not None:
            self._blocks.append(samples.tobytes())
            return b""
        # Clients parse the header from the first piece alone, so it never leaves without samples.
        return self._header(None) + samples.tobytes()

    def end(self) -> bytes:
        if self._blocks is None:
            return self._header(None)
        data = b"".join(self._blocks)
        return self._header(len(data) // 2) + data

    def free(self) -> None:
        self._blocks = None

    def _header(self, samples: int | None) -> bytes:
        header = b"" if self._begun else wav_header(self.rate, samples)
        self._begun = True
        return header


@dataclass(frozen=True, slots=True)
class _Codec:
    container: str
    encoder: str
    sample_format: str
    #: Bits a second; 0: lossless.
    bit_rate: int
    #: Lowest rate used: encoder delays are counted in samples, and at 8 kHz they would be 190 ms.
    lowest: int = 0
    options: dict[str, str] = field(default_factory=dict)


_CODECS = {
    "mp3": _Codec("mp3", "libmp3lame", "s16p", 64_000, 24_000),
    "flac": _Codec("flac", "flac", "s16", 0),
    # A page would otherwise gather a second of sound before it leaves.
    "opus": _Codec("ogg", "libopus", "s16", 48_000, options={"page_duration": "100000"}),
    "aac": _Codec("adts", "aac", "fltp", 96_000, 24_000),
}


class _Sink:
    """What a streaming muxer writes into. It cannot seek, so no muxer leaves a field to be filled in at the end."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def write(self, data: bytes) -> int:
        self._buffer += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._buffer)
        self._buffer.clear()
        return data


class _LibavWriter:
    def __init__(self, codec: _Codec, rate: int, whole: bool) -> None:
        self.rate = _nearest_rate(codec.encoder, max(rate, codec.lowest))
        self._format = codec.sample_format
        self._file = io.BytesIO() if whole else None
        self._sink = _Sink()
        options = {"flush_packets": "1", **codec.options}
        self._container = av.open(self._file or self._sink, "w", format=codec.container, options=options)
        self._stream: Any = self._container.add_stream(
            codec.encoder, rate=self.rate, layout="mono", format=codec.sample_format
        )
        if codec.bit_rate:
            self._stream.codec_context.bit_rate = codec.bit_rate
        self._fed = 0

    def write(self, samples: Int16) -> bytes:
        block = samples.astype(np.float32) / np.float32(32768.0) if self._format == "fltp" else samples
        frame = mono_frame(block, self._format, self.rate, self._fed)
        self._fed += samples.size
        self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def end(self) -> bytes:
        if self._fed:
            self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.getvalue() if self._file else self._sink.take()

    def free(self) -> None:
        self._container.close()


def _open_writer(fmt: str, rate: int, whole: bool) -> _Writer:
    if fmt in ("pcm", "pcm16"):
        return _PcmWriter()
    if fmt == "wav":
        return _WavWriter(rate, whole)
    return _LibavWriter(_CODECS[fmt], rate, whole)


def _nearest_rate(encoder: str, rate: int) -> int:
    """`rate` if the encoder takes it, else the next higher one that it does, else its highest."""
    rates = av.Codec(encoder, "w").audio_rates
    if not rates or rate in rates:
        return rate
    return min((r for r in rates if r > rate), default=max(rates))
