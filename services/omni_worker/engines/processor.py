"""The `processor` engine: the input of an omni model, from a conversation and its media to ids and features.

It runs transformers' processor of a prepared checkpoint, on the engine thread, one medium a step and the jobs in turn.
What comes out is what the processor returns for the whole conversation at once, but for words of a user that read like
control tokens, which stay words (`processor_text`), and for videos of different frame rates, which each keep their own.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoProcessor
from transformers.utils import logging as library_log

from omni_common.errors import OmniError, invalid
from omni_common.frames import (
    Audio,
    AudioPart,
    Features,
    Image,
    ImagePart,
    Message,
    Prompt,
    PromptFacts,
    TextPart,
    Video,
    VideoPart,
)
from omni_worker.engine import Arrays, Job, LoadContext, Output, Piece
from omni_worker.engines.onnx import Onnx
from omni_worker.engines.processor_media import Array, Cache, Item, MediaProcessor, check_shape
from omni_worker.engines.processor_text import ChatText, Rendered, kind_of

T = TypeVar("T")
MediaPart = AudioPart | ImagePart | VideoPart


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """`options:` of the stage."""

    #: Tokens of prompt and answer together; 0: as many as the checkpoint's thinker has positions for.
    context: int = 0
    #: Room for processed media, in MiB.
    cache_mib: int = 256


@dataclass(slots=True)
class Media:
    """What has arrived of a job's media, by number."""

    images: dict[int, Array] = field(default_factory=dict)
    audios: dict[int, list[Array]] = field(default_factory=dict)
    videos: dict[int, list[Array]] = field(default_factory=dict)
    fps: dict[int, float] = field(default_factory=dict)

    def take(self, piece: Piece) -> None:
        """Copies, so that the sender gets its memory back before the job is complete."""
        body, arrays = piece.body, piece.arrays
        if isinstance(body, Image):
            check_shape(arrays["pixels"], np.uint8, 3)
            self.images[body.index] = arrays["pixels"].copy()
        elif isinstance(body, Audio):
            check_shape(arrays["samples"], np.float32, 1)
            self.audios.setdefault(body.index, []).append(arrays["samples"].copy())
        elif isinstance(body, Video):
            check_shape(arrays["frames"], np.uint8, 4)
            self.videos.setdefault(body.index, []).append(arrays["frames"].copy())
            self.fps[body.index] = body.fps

    def audio(self, index: int) -> Array:
        """float32 [n]"""
        return np.concatenate(_there(self.audios, index, "audio"))

    def audio_length(self, index: int) -> int:
        return sum(len(piece) for piece in _there(self.audios, index, "audio"))

    def video(self, index: int) -> tuple[Array, float]:
        """uint8 [n, height, width, 3], frames a second"""
        frames = _there(self.videos, index, "video")
        if len({piece.shape[1:] for piece in frames}) > 1 or not sum(len(piece) for piece in frames):
            raise invalid(f"Video {index} has no frames, or frames of different sizes.", "messages")
        if not self.fps[index] > 0.0:
            raise invalid(f"Video {index} has no frame rate.", "messages")
        return np.concatenate(frames), self.fps[index]

    def image(self, index: int) -> Array:
        """uint8 [height, width, 3]"""
        pixels = _there(self.images, index, "image")
        if not pixels.size:
            raise invalid(f"Image {index} is empty.", "messages")
        return pixels


class Preprocessing:
    """The model of this engine: text and media of one checkpoint. `Conversation` is a job of it."""

    def load(self, context: LoadContext) -> None:
        """Raises OmniError: `model_missing` when the prepared files are not there, `load_failed` when of no use."""
        try:
            options = msgspec.convert(context.options, Options)
        except msgspec.ValidationError as error:
            raise OmniError(f"options of a processor stage: {error}", code="invalid_config") from None
        folder = Path(context.models) / context.model
        if not (folder / "processor").is_dir():
            raise OmniError(f"{folder} is missing: run `omni prepare`", status=503, code="model_missing")
        library_log.set_verbosity_error()
        torch.set_num_threads(context.threads)
        context.progress("processor", 0.1)
        processor = AutoProcessor.from_pretrained(str(folder / "processor"), local_files_only=True)
        self.context = options.context or _positions(folder)
        self.cache = Cache(options.cache_mib << 20)
        self.text = ChatText(processor)
        self.media = MediaProcessor(processor, self.cache)
        context.progress("warm-up", 0.5)
        # Not through the cache of what clients send.
        warm = MediaProcessor(processor, Cache(0))
        warm.image(np.zeros((64, 64, 3), np.uint8))
        warm.audio(np.zeros(self.media.rate, np.float32), self.media.rate)
        warm.video(np.zeros((2, 64, 64, 3), np.uint8), 1.0)
        context.progress("warm-up", 1.0)

    def open(self, job: Job) -> "Conversation":
        return Conversation(job, self)


