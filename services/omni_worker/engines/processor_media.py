"""Media as a model's encoders take them, each item once: features, placeholder ids, digest.

An item is what the library's processor makes of it alone, and equal, bit for bit, to its share of what the processor
makes of all media of a conversation together (checked in tests/unit/worker/test_processor.py). So an item can be kept
for the next turn. Only what depends on its company is part of its digest: where the processor fills audios up with
silence to the longest of the conversation, that length changes their last frames.
"""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image
from transformers import Qwen2_5OmniProcessor

from omni_common.errors import OmniError, invalid
from omni_worker.engine import Arrays

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One medium, or a video with its sound."""

    #: Equal for equal content, features and ids.
    digest: str
    #: What takes the place of its placeholder in the prompt.
    ids: list[int]
    #: float32 or int64, as the library names them; items are joined along the first axis.
    arrays: Arrays

    @property
    def nbytes(self) -> int:
        return 8 * len(self.ids) + sum(array.nbytes for array in self.arrays.values())


class Cache:
    """Items by digest, the least recently used given up first."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes."""
        self.hits = 0
        self.nbytes = 0
        self._capacity = capacity
        self._items: OrderedDict[str, Item] = OrderedDict()

    def get(self, digest: str) -> Item | None:
        item = self._items.get(digest)
        if item is not None:
            self.hits += 1
            self._items.move_to_end(digest)
        return item

    def put(self, item: Item) -> None:
        """Keep an item that is not kept; one larger than the cache is not kept at all."""
        if item.nbytes > self._capacity:
            return
        self._items[item.digest] = item
        self.nbytes += item.nbytes
        while self.nbytes > self._capacity:
            self.nbytes -= self._items.popitem(last=False)[1].nbytes


class MediaProcessor:
    """The media side of a processor of transformers. Methods raise OmniError 400 when a medium cannot be processed."""

    def __init__(self, processor: Any, cache: Cache) -> None:
        self._processor, self._cache = processor, cache
        self.rate: int = processor.feature_extractor.sampling_rate
        # Qwen2.5-Omni fills up to a length of its own, and would cut what is longer.
        fixed = isinstance(processor, Qwen2_5OmniProcessor)
        self._most_samples: int | None = processor.feature_extractor.n_samples if fixed else None

    def image(self, pixels: Array) -> Item:
        """`pixels` uint8 [height, width, 3]. Arrays: pixel_values [patches, dim], image_grid_thw [1, 3]."""
        processor = self._processor
        digest = _digest("image", pixels)
        # A picture says itself where its channels are: an array of height 3 would not.
        return self._item(digest, processor.image_token, lambda: {"images": [Image.fromarray(pixels)]})

    def audio(self, samples: Array, longest: int) -> Item:
        """`samples` float32 [n] at `rate`, `longest` the length of the conversation's longest audio.

        Arrays: input_features [1, mels, frames], feature_attention_mask [1, frames].
        """
        options = self._filled(samples, longest)
        digest = _digest("audio", samples, options)
        return self._item(digest, self._processor.audio_token, lambda: {"audio": [samples], **options})

    def video(self, frames: Array, fps: float) -> Item:
        """`frames` uint8 [n, height, width, 3], sampled at `fps`.

        Arrays: pixel_values_videos [patches, dim], video_grid_thw [1, 3], video_second_per_grid [1].
        """
        digest = _digest("video", frames, fps)
        return self._item(digest, self._processor.video_token, lambda: _frames(frames, fps))

    def video_with_sound(self, frames: Array, fps: float, samples: Array, longest: int) -> Item:
        """Both as above, their placeholders interleaved by time; ids include the tokens around them."""
        processor = self._processor
        options = self._filled(samples, longest)
        text = processor.vision_bos_token + processor.video_token + processor.vision_eos_token
        digest = _digest("sounded", frames, fps, samples, options)
        return self._item(digest, text, lambda: _frames(frames, fps, sound=True) | {"audio": [samples], **options})

    def _filled(self, samples: Array, longest: int) -> dict[str, Any]:
        """Options that give an audio alone the length it has among the others."""
        if self._most_samples is None:
            return {"audio_kwargs": {"padding": "max_length", "max_length": longest}}
        if len(samples) > self._most_samples:
            most = self._most_samples / self.rate
            raise invalid(
                f"An audio lasts {len(samples) / self.rate:.1f} s; this model hears at most {most:.0f} s of one.",
                "messages",
            )
        return {}

    def _item(self, digest: str, text: str, media: Any) -> Item:
        """`media()` gives the processor's arguments."""
        kept = self._cache.get(digest)
        if kept is not None:
            return kept
        try:
            made = self._processor(text=[text], return_tensors="pt", **media())
        except (ValueError, RuntimeError) as error:
            raise invalid(f"A medium of the messages cannot be processed: {error}", "messages") from None
        arrays = {name: tensor.numpy() for name, tensor in made.items()}
        ids = arrays.pop("input_ids")[0].tolist()
        del arrays["attention_mask"]
        if not ids:
            raise invalid("An audio of the messages is too short for this model.", "messages")
        item = Item(digest, ids, {name: _plain(array) for name, array in arrays.items()})
        self._cache.put(item)
        return item


def _frames(frames: Array, fps: float, sound: bool = False) -> dict[str, Any]:
    options = {
        "fps": fps,
        "do_sample_frames": False,
        "input_data_format": "channels_last",
        "use_audio_in_video": sound,
    }
    return {"videos": [frames], "videos_kwargs": options}


def _plain(array: Array) -> Array:
    """float32 or int64, C-contiguous."""
    return np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else np.int64)


def _digest(kind: str, *content: Any) -> str:
    """BLAKE2b over the bytes and shapes of arrays and whatever else decides the result."""
    hashed = blake2b(kind.encode(), digest_size=16)
    for part in content:
        if isinstance(part, np.ndarray):
            hashed.update(f" {part.dtype} {part.shape} ".encode())
            hashed.update(np.ascontiguousarray(part).data)
        else:
            hashed.update(f" {part} ".encode())
    return hashed.hexdigest()


def check_shape(array: Array, dtype: type[np.generic], axes: int) -> None:
    """Raises OmniError when a producer sent something else than a medium."""
    if array.dtype != dtype or array.ndim != axes or (axes > 1 and array.shape[-1] != 3):
        raise OmniError(f"{array.dtype} {list(array.shape)} is no medium of {axes} axes", code="invalid_input")
