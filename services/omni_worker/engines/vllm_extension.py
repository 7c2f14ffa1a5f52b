"""An extension of vLLM's worker: what a talker hears is taken out of it, and the positions of media are handed in.

vLLM's own way of handing out hidden states works with CUDA only (0.32: it takes CUDA streams). This one is called by
`collective_rpc`, so it works in whatever process the worker lives; it needs the layers to be run by Python
(`enforce_eager`), as a hook on a compiled or recorded layer is not called.
"""

from typing import Any

import torch
from torch import Tensor

from omni_worker.engines.vllm_kind import LAST_NORM

#: Key in `SamplingParams.extra_args`: the request's positions are heard, up to which one.
HEARD = "omni_heard"
#: The same: [3, length], positions of the prompt.
POSITIONS = "omni_positions"


class Extension:
    """Mixed into vLLM's worker, whose `model_runner` (of the first kind) knows which rows are whose."""

    model_runner: Any

    def place_media(self) -> None:
        """From now on take the positions of prompts that come with them."""
        runner = self.model_runner
        own = runner._init_mrope_positions

        def place(request: Any) -> None:
            rows = (request.sampling_params.extra_args or {}).get(POSITIONS)
            if not rows:
                own(request)
                return
            request.mrope_positions = torch.tensor(rows)
            request.mrope_position_delta = rows[0][-1] + 1 - len(rows[0])

        runner._init_mrope_positions = place

    def listen(self, layer: int) -> None:
        """From now on keep what decoder layer number `layer` puts out."""
        #: (request id of vLLM, first position, states [n, hidden]) of the last forward.
        self.omni_heard: list[tuple[str, int, Tensor]] = []
        model = self.model_runner.model
        module = model if layer == LAST_NORM else model.get_language_model().model.layers[layer]
        module.register_forward_hook(self._omni_hear)

    def heard(self) -> list[tuple[str, int, Tensor]]:
        """What was heard since the last call: (request id of vLLM, first position, states [n, hidden] on the CPU)."""
        taken, self.omni_heard = self.omni_heard, []
        return taken

    def embed(self, ids: list[int]) -> Tensor:
        """[n, hidden] on the CPU."""
        runner = self.model_runner
        with torch.inference_mode():
            table = runner.model.get_language_model().model.embed_input_ids
            embedded: Tensor = table(torch.tensor(ids, device=runner.device)).cpu()
        return embedded

    def _omni_hear(self, _: Any, __: Any, output: Tensor | tuple[Tensor, Tensor]) -> None:
        runner = self.model_runner
        batch, requests, starts = runner.input_batch, runner.requests, runner.query_start_loc.np
        for row, name in enumerate(batch.req_ids):
            until = (requests[name].sampling_params.extra_args or {}).get(HEARD, 0)
            position = int(batch.num_computed_tokens_cpu[row])
            if position < until:
                rows = slice(int(starts[row]), int(starts[row + 1]))
                # A decoder layer leaves the sum to the next norm.
                states = output[rows].clone() if isinstance(output, Tensor) else output[0][rows] + output[1][rows]
                self.omni_heard.append((name, position, states.cpu()))
