"""`omni_cpu`: the thinker of a tiny Qwen3-Omni against transformers' `generate`, on one core.

The same prompts, greedy, as many tokens each; N at once in our engine, and one after another and as a batch of N in the
library. Nothing here says how fast a real model is: with tiny matrices it is the overhead of a step that is compared.
"""

import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from tools.bench.report import Effort, Goal, Result, about, ratios

TOKENS = 64
AT_ONCE = (1, 8, 32)
#: Of the issue: at 8 requests, against `generate` as it serves them, one after another.
GOAL = Goal(">=", 6)
ROOT = Path(__file__).parents[2]


async def measure(effort: Effort) -> Result:
    result = Result(about(__doc__))
    tokens = effort.times(TOKENS)
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        _made(Path(folder))
        sides = _Sides(Path(folder), tokens)
        for count in AT_ONCE:
            ours, alone, batch = [], [], []
            for _ in range(1 + effort.rounds):
                ours.append(sides.engine(count))
                alone.append(sides.in_a_row(min(count, 4)))
                batch.append(sides.batch(count))
            # The first round warms up.
            for values in (ours, alone, batch):
                del values[0]
            result.add(f"{count} at once: Omnibus", "tokens/s", ours)
            result.add(f"{count}: generate, one after another", "tokens/s", alone)
            result.add(f"{count}: generate, a batch of equal lengths", "tokens/s", batch)
            goal = GOAL if count == 8 else None
            result.add(f"{count}: Omnibus / generate, one after another", "x", ratios(ours, alone), goal)
            result.add(f"{count}: Omnibus / generate, a batch", "x", ratios(ours, batch))
    result.notes = [f"{tokens} tokens a request after prompts of 40; one thread; float32"]
    return result


def _made(folder: Path) -> None:
    # torch makes this folder, used or not, in this process too.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    for command in (
        [ROOT / "tools" / "make_tiny_models.py", folder, "qwen3_omni"],
        ["-m", "omni_worker.split", folder / "qwen3_omni_tiny", folder / "models" / "tiny"],
    ):
        subprocess.run([sys.executable, *command], check=True, capture_output=True)


class _Sides:
    def __init__(self, folder: Path, tokens: int) -> None:
        from omni_worker.torchvision_shim import declare_ops

        declare_ops()
        import torch
        import transformers

        from omni_common.frames import Features
        from omni_common.params import Generation
        from omni_worker.engine import Job, LoadContext, Piece
        from omni_worker.engines.autoregressive import Autoregressive

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)
        self._torch, self._tokens = torch, tokens
        whole: Any = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder / "qwen3_omni_tiny")
        self._thinker = whole.thinker.eval()
        self._engine = Autoregressive()
        options = {"part": "qwen3_omni_thinker", "context": 256, "prefix_cache": False}
        context = LoadContext("tiny", options, str(folder / "models"), max(AT_ONCE), 1, lambda *_: None, lambda: None)
        self._engine.load(context)
        params = Generation(max_tokens=tokens, min_tokens=tokens)
        self._job = lambda name: Job(name, 1, params, ("preprocessor",), ("client",))
        self._piece = lambda ids: Piece("preprocessor", 0, 1, True, Features(), {"ids": ids})
        self._prompts = np.random.default_rng(0).integers(0, 300, (max(AT_ONCE), 40))

    def engine(self, count: int) -> float:
        began, done = time.perf_counter(), 0
        for number in range(count):
            self._engine.add(self._job(str(number)))
            self._engine.push(str(number), self._piece(self._prompts[number]))
        while self._engine.busy:
            done += len(self._engine.step(set()))
        assert done == count * self._tokens
        return done / (time.perf_counter() - began)

    def in_a_row(self, count: int) -> float:
        began = time.perf_counter()
        for number in range(count):
            self._generate(self._prompts[number : number + 1])
        return count * self._tokens / (time.perf_counter() - began)

    def batch(self, count: int) -> float:
        began = time.perf_counter()
        self._generate(self._prompts[:count])
        return count * self._tokens / (time.perf_counter() - began)

    def _generate(self, prompts: np.ndarray[Any, Any]) -> None:
        ids = self._torch.from_numpy(prompts)
        limits = {"min_new_tokens": self._tokens, "max_new_tokens": self._tokens}
        with warnings.catch_warnings(), self._torch.no_grad():
            warnings.simplefilter("ignore")
            made = self._thinker.generate(
                input_ids=ids, attention_mask=self._torch.ones_like(ids), do_sample=False, **limits
            )
        assert made.shape[1] == prompts.shape[1] + self._tokens
