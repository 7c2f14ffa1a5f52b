"""A pipeline that clones voices, for the rig bus, and sounds to clone."""

import base64
import io
from typing import Any

import msgspec
import numpy as np
import soundfile

from omni_common.pipeline import Pipeline
from unit.gateway.rig_bus import RATE


def cloner(**changes: Any) -> Pipeline:
    """As a family of this kind has it: the talker hears the sound before it reads the text."""
    spec: dict[str, Any] = {
        "name": "cloner",
        "aliases": ["mimic"],
        "stages": {
            "talker": {"engine": "transformers", "params": {"voice": "ann", "max_tokens": 64}},
            "code2wav": {"engine": "codec", "inputs": ["talker"]},
        },
        "tasks": {"speech": {"input": {"text": "talker", "audio": "talker"}, "output": {"audio": "code2wav"}}},
        "audio_rate": RATE,
        "voices": [{"id": "ann", "aliases": ["alloy"]}, {"id": "bob"}],
        "limits": {"speech_chars": 400, "audio_mib": 4},
    }
    return msgspec.convert({**spec, **changes}, Pipeline)


def hum(seconds: float = 2.0, hz: float = 440.0, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """float64 [n, channels], the same on every channel."""
    wave = 0.3 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)
    return np.repeat(wave[:, None], channels, axis=1)


def sound_file(
    seconds: float = 2.0,
    hz: float = 440.0,
    rate: int = RATE,
    channels: int = 1,
    form: str = "WAV",
    subtype: str | None = None,
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, hum(seconds, hz, rate, channels), rate, format=form, subtype=subtype)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "audio/wav") -> str:
    return f"data:{kind};base64,{base64_of(data)}"


def pitch(samples: np.ndarray, rate: int = RATE) -> float:
    """In Hz, of the loudest tone."""
    return float(np.argmax(np.abs(np.fft.rfft(samples * np.hanning(len(samples))))) * rate / len(samples))
