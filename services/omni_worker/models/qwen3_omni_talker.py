"""The talker of Qwen3-Omni: transformers' Qwen3OmniMoeTalkerForConditionalGeneration, frame by frame.

Input is the thinker's (see `omni_thinker`), output `Codes` a frame at [n, n + 1): an id from the talker itself, and one
a further code group from its code predictor, a small decoder that runs once a group on (the talker's last hidden
state, the codes so far). The talker begins with the thinker's first token. Frame n is computed with the thinker's
token n + 1 beside the codes of frame n - 1; when the text has ended come the end mark and then padding. It waits for a
token that is not there yet, so what it says never depends on when tokens come.

As in the library, `max_tokens` counts draws of the first group, and the frame of the last draw is not completed:
without an end there are `max_tokens - 1` frames.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3OmniMoeTalkerForConditionalGeneration

from omni_common.errors import OmniError, invalid
from omni_common.frames import Codes, Text
from omni_common.params import Generation
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.sampler import Draw, sample, uniform
from omni_worker.engines.sequence import Sequence, Shape, States
from omni_worker.engines.slot_cache import ATTENTION, SlotCache
from omni_worker.engines.torch_arrays import to_torch
from omni_worker.models.qwen3_omni_predictor import Predictor
from omni_worker.weights import load_stage


class Model:
    """See the module's docstring."""

    def load(self, folder: Path, context: LoadContext) -> None:
        options = context.options
        self.device = torch.device(str(options.get("device", "cpu")))
        self.dtype = getattr(torch, str(options.get("dtype", "float32")))
        self.context = int(options.get("context", 4096))
        whole = self.whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = self.config = whole.talker_config
        # Looked up by the library's rope index when there is audio, and missing there.
        config.audio_config = whole.thinker_config.audio_config
        text = config.text_config
        text._attn_implementation = ATTENTION
        build: Callable[[], Any] = partial(Qwen3OmniMoeTalkerForConditionalGeneration, config)
        module: Any = load_stage(
            folder, "talker", build, self.dtype, self.device, random=options.get("weights") == "random"
        )
        self.module = module
        self.shape = Shape(text.num_hidden_layers, text.num_key_value_heads, text.head_dim)
        first, groups = module.get_input_embeddings(), config.num_code_groups
        graphs = self.device.type == "cuda" and bool(options.get("graphs", True))
        self.predictor = Predictor(module.code_predictor, first, groups, context.slots, self.device, graphs)
        self.voices: dict[str, int] = config.speaker_id
        # The special ids at the end of the vocabulary are no codes.
        last = text.vocab_size
        special = [number for number in range(last - 1024, last) if number != config.codec_eos_token_id]
        self.suppressed = torch.tensor(special, device=self.device)

    def open(self, job: Job) -> "Speech":
        assert isinstance(job.params, Generation)
        voice = job.params.voice.lower() or next(iter(self.voices))
        if voice not in self.voices:
            raise invalid(f"voice: {job.params.voice!r} is not one of {', '.join(self.voices)}", "voice")
        return Speech(job, self, self.voices[voice])

    def forward(self, embeds: Tensor, positions: Tensor, cache: SlotCache, extras: dict[str, Any]) -> States:
        output = self.module.model(
            inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True, slots=cache, **extras
        )
        return States(output.last_hidden_state)

    def decide(self, speeches: list["Speech"], hidden: Tensor) -> list[Failure]:
        firsts = sample(self.module.codec_head(hidden), [s.draw() for s in speeches], "talker", self.suppressed)
        drawn: list[int] = firsts.tolist()
        going = [row for row, speech in enumerate(speeches) if speech.begin_frame(drawn[row])]
        if not going:
            return []
        at = torch.tensor(going, device=self.device)
        numbers = np.stack([speeches[row].numbers(self.predictor.groups - 1) for row in going])
        codes, embeds = self.predictor.complete(
            hidden[at],
            firsts[at],
            torch.from_numpy(numbers).to(self.device, torch.float32),
            torch.tensor([speeches[row].params.temperature == 0 for row in going], device=self.device),
        )
        for at_row, (row, frame) in enumerate(zip(going, codes.tolist(), strict=True)):
            speeches[row].end_frame(frame, embeds[at_row : at_row + 1])
        return []


