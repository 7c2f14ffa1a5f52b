"""What the tests look at in encoded sound."""

import io
import wave
from dataclasses import dataclass

import av
import numpy as np

#: Of `pcm` and `pcm16`, in Hz.
RATE = 24_000
#: Amplitude of -40 dB under full scale.
AUDIBLE = 10 ** (-40 / 20)


@dataclass(frozen=True)
class Decoded:
    """float32 [n], mono."""

    samples: np.ndarray
    rate: int
    container: str
    codec: str

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def decode(data: bytes) -> Decoded:
    """A whole file by ffmpeg. Raises av.error.FFmpegError for what is none; it must have one mono stream."""
    with av.open(io.BytesIO(data), "r") as container:
        [stream] = container.streams.audio
        assert len(container.streams) == 1 and stream.codec_context.layout.nb_channels == 1
        resampler = av.AudioResampler(format="flt", layout="mono")
        frames = [out for frame in container.decode(stream) for out in resampler.resample(frame)]
        frames += resampler.resample(None)
        samples = np.concatenate([frame.to_ndarray()[0] for frame in frames])
        return Decoded(samples, stream.codec_context.sample_rate, container.format.name, stream.codec_context.name)


def from_pcm(data: bytes) -> np.ndarray:
    """float32 [n] of 16-bit little endian samples; they must be whole ones."""
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def wav(pcm: bytes, rate: int = RATE) -> bytes:
    """A file of 16-bit mono samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(pcm)
    return file.getvalue()


def is_audible(data: bytes) -> bool:
    """Some sample of `pcm` is above -40 dBFS."""
    return bool((np.abs(from_pcm(data)) > AUDIBLE).any())


def magic(data: bytes) -> str:
    """The format that the first bytes tell."""
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return "wav"
    if data.startswith(b"fLaC"):
        return "flac"
    if data.startswith(b"OggS") and b"OpusHead" in data[:64]:
        return "opus"
    if data.startswith(b"ID3") or (data[0] == 0xFF and data[1] & 0xE6 == 0xE2):
        return "mp3"
    if data[0] == 0xFF and data[1] & 0xF6 == 0xF0:
        return "aac"
    return "pcm"
