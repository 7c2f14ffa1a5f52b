"""The decoder of Qwen3-Omni: transformers' Qwen3OmniMoeCode2Wav, a chunk at a time.

Each chunk is computed with the frames on its left that it can depend on: a transformer whose layers see a window each,
then convolutions, which also look ahead, so the end of a chunk is held back until the next. So the samples are those
of the whole decode up to the rounding of float32 (1e-5); with `stream: false` they are those, bit for bit. The
library's own `chunked_decode` is the whole decode up to 300 frames; beyond them it loses samples at its joins, and this
does not.

Options: `chunk_frames` (the sizes of the chunks one after another, the last repeats), `stream` (true).
"""

import math
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3OmniMoeCode2Wav

from omni_common.params import Voiced
from omni_worker.engine import Job, LoadContext
from omni_worker.engines.codec import Decoding, Samples
from omni_worker.weights import load_stage

#: 0.3 s first, 2 s in the end.
CHUNK_FRAMES = (4, 8, 16, 25)


class Model:
    """See the module's docstring."""

    rate = 24_000

    def load(self, folder: Path, context: LoadContext) -> None:
        options = context.options
        self._device = torch.device(str(options.get("device", "cpu")))
        dtype = getattr(torch, str(options.get("dtype", "float32")))
        config = AutoConfig.from_pretrained(folder, local_files_only=True).code2wav_config
        build = partial(Qwen3OmniMoeCode2Wav, config)
        self._module: Any = load_stage(
            folder, "code2wav", build, dtype, self._device, random=options.get("weights") == "random"
        )
        self._stream = bool(options.get("stream", True))
        self._sizes = [int(size) for size in options.get("chunk_frames", CHUNK_FRAMES)]
        if not self._sizes or min(self._sizes) < 1:
            raise ValueError("options.chunk_frames must be sizes of at least 1")
        self._ends = list(accumulate(self._sizes))
        self._upsample = int(self._module.total_upsample)
        self._seen = config.num_hidden_layers * (config.sliding_window - 1)
        self._reach = reach(self._module)
        # Each size of the first chunks, so that no request pays for a shape that is new.
        silence = Decoding(_WARM_UP)
        silence.frames = [[0] * config.num_quantizers] * (self._ends[-1] + self._sizes[-1])
        while end := self.due(silence):
            (samples,) = self.decode([(silence, end)])
            silence.decoded, silence.samples = end, silence.samples + len(samples)

    def open(self, job: Job) -> Decoding:
        return Decoding(job)

    def due(self, decoding: Decoding) -> int:
        have = len(decoding.frames)
        if decoding.ended:
            end = self._boundary(decoding.decoded) if self._stream else have
            return min(end, have) if have > decoding.decoded else 0
        end = self._boundary(decoding.decoded)
        return end if self._stream and end <= have else 0

    def _boundary(self, after: int) -> int:
        """The end of the chunk in which frame `after` is."""
        further = after - self._ends[-1]
        if further >= 0:
            return self._ends[-1] + (further // self._sizes[-1] + 1) * self._sizes[-1]
        return next(end for end in self._ends if end > after)

    def decode(self, chunks: list[tuple[Decoding, int]]) -> list[Samples]:
        # Chunks of one shape go through together.
        together: dict[tuple[int, int], list[int]] = {}
        windows = []
        for number, (decoding, end) in enumerate(chunks):
            # The samples that follow begin in this frame.
            begin = max(0, decoding.samples // self._upsample - self._reach)
            start = max(0, begin - self._seen)
            windows.append((start, begin))
            together.setdefault((begin - start, end - start), []).append(number)
        samples: dict[int, Samples] = {}
        for (skip, _), numbers in together.items():
            codes = [chunks[number][0].frames[windows[number][0] : chunks[number][1]] for number in numbers]
            tensor = torch.tensor(codes, device=self._device).transpose(1, 2)
            waves = self._wave(tensor, skip).float().cpu().numpy()
            for number, wave in zip(numbers, waves, strict=True):
                offset = chunks[number][0].samples - windows[number][1] * self._upsample
                samples[number] = np.ascontiguousarray(wave[offset:])
        return [samples[number] for number in range(len(chunks))]

    def _wave(self, codes: Tensor, skip: int) -> Tensor:
        """Samples [rows, n] of `codes` [rows, groups, frames] without the first `skip` frames; as the module's forward.

        Positions count from the first frame that is given: only distances matter.
        """
        module = self._module
        hidden = module.code_embedding(codes + module.code_offset).mean(1)
        hidden = module.pre_transformer(inputs_embeds=hidden).last_hidden_state
        wave = hidden[:, skip:].permute(0, 2, 1)
        for blocks in module.upsample:
            for block in blocks:
                wave = block(wave)
        for block in module.decoder:
            wave = block(wave)
        bounded: Tensor = wave.clamp(min=-1, max=1)[:, 0]
        return bounded


_WARM_UP = Job("warm-up", 0, Voiced(), (), ())


def reach(module: Any) -> int:
    """Frames on the left that a sample can depend on in the convolutions, counted from the last to the first.

    A causal convolution looks (kernel - 1) x dilation back, its `padding`; a transposed one of stride s turns s samples
    into one, and its kernel of at most 2 s reaches one further.
    """
    layers = [block for blocks in module.upsample for block in blocks]
    for block in module.decoder:
        layers += list(getattr(block, "block", [block]))
    back = 0
    for layer in reversed(layers):
        for convolution in ("conv2", "conv1", "dwconv"):
            if hasattr(layer, convolution):
                back += int(getattr(layer, convolution).padding)
        inner = getattr(layer, "conv", None)
        if isinstance(inner, torch.nn.ConvTranspose1d):
            back = math.ceil(back / inner.stride[0]) + 1
        elif isinstance(inner, torch.nn.Conv1d):
            back += int(layer.padding)
    return back + 1