class Speech(Sequence):
    """What one answer sounds like, as codes."""

    def __init__(self, job: Job, model: Model, voice: int) -> None:
        super().__init__(job)
        assert isinstance(job.params, Generation)
        self.params = job.params
        self._model = model
        self._voice = voice
        #: What each complete frame adds to the next input, how many of them were fed, and the draws of the first group.
        self._frames: list[Tensor] = []
        self._fed_frames = 0
        self._firsts: list[int] = []
        self._finish: Literal["", "stop", "length"] = ""
        #: What the text gives beside each frame.
        self._text: list[Tensor] = []
        self._text_ended = False
        self._delta = 0
        self._begun = False
        self._prompt: tuple[dict[str, Tensor], Text] | None = None
        self._known = [decision for decision in job.resume if isinstance(decision.body, Codes)]

    # ------------------------------------------------------------------------------------------------- the input

    def push(self, piece: Piece) -> None:
        body = piece.body
        if not isinstance(body, Text):
            return
        arrays = {name: to_torch(array, self._model.device) for name, array in piece.arrays.items()}
        if "prompt_ids" in arrays:
            self._prompt = arrays, body
        elif not piece.last:
            self._text.append(self._model.module.text_projection(arrays["state"]))
        if piece.last:
            self._text_ended = True
            if "prompt_ids" in arrays:
                # The answer is empty: there is nothing to say, and nothing to begin with.
                self._prompt = None
                self._end("stop")
        self._feed_frames()

    @property
    def unprepared(self) -> bool:
        return self._prompt is not None

    def prepare(self) -> None:
        """Lay out what stands before the first frame: the user's turns, and the beginning of the answer."""
        assert self._prompt is not None
        (arrays, _), self._prompt = self._prompt, None
        model, whole, config = self._model, self._model.whole, self._model.config
        project = model.module.text_projection
        ids, states = arrays["prompt_ids"], arrays["prompt_states"]
        bos, eos, pad = project(arrays["specials"]).split(1)
        self._end_mark, self._padding = eos, pad

        thinker = whole.thinker_config
        media = (ids == thinker.audio_token_id) | (ids == thinker.image_token_id) | (ids == thinker.video_token_id)
        users = _of_role(ids, whole.im_start_token_id, whole.user_token_id)
        turns = states.new_empty(int(users.sum()), config.text_config.hidden_size)
        turns[media[users]] = model.module.hidden_projection(states[users & media])
        turns[~media[users]] = project(states[users & ~media])

        begins = (ids[:-1] == whole.im_start_token_id) & (ids[1:] == whole.assistant_token_id)
        if not begins.any():
            raise OmniError("the prompt does not end with the beginning of an answer", code="invalid_prompt")
        answer = project(states[int(begins.nonzero()[-1]) :])
        first = project(arrays["state"])
        spoken = torch.cat([answer[:3], pad.expand(4, -1), bos, first])
        marks = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id]
        marks += [self._voice, config.codec_pad_id, config.codec_bos_id]
        spoken[3:] += model.predictor.embed_first(marks)

        pads = torch.full((len(spoken),), whole.tts_pad_token_id, device=ids.device)
        places = torch.cat([ids[users], pads])[None]
        positions, delta = model.module.get_rope_index(
            places,
            arrays.get("image_grid_thw"),
            arrays.get("video_grid_thw"),
            torch.ones_like(places),
            False,
            arrays.get("audio_lengths"),
            arrays.get("video_second_per_grid"),
        )
        self._delta = int(delta)
        self.feed(torch.cat([turns, spoken]), positions[:, 0])
        self._begun = True
        for decision in self._known:
            assert isinstance(decision.body, Codes)
            for frame in decision.body.frames:
                self._firsts.append(frame[0])
                self._emit(frame, model.predictor.embed(torch.tensor([frame], device=model.device)))
            if decision.last:
                self._end(decision.body.finish or "stop")
        self._feed_frames()

    def _feed_frames(self) -> None:
        """Feed every complete frame whose text is there."""
        while self._begun and not self._finish and self._fed_frames < len(self._frames):
            number = self._fed_frames
            if number < len(self._text):
                text = self._text[number]
            elif not self._text_ended:
                return
            else:
                text = self._end_mark if number == len(self._text) else self._padding
            self.feed(self._frames[number] + text, self.fed + self._delta)
            self._fed_frames += 1

    # ------------------------------------------------------------------------------------------------- the frames

    @property
    def deciding(self) -> bool:
        return self._begun and not self._finish and self._fed_frames == len(self._frames)

    def draw(self) -> Draw:
        return Draw(self.params, self.job.seed, len(self._firsts), self._firsts, self._firsts)

    def numbers(self, count: int) -> np.ndarray[Any, Any]:
        """Random numbers for the further groups of the frame that was begun."""
        if self.params.temperature == 0:
            return np.zeros(count)
        seed = self.job.seed if self.params.seed is None else self.params.seed
        return uniform(seed, "predictor", len(self._firsts) - 1, count)

    def begin_frame(self, first: int) -> bool:
        """The first group's code was drawn; false when it ends the speech."""
        self._firsts.append(first)
        if first == self._model.config.codec_eos_token_id:
            self._end("stop")
        elif len(self._firsts) >= self.params.max_tokens or self.fed >= self._model.context:
            self._end("length")
        return not self._finish

    def end_frame(self, frame: list[int], embed: Tensor) -> None:
        """All codes of the frame are there; `embed` [1, hidden] is what they add to the next input."""
        self._emit(frame, embed)
        self._feed_frames()

    def _emit(self, frame: list[int], embed: Tensor) -> None:
        number = len(self._frames)
        self._frames.append(embed)
        self.outputs.append(Output(self.job.request_id, number, number + 1, body=Codes([frame])))

    def _end(self, finish: Literal["stop", "length"]) -> None:
        self._finish = finish
        number = len(self._frames)
        self.outputs.append(Output(self.job.request_id, number, number, True, Codes([], finish)))


def _of_role(ids: Tensor, start: int, role: int) -> Tensor:
    """bool [length]: positions of turns whose first token behind `start` is `role`."""
    places = torch.arange(len(ids), device=ids.device)
    begun = torch.where(ids == start, places, -1).cummax(0).values.clamp_min(0)
    return ids[(begun + 1).clamp_max(len(ids) - 1)] == role
