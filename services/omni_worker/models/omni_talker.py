"""What the talkers of the omni families share: they speak frame after frame, and wait for the text beside each.

Input is the thinker's (see `omni_thinker`), output `Codes` a frame at [n, n + 1). A talker begins when the thinker's
token 0 is there. Frame n > 0 is computed from frame n - 1 beside the thinker's token n; when the text has ended come
the end mark and then padding. A talker waits for a token that is not there yet, so what it says never depends on when
tokens come.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from omni_common.errors import invalid
from omni_common.frames import Codes, Text
from omni_common.params import Generation, check_biases
from omni_worker.engine import Job, LoadContext, Output, Piece
from omni_worker.engines.sampler import Draw
from omni_worker.engines.sequence import Sequence, Shape, States
from omni_worker.engines.slot_cache import SlotCache
from omni_worker.engines.torch_arrays import to_torch


@dataclass(frozen=True, slots=True)
class Opening:
    """What stands before the first frame."""

    #: [length, width of an input]
    embeds: Tensor
    #: int64 [3, length]; `delta` is what a later position adds to its index.
    positions: Tensor
    delta: int
    #: [1, width]: beside the frames when the text has ended, once and from then on.
    end_mark: Tensor
    padding: Tensor


class Talker(ABC):
    """A talker of transformers. A family fills `load` and has a subclass of `Speech`."""

    shape: Shape
    #: The whole model's, and the talker's within it.
    whole: Any
    config: Any
    module: Any
    backbone: nn.Module
    #: By name in lower case: the token that stands for the voice.
    voices: dict[str, int]
    #: Codes that end a speech.
    end_ids: frozenset[int]

    def setup(self, folder: Path, context: LoadContext) -> None:
        """What all families have: the device, the length of a context."""
        options = context.options
        self.device = torch.device(str(options.get("device", "cpu")))
        self.dtype = getattr(torch, str(options.get("dtype", "float32")))
        self.context = int(options.get("context", 4096))
        #: transformers' implementation of a mixture of experts; its usual one needs the host in float32 on CUDA.
        plain = self.device.type == "cuda" and self.dtype == torch.float32
        self.experts = options.get("experts", "batched_mm" if plain else None)
        #: For measuring speed only.
        self.random = options.get("weights") == "random"

    def voice(self, params: Generation) -> int:
        """The token of the voice that was asked for, or else of the first. Raises OmniError 400."""
        name = params.voice.lower() or next(iter(self.voices))
        if name not in self.voices:
            raise invalid(f"voice: {params.voice!r} is not one of {', '.join(self.voices)}", "voice")
        return self.voices[name]

    @abstractmethod
    def heard(self, states: Tensor) -> Tensor:
        """What the states of text [n, hidden of the thinker] add to inputs of this model, [n, width]."""

    def forward(self, embeds: Tensor, positions: Tensor, cache: SlotCache, extras: dict[str, Any]) -> States:
        output = self.backbone(
            inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True, slots=cache, **extras
        )
        return States(output.last_hidden_state)


class Speech(Sequence, ABC):
    """What one answer sounds like, as codes."""

    def __init__(self, job: Job, model: Talker) -> None:
        super().__init__(job)
        assert isinstance(job.params, Generation)
        check_biases(job.params, model.module.codec_head.out_features)
        self.params = job.params
        self.finish: Literal["", "stop", "length"] = ""
        #: What was drawn (of a frame its first group), the end of the speech included.
        self.drawn: list[int] = []
        self._talker = model
        #: What each frame adds to the next input, and how many of them were fed.
        self._frames: list[Tensor] = []
        self._fed_frames = 0
        #: What the text gives beside each frame.
        self._text: list[Tensor] = []
        self._text_ended = False
        self._prompt: dict[str, Tensor] | None = None
        self._opening: Opening | None = None
        self._known = [decision for decision in job.resume if isinstance(decision.body, Codes)]

    # -------------------------------------------------------------------------------------- what subclasses define

    @abstractmethod
    def lay_out(self, arrays: dict[str, Tensor]) -> Opening:
        """From what came with the thinker's first token. Raises OmniError."""

    @abstractmethod
    def replay(self, frame: list[int]) -> None:
        """A frame that a former self of this stage decided."""

    # ------------------------------------------------------------------------------------------------- the input

    def push(self, piece: Piece) -> None:
        if not isinstance(piece.body, Text):
            return
        arrays = {name: to_torch(array, self._talker.device) for name, array in piece.arrays.items()}
        if "prompt_ids" in arrays:
            self._prompt = arrays
        elif not piece.last:
            self._text.append(self._talker.heard(arrays["state"]))
        if piece.last:
            self._text_ended = True
            if "prompt_ids" in arrays:
                # The answer is empty: there is nothing to say, and nothing to begin with.
                self._prompt = None
                self.end("stop")
        self.feed_frames()

    @property
    def unprepared(self) -> bool:
        return self._prompt is not None

    def prepare(self) -> None:
        """Lay out what stands before the first frame; then go along what was decided before."""
        assert self._prompt is not None
        arrays, self._prompt = self._prompt, None
        opening = self._opening = self.lay_out(arrays)
        self.feed(opening.embeds, opening.positions)
        for decision in self._known:
            assert isinstance(decision.body, Codes)
            for frame in decision.body.frames:
                self.replay(frame)
            if decision.last and not self.finish:
                self.end(decision.body.finish or "stop")
        self.feed_frames()

    def feed_frames(self) -> None:
        """Feed every frame whose text is there."""
        while self._opening and not self.finish and self._fed_frames < len(self._frames):
            number = self._fed_frames
            if number < len(self._text):
                text = self._text[number]
            elif not self._text_ended:
                return
            else:
                text = self._opening.end_mark if number == len(self._text) else self._opening.padding
            self.feed(self._frames[number] + text, self.fed + self._opening.delta)
            self._fed_frames += 1

    # ------------------------------------------------------------------------------------------------- the frames

    @property
    def deciding(self) -> bool:
        return self._opening is not None and not self.finish and self._fed_frames == len(self._frames)

    def draw(self) -> Draw:
        params, index = self.params, len(self.drawn)
        endless = params.ignore_eos or index < params.min_tokens
        forbidden = tuple(self._talker.end_ids) if endless else ()
        return Draw(params, self.job.seed, index, self.drawn, self.drawn, forbidden)

    @property
    def exhausted(self) -> bool:
        """Whether one more frame than there are could not be fed, or may not be drawn."""
        assert self._opening is not None
        length = len(self._opening.embeds) + len(self._frames)
        return len(self.drawn) >= self.params.max_tokens or length >= self._talker.context

    def emit(self, frame: list[int], embed: Tensor) -> None:
        """A frame is there; `embed` [1, width] is what it adds to the next input."""
        number = len(self._frames)
        self._frames.append(embed)
        self.outputs.append(Output(self.job.request_id, number, number + 1, body=Codes([frame])))

    def end(self, finish: Literal["stop", "length"]) -> None:
        self.finish = finish
        number = len(self._frames)
        self.outputs.append(Output(self.job.request_id, number, number, True, Codes([], finish)))
