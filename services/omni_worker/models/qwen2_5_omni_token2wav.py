"""The vocoder of Qwen2.5-Omni: transformers' Qwen2_5OmniToken2WavModel (diffusion to a mel spectrogram, then BigVGAN).

Its diffusion sees the whole utterance, so sound is made when the last code is there, once. Each frame is one code. The
noise is drawn as after `torch.manual_seed(seed)` with the request's seed.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen2_5OmniToken2WavModel

from omni_common.errors import OmniError, invalid
from omni_common.params import Voiced
from omni_worker.engine import Job, LoadContext
from omni_worker.engines.codec import Decoding, Samples
from omni_worker.weights import load_stage


class Model:
    """See the module's docstring."""

    rate = 24_000

    def load(self, folder: Path, context: LoadContext) -> None:
        options = context.options
        self._device = torch.device(str(options.get("device", "cpu")))
        # Always float32, as in the library: the steps of the diffusion add up what bfloat16 rounds away.
        config = AutoConfig.from_pretrained(folder, local_files_only=True).token2wav_config
        build = partial(Qwen2_5OmniToken2WavModel, config)
        random = options.get("weights") == "random"
        self._module: Any = load_stage(folder, "code2wav", build, torch.float32, self._device, random=random)
        self._codes: int = config.dit_config.num_embeds + 1
        tensors = load_file(folder / "speakers.safetensors", device=str(self._device))
        names = sorted({name.rpartition(".")[0] for name in tensors})
        self._voices = {name.lower(): (tensors[f"{name}.cond"], tensors[f"{name}.ref_mel"]) for name in names}

    def open(self, job: Job) -> Decoding:
        assert isinstance(job.params, Voiced)
        if job.params.voice and job.params.voice.lower() not in self._voices:
            raise invalid(f"voice: {job.params.voice!r} is not one of {', '.join(self._voices)}", "voice")
        return Decoding(job)

    def due(self, decoding: Decoding) -> int:
        """The end, once it is there."""
        return len(decoding.frames) if decoding.ended and not decoding.decoded else 0

    def decode(self, chunks: list[tuple[Decoding, int]]) -> list[Samples]:
        """One after another: lengths differ, and what is together in a batch shares its noise."""
        return [self._sound(decoding) for decoding, _ in chunks]

    def _sound(self, decoding: Decoding) -> Samples:
        params = decoding.job.params
        assert isinstance(params, Voiced)
        voice = params.voice.lower() or next(iter(self._voices))
        conditioning, mel = self._voices[voice]
        frames = [frame[0] for frame in decoding.frames]
        if max(frames) >= self._codes:
            # The talker has more ids than these; on a GPU to look one up would be the end of the process.
            raise OmniError(f"the talker's code {max(frames)} is none of sound's {self._codes}", code="invalid_code")
        codes = torch.tensor([frames], device=self._device)
        cuda = [self._device] if self._device.type == "cuda" else []
        # The library draws from the global state, which only this thread uses.
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(decoding.job.seed & (2**63 - 1))
            wave = self._module(codes, conditioning=conditioning, reference_mel=mel)
        samples: Samples = wave.reshape(-1).float().cpu().numpy()
        return samples
