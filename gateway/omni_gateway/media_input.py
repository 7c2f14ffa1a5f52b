"""A conversation and its decoded media as the pieces that enter a pipeline, each small against any arena.

An edge from the client that carries nothing but audio counts samples, as a recogniser's does. Every other one counts
pieces: the conversation first, if that stage takes it, then images, audios and videos, each kind by number.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from omni_common.frames import Audio, Body, Image, Prompt, Video
from omni_common.pipeline import Task
from omni_gateway.audio_input import RATE, audio_pieces, given_audio
from omni_gateway.media.graph import Samples
from omni_gateway.media.image import Pixels
from omni_gateway.stream import Arrays, Given

#: Bytes of one piece of a video.
_PIECE_BYTES = 8 << 20


@dataclass(slots=True)
class Media:
    """What a conversation holds besides words; parts of its messages name each by its place in these lists."""

    #: uint8 [height, width, 3]
    images: list[Pixels] = field(default_factory=list)
    #: float32 [n], mono, 16 kHz
    audios: list[Samples] = field(default_factory=list)
    #: uint8 [n, height, width, 3], and frames a second
    videos: list[tuple[Pixels, float]] = field(default_factory=list)

    @property
    def modalities(self) -> list[str]:
        found = {"audio": self.audios, "image": self.images, "video": self.videos}
        return [modality for modality, items in found.items() if items]


def given_input(task: Task, prompt: Prompt, media: Media) -> list[Given]:
    """All input of one request, edge after edge."""
    entry = task.input
    given: list[Given] = []
    for stage in dict.fromkeys([entry["text"], *entry.values()]):
        if [modality for modality in entry if entry[modality] == stage] == ["audio"]:
            given += given_audio(media.audios)
            continue
        pieces = [piece for piece in _pieces(prompt, media) if entry[piece[0]] == stage]  # type: ignore[index]
        for number, (modality, body, arrays) in enumerate(pieces):
            given.append(Given(modality, body, number, number + 1, number == len(pieces) - 1, arrays))
    return given


def _pieces(prompt: Prompt, media: Media) -> Iterator[tuple[str, Body, Arrays]]:
    yield "text", prompt, {}
    for index, pixels in enumerate(media.images):
        yield "image", Image(index), {"pixels": pixels}
    for index, samples in audio_pieces(media.audios):
        yield "audio", Audio(RATE, index), {"samples": samples}
    for index, (frames, fps) in enumerate(media.videos):
        step = max(1, _PIECE_BYTES // frames[0].nbytes)
        for start in range(0, len(frames), step):
            end = start + step >= len(frames)
            yield "video", Video(index, fps, end), {"frames": frames[start : start + step]}
