"""What the thinkers of the omni families share: a prompt with media becomes text, and states for a talker.

Output for the client is a `Text` a token at [k, k + 1). A talker gets the same positions and bodies, with tensors: with
the first token those of the prompt (`prompt_ids` int64 [length], `prompt_states` [length, hidden], `specials`
[n, hidden]: embeddings of the family's special tokens, and the grids and lengths that its positions need), and with
every token but the last its own `state` [1, hidden]. The last token of an answer is never an input of the thinker, so
the library's talker never hears it either.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from omni_common.frames import CLIENT, Features, Text
from omni_common.params import Generation, check_biases
from omni_worker.engine import Arrays, Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.sampler import Draw, sample
from omni_worker.engines.sequence import Sequence, Shape, States
from omni_worker.engines.slot_cache import SlotCache
from omni_worker.engines.token_text import TokenText
from omni_worker.engines.torch_arrays import to_numpy, to_torch


@dataclass(slots=True)
class Encoded:
    """A prompt of `length` positions as a backbone takes it."""

    ids: Tensor
    embeds: Tensor
    #: int64 [3, length]; `delta` is what a later position adds to its index.
    positions: Tensor
    delta: int
    #: bool [length]: positions of media of any kind.
    media: Tensor
    #: A number a position: the id, or for media one of the content.
    keys: list[int]
    #: What a talker needs to find its own positions.
    grids: dict[str, Tensor] = field(default_factory=dict)
    #: DeepStack: bool [length], and a tensor [visual positions, hidden] a layer.
    visual: Tensor | None = None
    deepstack: list[Tensor] = field(default_factory=list)


class Thinker(ABC):
    """A thinker of transformers. A family fills `load` and says how a prompt is encoded and what a talker hears."""

    shape: Shape
    #: Of the thinker within the whole model.
    config: Any
    module: Any
    backbone: nn.Module
    end_ids: frozenset[int]
    #: Whether a token's state is known with the token, before it has been an input.
    state_with_token: bool

    def setup(self, folder: Path, context: LoadContext) -> None:
        """What all families have: the tokenizer, the device, the length of a context."""
        options = context.options
        self.device = torch.device(str(options.get("device", "cpu")))
        self.dtype = getattr(torch, str(options.get("dtype", "float32")))
        self.context = int(options.get("context", 4096))
        #: transformers' implementation of a mixture of experts; its usual one needs the host in float32 on CUDA.
        plain = self.device.type == "cuda" and self.dtype == torch.float32
        self.experts = options.get("experts", "batched_mm" if plain else None)
        #: For measuring speed only.
        self.random = options.get("weights") == "random"
        self.feeds_talker = bool(options.get("feeds_talker", True))
        self._tokenizer = Tokenizer.from_file(str(folder / "processor" / "tokenizer.json"))

    def detokenize(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def open(self, job: Job) -> "Answer":
        return Answer(job, self)

    def embed(self, ids: list[int]) -> Tensor:
        """[n, hidden]"""
        embedded: Tensor = self.module.get_input_embeddings()(torch.tensor(ids, device=self.device))
        return embedded

    def encode(self, arrays: dict[str, Tensor], features: Features) -> Encoded:
        """Run the encoders of the media; `arrays` are those of `Features`."""
        config, module = self.config, self.module
        ids = arrays["ids"]
        embeds: Tensor = module.get_input_embeddings()(ids)
        image, video = ids == config.image_token_id, ids == config.video_token_id
        audio = ids == config.audio_token_id
        lengths = None
        if "input_features" in arrays:
            mask = arrays["feature_attention_mask"]
            lengths = mask.sum(1)
            heard = module.get_audio_features(arrays["input_features"].to(self.dtype), mask, return_dict=True)
            embeds = embeds.masked_scatter(audio[:, None], heard.last_hidden_state.to(embeds.dtype))
        looked = []
        for name, grid, where, look in (
            ("pixel_values", "image_grid_thw", image, module.get_image_features),
            ("pixel_values_videos", "video_grid_thw", video, module.get_video_features),
        ):
            if name in arrays:
                seen = look(arrays[name].to(self.dtype), arrays[grid], return_dict=True)
                embeds = embeds.masked_scatter(where[:, None], torch.cat(tuple(seen.pooler_output)).to(embeds.dtype))
                looked.append((where, seen))
        positions, _ = module.get_rope_index(
            ids[None],
            arrays.get("image_grid_thw"),
            arrays.get("video_grid_thw"),
            torch.ones_like(ids[None]),
            features.use_audio_in_video,
            lengths,
            arrays.get("video_second_per_grid"),
        )
        wanted: list[str] = ["image_grid_thw", "video_grid_thw", "video_second_per_grid"]
        grids = {name: arrays[name] for name in wanted if name in arrays}
        if lengths is not None:
            grids["audio_lengths"] = lengths
        media = image | video | audio
        visual, deepstack = self.deepen(looked)
        return Encoded(
            ids=ids,
            embeds=embeds,
            positions=positions[:, 0],
            # As in the library from the last position: a video that outlasts its sound has larger ones before it.
            delta=int(positions[0, 0, -1]) + 1 - len(ids),
            media=media,
            keys=content_keys(ids, media, features.digests, starts(media)),
            grids=grids,
            visual=visual,
            deepstack=deepstack,
        )

    def deepen(self, looked: list[tuple[Tensor, Any]]) -> tuple[Tensor | None, list[Tensor]]:
        """`visual` and `deepstack` of the prompt, from (bool [length], what the encoder gave) of images and videos."""
        return None, []

    @abstractmethod
    def state(self, media: Tensor, embeds: Tensor, states: States, row: int) -> Tensor:
        """What a talker hears of [n] positions, [n, hidden]; `media` bool [n]."""

    @abstractmethod
    def specials(self) -> Tensor:
        """Embeddings of the family's special tokens, [n, hidden]."""

    def forward(self, embeds: Tensor, positions: Tensor, cache: SlotCache, extras: dict[str, Any]) -> States:
        output = self.backbone(
            inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True, slots=cache, **extras
        )
        return States(output.last_hidden_state)

    def decide(self, answers: list["Answer"], hidden: Tensor) -> list[Failure]:
        tokens = sample(self.module.lm_head(hidden), [answer.draw() for answer in answers], "thinker")
        embeds = self.module.get_input_embeddings()(tokens)
        for row, (answer, token) in enumerate(zip(answers, tokens.tolist(), strict=True)):
            answer.append(token, embeds[row : row + 1])
        return []


