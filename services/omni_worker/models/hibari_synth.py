"""Any stretch of an utterance's waveform, without the rest of it.

`hibari.dsp.synth` makes a whole utterance by one inverse STFT (n_fft 1200, hop 300, Hann) of

    S = exp(lh) e^{i pi tanh(theta)} STFT(pulses) + exp(ln) Z + exp(lr) e^{i phi}

The same formula is evaluated here for a few frames at a time. The
pulse train comes from F0 alone, which is known for the whole utterance, so it carries its phase across stretches; the
noise Z is addressed by (seed, unit, frame); the overlap is computed again from the two frames behind and the one
before. A stretch therefore depends on its position only, and can be made again at any time.
"""

import numpy as np
from hibari import dsp
from numpy.typing import NDArray

from omni_worker.models.hibari_graph import CONTEXT

Floats = NDArray[np.float32]

RATE: int = dsp.SR
HOP: int = dsp.HOP
BINS = dsp.N_FFT // 2 + 1
#: Frames before and behind an output frame whose windows reach into it (the STFT is centred).
BEFORE, BEHIND = 1, 2
_HOPS = dsp.N_FFT // HOP
#: Squared window in hops [4, 300], whose overlapping sum normalises the inverse STFT.
_POWER = (dsp.WIN * dsp.WIN).reshape(_HOPS, HOP)
#: Philox blocks of four 64-bit words that a frame's noise takes: one word a bin.
_BLOCKS = -(-BINS // 4)


def noise(seed: int, unit: int, start: int, end: int) -> NDArray[np.complex64]:
    """Complex normal noise of frames [start, end) of a unit, [frames, 601] complex64, unit variance in each part.

    Philox4x64-10 keyed by (seed, unit) with the frame as its counter, through Box and Muller's transform: every frame
    takes the same number of words, so that it can be addressed.
    """
    key = (seed & 0xFFFF_FFFF_FFFF_FFFF) | unit << 64
    words = np.random.Philox(key=key, counter=start * _BLOCKS).random_raw((end - start) * _BLOCKS * 4)
    halves = words.reshape(end - start, -1)[:, :BINS].copy().view(np.uint32).reshape(end - start, BINS, 2)
    uniform = (halves.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    radius = np.sqrt(-2.0 * np.log(uniform[..., 0]))
    angle = (2.0 * np.pi) * uniform[..., 1]
    out = np.empty(radius.shape, np.complex64)
    np.multiply(radius, np.cos(angle), out=out.real)
    np.multiply(radius, np.sin(angle), out=out.imag)
    return out


class Source:
    """The pulse train of one utterance, ready to be transformed from any frame.

    `f0` is [F] float32 in Hz; F must be at least 3 (the reflected edges).
    """

    def __init__(self, f0: Floats) -> None:
        padded = np.pad(dsp.pulses(f0), dsp.N_FFT // 2, mode="reflect")
        self._windows = np.lib.stride_tricks.sliding_window_view(padded, dsp.N_FFT)[::HOP]

    def spectrum(self, start: int, end: int) -> NDArray[np.complex64]:
        """STFT of frames [start, end), [frames, 601] complex64."""
        spectrum: NDArray[np.complex64] = dsp.rfft(self._windows[start:end] * dsp.WIN_SRC, 1)
        return spectrum


def frames_for(start: int, end: int, total: int) -> tuple[int, int]:
    """Frames whose spectra are needed for the samples of frames [start, end) of `total`."""
    return max(0, start - BEFORE), min(total, end + BEHIND)


def context_for(first: int, stop: int, total: int) -> tuple[int, int]:
    """Latent frames that the decoder must see to give the spectra of frames [first, stop) of `total`."""
    return max(0, first - CONTEXT), min(total, stop + CONTEXT)


def render(
    spectra: list[Floats], source: NDArray[np.complex64], z: NDArray[np.complex64], start: int, end: int, total: int
) -> Floats:
    """Samples of frames [start, end) of an utterance of `total` frames: [(end - start) * 300] float32.

    `spectra` (the decoder's five, each [601, n]), `source` and the noise `z` ([n, 601]) cover the n frames of
    `frames_for(start, end, total)`.
    """
    lh, theta, ln, lr, phi = (part.T for part in spectra)
    spectrum = _polar(dsp.ex(lh), np.tanh(theta) * np.float32(np.pi))
    spectrum *= source
    spectrum += z * dsp.ex(ln)
    spectrum += _polar(dsp.ex(lr), phi)
    frames = dsp.irfft(spectrum, dsp.N_FFT, 1) * dsp.WIN
    hops = frames.reshape(len(frames), _HOPS, HOP)
    first = frames_for(start, end, total)[0]
    samples = np.zeros((end - start, HOP), np.float32)
    weight = np.zeros((end - start, HOP), np.float32)
    for k in range(_HOPS):
        # Hop k of frame j falls on output frame j + k - 2.
        offset = first + k - _HOPS // 2 - start
        low, high = max(0, -offset), min(len(hops), end - start - offset)
        samples[low + offset : high + offset] += hops[low:high, k]
        weight[low + offset : high + offset] += _POWER[k]
    samples /= weight
    return samples.reshape(-1)


def _polar(magnitude: Floats, angle: Floats) -> NDArray[np.complex64]:
    out = np.empty(magnitude.shape, np.complex64)
    np.multiply(magnitude, np.cos(angle), out=out.real)
    np.multiply(magnitude, np.sin(angle), out=out.imag)
    return out
