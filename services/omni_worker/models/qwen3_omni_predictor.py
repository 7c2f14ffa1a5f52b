"""The code predictor of Qwen3-Omni's talker: the further codes of a frame, one tight loop on the device.

For a frame it runs once a group on what came before in this frame: the talker's last hidden state, then the codes.
Nothing of it is kept from frame to frame. The loop never waits for the host, so that a CUDA graph can hold all of it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from omni_worker.engines.cuda_graphs import CudaGraphs, bucket
from omni_worker.engines.sampler import choose

#: How it draws where the talker does not choose greedily: as in the library.
TEMPERATURE, TOP_K, TOP_P = 1.0, 50, 0.8


class Predictor:
    """`predictor` is transformers' code predictor, `first` the talker's own table of codes, `slots` the most frames
    at a time."""

    def __init__(
        self, predictor: Any, first: nn.Embedding, groups: int, slots: int, device: torch.device, graphs: bool
    ) -> None:
        self._predictor = predictor
        self._tables = [first, *predictor.get_input_embeddings()]
        self.groups = groups
        self._slots = slots
        self._device = device
        self._graphs = CudaGraphs(device) if graphs else None
        if self._graphs:
            self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Record every size, so that no request waits for it."""
        table = self._tables[0].weight
        count = 1
        while True:
            hidden = torch.zeros(count, table.shape[1], dtype=table.dtype, device=self._device)
            firsts = torch.zeros(count, dtype=torch.long, device=self._device)
            numbers = torch.zeros(count, self.groups - 1, device=self._device)
            self.complete(hidden, firsts, numbers, torch.zeros(count, dtype=torch.bool, device=self._device))
            if count == self._slots:
                return
            count = min(2 * count, self._slots)

    def embed(self, codes: Tensor) -> Tensor:
        """What a frame adds to the talker's next input: `codes` int64 [n, groups] -> [n, hidden]."""
        parts = [table(codes[:, group]) for group, table in enumerate(self._tables)]
        return torch.stack(parts, 1).sum(1)

    def embed_first(self, codes: list[int]) -> Tensor:
        """[n] -> [n, hidden], of the talker's own table."""
        embedded: Tensor = self._tables[0](torch.tensor(codes, device=self._device))
        return embedded

    def complete(self, hidden: Tensor, firsts: Tensor, numbers: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
        """Codes int64 [n, groups] of a frame each, and what they add to the talker's next input, [n, hidden].

        `hidden` [n, hidden], `firsts` int64 [n]: code of the first group, `numbers` float32 [n, groups - 1] in [0, 1),
        `greedy` bool [n].
        """
        count = len(firsts)
        if self._graphs is None:
            return self._complete(hidden, firsts, numbers, greedy)
        more = bucket(count, 1, self._slots) - count
        padded = [nn.functional.pad(hidden, (0, 0, 0, more)), nn.functional.pad(firsts, (0, more))]
        padded += [nn.functional.pad(numbers, (0, 0, 0, more)), nn.functional.pad(greedy, (0, more))]
        codes, embeds = self._graphs.run(count + more, self._complete, *padded)
        return codes[:count], embeds[:count].clone()

    def _complete(self, hidden: Tensor, firsts: Tensor, numbers: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
        cache = DynamicCache(config=self._predictor.config)
        codes = [firsts]
        inputs = torch.stack([hidden, self._tables[0](firsts)], 1)
        count = len(firsts)
        temperature = torch.where(greedy, 0.0, TEMPERATURE)
        bounds = [torch.full((count,), float(value), device=hidden.device) for value in (TOP_K, TOP_P, 0.0)]
        for group in range(1, self.groups):
            output = self._predictor.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True)
            logits = self._predictor.lm_head[group - 1](output.last_hidden_state[:, -1]).float()
            code = choose(logits, numbers[:, group - 1], temperature, *bounds)
            codes.append(code)
            inputs = self._tables[group](code)[:, None]
        frames = torch.stack(codes, 1)
        return frames, self.embed(frames)
