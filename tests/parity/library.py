"""What transformers' own `generate` says, in one process: the reference. And conversations, as both take them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as Pictures
from transformers import AutoProcessor

from omni_common.frames import Audio, AudioPart, Image, ImagePart, Message, Prompt, TextPart, Video, VideoPart
from omni_gateway.stream import Given

Array = np.ndarray[Any, Any]

CLASSES = {"qwen3_omni": "Qwen3OmniMoeForConditionalGeneration", "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration"}
TOKENS, FRAMES, SEED = 12, 40, 1
FPS = 2.0
RATE = 16_000
#: Of the library, which has it as a constant: how the speech of Qwen2.5-Omni ends.
CODEC_ENDS = ("tts_codec_pad_token_id", "tts_codec_end_token_id")


@dataclass
class Asked:
    """One user's message: words, and media of noise."""

    parts: list[Any] = field(default_factory=list)
    audios: list[Array] = field(default_factory=list)
    images: list[Array] = field(default_factory=list)
    videos: list[Array] = field(default_factory=list)
    audio_in_video: bool = False
    _chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def say(self, text: str) -> "Asked":
        self.parts.append(TextPart(text))
        return self

    def image(self, height: int, width: int) -> "Asked":
        self.parts.append(ImagePart(len(self.images)))
        self.images.append(self._chance.integers(0, 256, (height, width, 3), np.uint8))
        return self

    def audio(self, seconds: float) -> "Asked":
        self.parts.append(AudioPart(len(self.audios)))
        return self._sound(seconds)

    def video(self, frames: int, sound_s: float = 0.0) -> "Asked":
        self.audio_in_video = bool(sound_s)
        self.parts.append(VideoPart(len(self.videos), len(self.audios) if sound_s else -1))
        self.videos.append(self._chance.integers(0, 256, (frames, 64, 84, 3), np.uint8))
        return self._sound(sound_s) if sound_s else self

    def _sound(self, seconds: float) -> "Asked":
        self.audios.append((self._chance.standard_normal(int(seconds * RATE)) * 0.1).astype(np.float32))
        return self

    @property
    def messages(self) -> list[Message]:
        return [Message("system", [TextPart("You are good.")]), Message("user", self.parts)]

    def given(self) -> list[Given]:
        """As a gateway sends it: one edge, the conversation first."""
        bodies: list[tuple[str, Any, dict[str, Array]]] = [("text", Prompt(self.messages), {})]
        bodies += [("audio", Audio(RATE, index), {"samples": audio}) for index, audio in enumerate(self.audios)]
        bodies += [("image", Image(index), {"pixels": image}) for index, image in enumerate(self.images)]
        bodies += [("video", Video(index, FPS, True), {"frames": v}) for index, v in enumerate(self.videos)]
        return [
            Given(kind, body, number, number + 1, number == len(bodies) - 1, arrays)
            for number, (kind, body, arrays) in enumerate(bodies)
        ]


ASKED = {
    "text": Asked().say("Hello world, tell me a story about the sea."),
    "image": Asked().image(96, 130).say("What is in this image?"),
    "audio": Asked().audio(1.3).say("Describe the sound."),
    "video": Asked().video(6).say("What happens in the video?"),
    "video with its sound": Asked().video(6, 1.9).say("And what is heard?"),
    "several": Asked().say("First").image(60, 90).say(", then").audio(0.7).image(128, 64).audio(1.1).say(" and last?"),
    "no English": Asked().say("Größe 漢字 🙂?"),
    "long": Asked().say("The quick brown fox jumps over the lazy dog. " * 12),
}


@dataclass
class Said:
    ids: list[int]
    #: [n], at 24 kHz.
    samples: Array


class Library:
    """A checkpoint in one process."""

    def __init__(self, family: str, folder: Path) -> None:
        self._family = family
        self._processor: Any = AutoProcessor.from_pretrained(folder)
        self._model: Any = getattr(transformers, CLASSES[family]).from_pretrained(folder).eval()
        # Weights that lie in the mapped file are not aligned, and then some kernels round differently.
        for parameter in self._model.parameters():
            parameter.data = parameter.data.clone()
        config = self._model.config
        if family == "qwen3_omni":
            # `get_rope_index` of the talker looks for it when there is audio, and does not find it.
            self._model.talker.config.audio_config = config.thinker_config.audio_config
            self.end = config.im_end_token_id
        else:
            self.end = self._model.thinker.generation_config.eos_token_id
            self._seed_noise()

    def _seed_noise(self) -> None:
        """The vocoder draws from the global state: as if it came first."""
        forward = self._model.token2wav.forward

        def seeded(*args: Any, **kwargs: Any) -> Any:
            torch.manual_seed(SEED)
            return forward(*args, **kwargs)

        self._model.token2wav.forward = seeded

    def encode(self, asked: Asked) -> dict[str, Any]:
        names = {TextPart: "text", AudioPart: "audio", ImagePart: "image", VideoPart: "video"}
        turns = [
            {
                "role": message.role,
                "content": [
                    {"type": names[type(part)], **({"text": part.text} if isinstance(part, TextPart) else {})}
                    for part in message.parts
                ],
            }
            for message in asked.messages
        ]
        text = self._processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        media: dict[str, Any] = {}
        if asked.videos:
            media["videos"] = [torch.from_numpy(video).permute(0, 3, 1, 2) for video in asked.videos]
            media["videos_kwargs"] = {"fps": FPS, "do_sample_frames": False, "use_audio_in_video": asked.audio_in_video}
        encoded = self._processor(
            text=[text],
            images=[Pictures.fromarray(image) for image in asked.images] or None,
            audio=asked.audios or None,
            return_tensors="pt",
            **media,
        )
        return {name: value for name, value in encoded.items() if name != "num_audio_tokens"}

    def say(self, asked: Asked, speaker: str = "Ethan") -> Said:
        """Greedy, at most TOKENS tokens and what `max_tokens: FRAMES` gives of frames."""
        with warnings.catch_warnings(), torch.no_grad():
            # The library's own, of the penalty and of numpy.
            warnings.simplefilter("ignore")
            return self._say(asked, speaker)

    def _say(self, asked: Asked, speaker: str) -> Said:
        encoded = self.encode(asked)
        length = encoded["input_ids"].shape[1]
        settings: dict[str, Any] = {"talker_do_sample": False, "talker_max_new_tokens": FRAMES, "speaker": speaker}
        if self._family == "qwen2_5_omni":
            # With a mask of ones `generate` of 5.19 loses the mask, and with it the talker its marks and positions;
            # and it gives pixels to the talker too, which refuses them.
            encoded["input_ids"] = torch.nn.functional.pad(encoded["input_ids"], (1, 0), value=0)
            encoded["attention_mask"] = torch.nn.functional.pad(encoded["attention_mask"], (1, 0), value=0)
            encoded = {("thinker_" if "pixel" in name else "") + name: value for name, value in encoded.items()}
            config = self._model.config.talker_config
            settings["talker_eos_token_id"] = [getattr(config, name) for name in CODEC_ENDS]
        settings |= {"thinker_max_new_tokens": TOKENS, "thinker_do_sample": False, "thinker_eos_token_id": self.end}
        sequences, wave = self._model.generate(
            **encoded, **settings, use_audio_in_video=asked.audio_in_video, return_audio=True
        )
        start = length + (self._family == "qwen2_5_omni")
        return Said(sequences[0, start:].tolist(), wave.reshape(-1).float().numpy())


def joined(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0, np.float32), *parts])
