"""Decoded sound of a request as input for a stage: pieces that are small against any arena."""

from collections.abc import Iterator, Sequence

from omni_common.frames import Audio
from omni_gateway.media.graph import Samples
from omni_gateway.stream import Given

#: What stages hear, in Hz.
RATE = 16_000
_PIECE_S = 30


def audio_pieces(audios: Sequence[Samples]) -> Iterator[tuple[int, Samples]]:
    """(index, samples) of one audio after the other, each in pieces of at most 30 s."""
    step = _PIECE_S * RATE
    for index, samples in enumerate(audios):
        for start in range(0, max(len(samples), 1), step):
            yield index, samples[start : start + step]


def given_audio(audios: Sequence[Samples]) -> list[Given]:
    """`audios` (each float32 [n], mono, 16 kHz) one after another, at positions in samples over all of them."""
    cuts = list(audio_pieces(audios))
    given = []
    position = 0
    for number, (index, samples) in enumerate(cuts):
        end = position + len(samples)
        last = number == len(cuts) - 1
        given.append(Given("audio", Audio(rate=RATE, index=index), position, end, last, {"samples": samples}))
        position = end
    return given
