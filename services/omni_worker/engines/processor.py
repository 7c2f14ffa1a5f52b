"""The `processor` engine: a conversation with its media becomes ids and features, by a checkpoint's own processor.

Input is one edge from the client: the `Prompt`, then the media that its parts refer to. Output is one `Features`. The
arrays are what transformers' processor of the family gives for the same conversation. Text of a message is never more
than text: what looks like a control token or a placeholder in it is tokenised as its characters.

Options: `context` (positions of the thinker, default 4096).
"""

import logging
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import AutoProcessor
from transformers.utils import logging as transformers_logging

from omni_common.errors import OmniError, invalid
from omni_common.frames import (
    Audio,
    AudioPart,
    Features,
    Image,
    ImagePart,
    Message,
    Prompt,
    TextPart,
    Video,
    VideoPart,
)
from omni_worker.engine import Arrays, Failure, Job, LoadContext, Output, Piece

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

#: What the library writes in the place of media between two replacements.
PLACEHOLDERS = ("<|audio_placeholder|>", "<|image_placeholder|>", "<|video_placeholder|>")
#: Characters that nobody types: one of them stands for special text while the rest is tokenised.
PRIVATE = range(0xE000, 0xF8FF)
RATE = 16_000


@dataclass(slots=True)
class _Given:
    """What has come of one job."""

    job: Job
    prompt: Prompt | None = None
    audios: dict[int, list[Array]] = field(default_factory=dict)
    images: dict[int, Array] = field(default_factory=dict)
    videos: dict[int, list[Array]] = field(default_factory=dict)
    fps: dict[int, float] = field(default_factory=dict)
    complete: bool = False