class Conversation:
    """One job: collects its input, then processes a medium an `advance`, the text with the first."""

    def __init__(self, job: Job, model: Preprocessing) -> None:
        self._request_id, self._model = job.request_id, model
        self._waiting = set(job.sources)
        self._prompt: Prompt | None = None
        self._media = Media()
        self._rendered: Rendered | None = None
        #: Parts that stand for media, not yet processed; the longest audio of all, in samples.
        self._todo: deque[MediaPart] = deque()
        self._longest = 0
        self._items: list[Item] = []

    @property
    def ready(self) -> bool:
        return not self._waiting

    def push(self, piece: Piece) -> None:
        if isinstance(piece.body, Prompt):
            self._prompt = piece.body
        elif isinstance(piece.body, Audio) and piece.body.rate != self._model.media.rate:
            raise OmniError(f"audio at {piece.body.rate} Hz, not {self._model.media.rate}", code="invalid_input")
        else:
            self._media.take(piece)
        if piece.last:
            self._waiting.discard(piece.source)

    def advance(self) -> Output | None:
        if self._rendered is None:
            self._rendered = self._begin()
        if self._todo:
            self._items.append(self._process(self._todo.popleft()))
        return None if self._todo else self._finish(self._rendered)

    def _begin(self) -> Rendered:
        """Check the conversation and tokenise its text; raises OmniError 400 when there is something missing."""
        if self._prompt is None or not self._prompt.messages:
            raise invalid("There are no messages.", "messages")
        messages = self._prompt.messages
        parts = [part for message in messages for part in message.parts if not isinstance(part, TextPart)]
        sounds = [sound for sound in map(_sound, parts) if sound >= 0]
        self._todo.extend(parts)
        self._longest = max(map(self._media.audio_length, sounds), default=0)
        rendered = self._model.text.render(self._prompt, _sounded(messages))
        pieces = rendered.pieces
        if [piece for piece in pieces if isinstance(piece, str)] != list(map(kind_of, parts)):
            raise OmniError("the chat template does not show all media in their order", code="load_failed")
        self._check_length(sum(len(piece) for piece in pieces if not isinstance(piece, str)))
        return rendered

    def _process(self, part: MediaPart) -> Item:
        media, model = self._media, self._model.media
        if isinstance(part, ImagePart):
            return model.image(media.image(part.index))
        if isinstance(part, AudioPart):
            return model.audio(media.audio(part.index), self._longest)
        frames, fps = media.video(part.index)
        if part.audio < 0:
            return model.video(frames, fps)
        return model.video_with_sound(frames, fps, media.audio(part.audio), self._longest)

    def _finish(self, rendered: Rendered) -> Output:
        assert self._prompt is not None
        items, pieces = iter(self._items), rendered.pieces
        ids = list(chain.from_iterable(next(items).ids if isinstance(piece, str) else piece for piece in pieces))
        self._check_length(len(ids))
        heard, seen = self._model.text.count_media(ids)
        facts = PromptFacts(heard, seen, rendered.reasoning)
        body = Features([item.digest for item in self._items], _sounded(self._prompt.messages), facts)
        arrays = {"ids": np.array(ids, np.int64)} | join([item.arrays for item in self._items])
        return Output(self._request_id, 0, 1, True, body, arrays)

    def _check_length(self, length: int) -> None:
        context = self._model.context
        if length + 1 > context:
            raise invalid(
                f"The messages have {length} tokens; with at least one for the answer they do not fit into "
                f"the context of {context} tokens.",
                "messages",
                code="context_length_exceeded",
            )


class Processor(Onnx):
    """Turns conversations into ids and features; in turn, with the failures of the `onnx` engine."""

    def load(self, context: LoadContext) -> None:
        self._model = self.preprocessing = Preprocessing()
        self.preprocessing.load(context)


def join(arrays: list[Arrays]) -> Arrays:
    """Arrays of the same name one after the other, along the first axis."""
    names = dict.fromkeys(chain.from_iterable(arrays))
    return {name: np.concatenate([each[name] for each in arrays if name in each]) for name in names}


def _sound(part: MediaPart) -> int:
    """The number of the audio that belongs to a part, -1: none."""
    if isinstance(part, ImagePart):
        return -1
    return part.index if isinstance(part, AudioPart) else part.audio


def _sounded(messages: list[Message]) -> bool:
    """Whether the videos come with their sound. The models' positions know only one answer for all of them."""
    answers = {part.audio >= 0 for message in messages for part in message.parts if isinstance(part, VideoPart)}
    if len(answers) > 1:
        raise invalid("Either all videos of a conversation have a sound, or none.", "messages")
    return answers == {True}


def _there(found: dict[int, T], index: int, kind: str) -> T:
    if index not in found:
        raise invalid(f"There is no {kind} {index}.", "messages")
    return found[index]


def _positions(folder: Path) -> int:
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    positions: int = config.thinker_config.text_config.max_position_embeddings
    return positions