class Answer(Sequence):
    """One answer."""

    def __init__(self, job: Job, model: Thinker) -> None:
        super().__init__(job)
        assert isinstance(job.params, Generation)
        check_biases(job.params, model.module.lm_head.out_features)
        self.params = job.params
        self.tokens: list[int] = []
        self.finish: Literal["", "stop", "length"] = ""
        self._model = model
        self._features: Features | None = None
        self._arrays: dict[str, Tensor] = {}
        self._encoded: Encoded | None = None
        #: Of the prompt and the answer.
        self._ids: list[int] = []
        self._bodies: list[Text] = []
        self._text = TokenText(model.detokenize, job.params.stop)
        self._talkers = tuple(sink for sink in job.sinks if sink != CLIENT)
        #: Tokens that the talkers have got, and what is kept of each position for them.
        self._told = 0
        self._memo: Tensor | None = None

    # ------------------------------------------------------------------------------------------------- the prompt

    def push(self, piece: Piece) -> None:
        if isinstance(piece.body, Features):
            self._features = piece.body
            self._arrays = {name: to_torch(array, self._model.device) for name, array in piece.arrays.items()}

    @property
    def unprepared(self) -> bool:
        return self._features is not None

    def prepare(self) -> None:
        """Run the encoders of the prompt's media; then go along what was decided before."""
        assert self._features is not None
        self._encoded = self._model.encode(self._arrays, self._features)
        self._features, self._arrays = None, {}
        self.keys = self._encoded.keys
        self._ids = self._encoded.ids.tolist()
        self.feed(self._encoded.embeds, self._encoded.positions)
        for decision in self.job.resume:
            for token in decision.body.ids if isinstance(decision.body, Text) else []:
                self.append(token, self._model.embed([token]))

    @property
    def _prompt(self) -> int:
        return len(self._encoded.ids) if self._encoded else 0

    def extras(self, start: int, end: int) -> dict[str, Any]:
        encoded = self._encoded
        if encoded is None or encoded.visual is None or not encoded.visual[start:end].any():
            return {}
        here = self._padded(encoded.visual, start, end)
        before, count = int(encoded.visual[:start].sum()), int(here.sum())
        layers = [layer[before : before + count] for layer in encoded.deepstack]
        return {"visual_pos_masks": here[None], "deepstack_visual_embeds": layers}

    def _padded(self, mask: Tensor, start: int, end: int) -> Tensor:
        """`mask` of the prompt at [start, end), false behind the prompt."""
        return nn.functional.pad(mask[start:end], (0, end - max(start, min(end, len(mask)))))

    def computed(self, start: int, embeds: Tensor, states: States, row: int, memo: Tensor | None) -> None:
        if memo is None or not self._talkers or self._encoded is None:
            return
        self._memo = memo
        end = start + len(embeds)
        memo[start:end] = self._model.state(self._padded(self._encoded.media, start, end), embeds, states, row)
        self._tell()

    # ------------------------------------------------------------------------------------------------- the answer

    @property
    def deciding(self) -> bool:
        return not self.finish

    def draw(self) -> Draw:
        params, early = self.params, len(self.tokens) < self.params.min_tokens
        forbidden: Iterable[int] = ()
        if early or params.ignore_eos:
            forbidden = self._model.end_ids.union(params.stop_token_ids if early else ())
        seen = self._ids if params.repetition_penalty != 1.0 else ()
        return Draw(params, self.job.seed, len(self.tokens), seen, self.tokens, tuple(forbidden))

    def append(self, token: int, embed: Tensor) -> None:
        """A token was decided, now or by a former self of this stage; `embed` [1, hidden] is its embedding."""
        assert self._encoded is not None
        index = len(self.tokens)
        self.tokens.append(token)
        self._ids.append(token)
        shown = ""
        if token in self._model.end_ids or token in self.params.stop_token_ids:
            self.finish = "stop"
        else:
            piece = self._model.detokenize([token])
            shown = self._text.push(token, piece, may_stop=index >= self.params.min_tokens)
            if self._text.stopped:
                self.finish = "stop"
            elif len(self.tokens) >= self.params.max_tokens or self.fed + 1 > self._model.context:
                self.finish = "length"
        if self.finish and not self._text.stopped:
            shown += self._text.flush()
        body = Text(shown, [token], self.finish, self._prompt if self.finish else 0)
        self._bodies.append(body)
        if CLIENT in self.job.sinks:
            name = self.job.request_id
            self.outputs.append(Output(name, index, index + 1, bool(self.finish), body, sinks=(CLIENT,)))
        if not self.finish:
            self.feed(embed, self.fed + self._encoded.delta)
            self.keys.append(token)
        self._tell()

    # ------------------------------------------------------------------------------------------------- the talker

    def _tell(self) -> None:
        """Hand every token whose states are known to the talkers."""
        while self._talkers and self._told < len(self.tokens) and self.length >= self._prompt:
            index, last = self._told, bool(self.finish) and self._told == len(self.tokens) - 1
            position = self._prompt + index
            arrays = self._prompt_arrays() if index == 0 else {}
            if not last:
                if self._memo is None or (self.length <= position and not self._model.state_with_token):
                    return
                state = self._memo[position : position + 1] if self.length > position else self._embedded(index)
                arrays["state"] = to_numpy(state)
            name = self.job.request_id
            output = Output(name, index, index + 1, last, self._bodies[index], arrays, self._talkers)
            self.outputs.append(output)
            self._told += 1

    def _embedded(self, index: int) -> Tensor:
        return self._model.embed([self.tokens[index]])

    def _prompt_arrays(self) -> Arrays:
        assert self._encoded is not None
        arrays = {name: to_numpy(grid) for name, grid in self._encoded.grids.items()}
        arrays["prompt_ids"] = to_numpy(self._encoded.ids)
        arrays["specials"] = to_numpy(self._model.specials())
        if self._memo is not None:
            arrays["prompt_states"] = to_numpy(self._memo[: self._prompt])
        return arrays


def starts(media: Tensor) -> list[int]:
    """Where each run of media positions begins; `media` bool [length]."""
    before = nn.functional.pad(media[:-1], (1, 0))
    begun: list[int] = (media & ~before).nonzero()[:, 0].tolist()
    return begun


def content_keys(ids: Tensor, media: Tensor, digests: list[str], starts: list[int]) -> list[int]:
    """A number a position for `Sequence.keys`: the id, or at media positions one of (content, offset).

    `starts`: where each run of placeholders begins. A run is an item of `digests`, or (frames of a video with its sound
    between them) all runs are of all items.
    """
    keys: list[int] = ids.tolist()
    if len(starts) != len(digests):
        digests = ["".join(digests) + f" {number}" for number in range(len(starts))]
    bounds = [*starts, len(keys)]
    for digest, start, end in zip(digests, starts, bounds[1:], strict=True):
        for offset in range(end - start):
            if media[start + offset]:
                packed = blake2b(f"{digest} {offset}".encode(), digest_size=8).digest()
                # Negative: never an id.
                keys[start + offset] = -1 - (int.from_bytes(packed) >> 2)
    return keys
