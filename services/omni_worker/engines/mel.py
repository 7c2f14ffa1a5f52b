"""The log-mel spectrogram that Whisper's encoder takes.

Formula: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 2.2, in the exact
form of openai/whisper's `audio.py`; the filters are Slaney's (Auditory Toolbox, 1998): bands of equal width in mel,
linear in frequency below 1 kHz and logarithmic above, each triangle of unit area.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Hz.
RATE = 16_000
#: Samples: length of the Fourier transform, and from one frame to the next (10 ms).
N_FFT = 400
HOP = 160

_LINEAR_HZ = 200.0 / 3  # Hz a mel below the break
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ
_LOG_STEP = np.log(6.4) / 27  # ln(Hz) a mel above the break


def log_mel(samples: Floats, frames: int, n_mels: int = 80) -> Floats:
    """Log-mel spectrogram float32 [n_mels, frames] of the first `frames` * 10 ms of `samples`.

    `samples`: float32 [n] at 16 kHz, full scale 1; shorter audio is padded with silence. Values are log10 of the power
    in each band, limited to 8 below the loudest value, then scaled by x -> (x + 4) / 4.
    """
    half = N_FFT // 2
    padded = np.zeros(frames * HOP + half, np.float32)
    head = samples[: len(padded)]
    padded[: len(head)] = head
    padded = np.concatenate([padded[half:0:-1], padded])
    strided = np.lib.stride_tricks.sliding_window_view(padded, N_FFT)[::HOP][:frames]
    spectrum = np.fft.rfft(strided * _hann())
    power = spectrum.real**2 + spectrum.imag**2
    bands = np.log10(np.maximum(_filters(n_mels) @ power.T, 1e-10))
    result: Floats = (np.maximum(bands, bands.max() - 8.0) + 4.0) / 4.0
    return result


@cache
def _hann() -> Floats:
    """Periodic Hann window, float32 [N_FFT]."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)).astype(np.float32)


@cache
def _filters(n_mels: int) -> Floats:
    """Slaney's mel filters from 0 to 8 kHz, float32 [n_mels, N_FFT // 2 + 1]."""
    top = _BREAK_MEL + np.log(RATE / 2 / _BREAK_HZ) / _LOG_STEP
    mels = np.linspace(0.0, top, n_mels + 2)
    edges = np.where(mels < _BREAK_MEL, mels * _LINEAR_HZ, _BREAK_HZ * np.exp(_LOG_STEP * (mels - _BREAK_MEL)))
    bins = np.fft.rfftfreq(N_FFT, 1 / RATE)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))
    filters: Floats = (np.maximum(triangles, 0.0) * 2 / (high - low)).astype(np.float32)
    return filters