class Processor:
    """See the module's docstring, and `omni_worker.engine.Engine` for the contract. One job a step."""

    in_flight = False
    resumes = False
    rebuilds = False

    def __init__(self) -> None:
        self._jobs: dict[str, _Given] = {}

    def load(self, context: LoadContext) -> None:
        torch.set_num_threads(context.threads)
        transformers_logging.set_verbosity_error()
        folder = Path(context.models) / context.model / "processor"
        self._context = int(context.options.get("context", 4096))
        self._processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)
        tokenizer = self._tokenizer = self._processor.tokenizer
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # Longest first: one may begin with another.
        self._special = re.compile("|".join(map(re.escape, sorted({*special, *PLACEHOLDERS}, key=len, reverse=True))))
        context.progress("warm up", 0.9)
        self._encode(_Given(_WARM_UP, Prompt([Message("user", [TextPart("hello")])])))

    @property
    def busy(self) -> bool:
        return any(given.complete for given in list(self._jobs.values()))

    def add(self, job: Job) -> None:
        self._jobs[job.request_id] = _Given(job)

    def push(self, request_id: str, piece: Piece) -> None:
        given, body, arrays = self._jobs[request_id], piece.body, piece.arrays
        # Copied: the client's arena is small against what waits here.
        if isinstance(body, Prompt):
            given.prompt = body
        elif isinstance(body, Audio):
            given.audios.setdefault(body.index, []).append(np.array(arrays["samples"]))
        elif isinstance(body, Image):
            given.images[body.index] = np.array(arrays["pixels"])
        elif isinstance(body, Video):
            given.videos.setdefault(body.index, []).append(np.array(arrays["frames"]))
            given.fps[body.index] = body.fps
        given.complete = piece.last

    def cancel(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        name = next((name for name, given in self._jobs.items() if given.complete and name not in blocked), None)
        if name is None:
            return []
        try:
            body, arrays = self._encode(self._jobs.pop(name))
        except OmniError as error:
            return [Failure(name, error.message, error.code, error.status, error.param)]
        except (ValueError, IndexError) as error:
            # The library's processors raise these on media that they cannot take.
            log.info("the processor refused the input of %s", name, exc_info=True)
            text = f"The input cannot be processed: {error}"
            return [Failure(name, text, "invalid_input", 400, "messages")]
        return [Output(name, 0, 1, True, body, arrays)]

    def close(self) -> None:
        self._jobs.clear()

    # ------------------------------------------------------------------------------------------------------ the work

    def _encode(self, given: _Given) -> tuple[Features, Arrays]:
        prompt = given.prompt
        if prompt is None:
            raise invalid("There are no messages.", "messages")
        media = _Media(given, prompt)
        escaped, written = self._escape(prompt)
        text = self._processor.apply_chat_template(
            [_plain(message) for message in escaped], tokenize=False, add_generation_prompt=True
        )
        settings: dict[str, Any] = {}
        if media.videos:
            settings["videos_kwargs"] = {
                "do_sample_frames": False,
                "fps": media.fps,
                "use_audio_in_video": media.audio_in_video,
            }
        encoded = self._processor(
            text=[text],
            images=media.images or None,
            audio=media.audios or None,
            videos=media.videos or None,
            return_tensors="pt",
            **settings,
        )
        arrays = {name: _array(value) for name, value in encoded.items() if name not in _UNUSED}
        ids = arrays.pop("input_ids")[0].astype(np.int64)
        arrays["ids"] = self._restore(ids, written)
        if len(arrays["ids"]) + 1 > self._context:
            raise invalid(
                f"The messages have {len(arrays['ids'])} tokens; with at least one for the answer they do not fit into "
                f"the context of {self._context} tokens.",
                "messages",
                code="context_length_exceeded",
            )
        return Features(media.digests, media.audio_in_video), arrays

    def _escape(self, prompt: Prompt) -> tuple[list[Message], "_Written | None"]:
        """The messages with one private character in the place of each special string that a text holds."""
        texts = [part.text for message in prompt.messages for part in message.parts if isinstance(part, TextPart)]
        found = [match for text in texts for match in self._special.findall(text)]
        if not found:
            return prompt.messages, None
        used = set("".join(texts))
        mark = next((chr(code) for code in PRIVATE if chr(code) not in used), None)
        if mark is None:
            raise invalid("The text cannot be told from control tokens.", "messages")

        def clean(part: Any) -> Any:
            return TextPart(self._special.sub(mark, part.text)) if isinstance(part, TextPart) else part

        messages = [Message(m.role, [clean(part) for part in m.parts]) for m in prompt.messages]
        return messages, _Written(self._ids(mark), [self._ids(text) for text in found])

    def _ids(self, text: str) -> list[int]:
        """Ids of text in which nothing is special."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def _restore(self, ids: Array, written: "_Written | None") -> Array:
        """Put the characters of special strings back."""
        if written is None:
            return ids
        width = len(written.mark)
        windows = np.lib.stride_tricks.sliding_window_view(ids, width)
        places = np.flatnonzero((windows == written.mark).all(1)).tolist()
        if len(places) != len(written.texts):
            raise invalid("The text holds control tokens in a place where they cannot be told apart.", "messages")
        parts, at = [], 0
        for place, text in zip(places, written.texts, strict=True):
            parts += [ids[at:place], np.array(text, np.int64)]
            at = place + width
        return np.concatenate([*parts, ids[at:]])


@dataclass(frozen=True, slots=True)
class _Written:
    """Special strings that a text holds: the ids that stand for each, and what belongs there, in order."""

    mark: list[int]
    texts: list[list[int]]


class _Media:
    """The media of a prompt in the order of their placeholders. Raises OmniError where they do not fit together."""

    def __init__(self, given: _Given, prompt: Prompt) -> None:
        self.audios: list[Array] = []
        self.images: list[PIL.Image.Image] = []
        self.videos: list[torch.Tensor] = []
        self.digests: list[str] = []
        rates: set[float] = set()
        heard: set[bool] = set()
        for part in (part for message in prompt.messages for part in message.parts):
            if isinstance(part, AudioPart):
                self._hear(np.concatenate(_of(given.audios, part.index)))
            elif isinstance(part, ImagePart):
                pixels = _of(given.images, part.index)
                self.images.append(PIL.Image.fromarray(pixels))
                self.digests.append(digest(pixels))
            elif isinstance(part, VideoPart):
                frames = np.concatenate(_of(given.videos, part.index))
                self.videos.append(torch.from_numpy(frames).permute(0, 3, 1, 2))
                rates.add(given.fps[part.index])
                heard.add(part.audio >= 0)
                seen = digest(frames)
                if part.audio >= 0:
                    self._hear(np.concatenate(_of(given.audios, part.audio)))
                    seen += self.digests.pop()
                self.digests.append(seen)
        if len(rates) > 1 or len(heard) > 1:
            raise invalid("All videos of a request must have one frame rate, and all their sound or none.", "messages")
        self.fps = rates.pop() if rates else 0.0
        self.audio_in_video = True in heard

    def _hear(self, samples: Array) -> None:
        self.audios.append(samples)
        self.digests.append(digest(samples))


def digest(array: Array) -> str:
    """Equal content and shape, equal digest."""
    hashed = blake2b(np.ascontiguousarray(array).data, digest_size=16)
    hashed.update(repr((array.shape, array.dtype.str)).encode())
    return hashed.hexdigest()


def _of(found: dict[int, Any], index: int) -> Any:
    if index not in found:
        raise invalid(f"A message refers to medium {index}, which did not come.", "messages")
    return found[index]


def _plain(message: Message) -> dict[str, Any]:
    """As chat templates read it."""
    return {"role": message.role, "content": list(_contents(message))}


def _contents(message: Message) -> Iterator[dict[str, str]]:
    for part in message.parts:
        if isinstance(part, TextPart):
            yield {"type": "text", "text": part.text}
        else:
            kinds = {AudioPart: "audio", ImagePart: "image", VideoPart: "video"}
            yield {"type": kinds[type(part)]}


def _array(value: Any) -> Array:
    array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return np.ascontiguousarray(array.astype(np.int64) if array.dtype.kind in "iu" else array)


_UNUSED = frozenset({"attention_mask", "num_audio_tokens"})
_WARM_UP = Job("warm-up", 0, None, (), ())  # type: ignore[arg-type]
