"""The `vllm` engine: text and thinkers by vLLM, which runs in this process and is asked for one step at a time.

Its scheduler batches, its kernels compute; sampling is ours (`vllm_choice`), so a token depends on the request alone.
Prompts come from the preprocessor with their media processed (`vllm_prompt`). A thinker that a talker listens to puts
out what `omni_worker.models.omni_thinker` says.

vLLM computes every job that it has: one whose consumers have no room goes on, and what it says waits here, at most
`max_tokens` of it.
"""

import logging
import os
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before vLLM is imported: no second process around the engine core, no choice of CPU cores, no word to the outside, no
# log handler of its own, and the model runner whose batch `vllm_extension` reads.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
}

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor
from vllm import EngineArgs, LLMEngine, ModelRegistry, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from omni_common.checkpoint import read_manifest
from omni_common.errors import OmniError, invalid
from omni_worker.engine import Failure, Job, LoadContext, Output, Piece
from omni_worker.engines.vllm_answer import Answer
from omni_worker.engines.vllm_choice import Choice
from omni_worker.engines.vllm_extension import HEARD, POSITIONS
from omni_worker.engines.vllm_kind import Kind, read_kind
from omni_worker.engines.vllm_prompt import engine_input, positions

log = logging.getLogger(__name__)

#: Of keys and values on a CPU, where vLLM would take most of the machine's memory.
CPU_CACHE_MIB = 1024


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """`options:` of the stage. What the `transformers` engine has too has its name there, so that a pipeline can change
    engines alone; the others are vLLM's, under its names."""

    #: A complete checkpoint, as a hub has it; empty: what the stage's model was prepared from, or the model's folder.
    checkpoint: str = ""
    #: Of the `transformers` engine: here the checkpoint says it.
    part: str = ""
    #: What vLLM must be built for, if it is said.
    device: str = ""
    dtype: str = "float32"
    #: Positions of prompt and answer together; vLLM's `max_model_len`.
    context: int = 4096
    prefix_cache: bool = True
    #: Whether a talker may listen.
    feeds_talker: bool = True
    #: Memory for keys and values; 0: what `gpu_memory_utilization` leaves, on a CPU 1 GiB.
    kv_cache_mib: int = 0
    gpu_memory_utilization: float = 0.9
    #: Positions that a step computes at most.
    max_num_batched_tokens: int = 2048
    #: No compiler and no CUDA graphs. A talker hears layers that Python runs, so it needs this.
    enforce_eager: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False


class Vllm:
    """See the module's docstring, and `omni_worker.engine.Engine` for the contract."""

    in_flight = False
    resumes = True
    rebuilds = True

    def __init__(self) -> None:
        self.busy = False
        #: By request, and by the name of its request in vLLM.
        self._answers: dict[str, Answer] = {}
        self._running: dict[str, Answer] = {}
        self._engine: LLMEngine | None = None

    def load(self, context: LoadContext) -> None:
        try:
            options = msgspec.convert(context.options, Options)
        except msgspec.ValidationError as error:
            raise OmniError(f"options of a vllm stage: {error}", code="invalid_config") from None
        if options.device and torch.device(options.device).type != current_platform.device_type:
            raise OmniError(f"this vLLM is for {current_platform.device_type}", code="invalid_config")
        folder = Path(context.models) / context.model
        checkpoint = find_checkpoint(options.checkpoint, folder)
        context.progress("config", 0.0)
        torch.set_num_threads(context.threads)
        kind, self._context = read_kind(checkpoint, folder), options.context
        self._kind = kind if options.feeds_talker else replace(kind, hearing=None)
        if self._kind.hearing is not None and not options.enforce_eager:
            raise OmniError(
                "without enforce_eager no talker can listen: set feeds_talker: false", code="invalid_config"
            )
        prepared = folder / "processor" / "tokenizer.json"
        file = prepared if prepared.exists() else checkpoint / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(file))
        _register(self._kind)
        context.progress("weights", 0.1)
        self._engine = LLMEngine.from_engine_args(_engine_args(options, checkpoint, context.slots))
        if self._kind.media is not None:
            self._call("place_media")
        self._specials = torch.empty(0)
        if self._kind.hearing is not None:
            self._call("listen", self._kind.hearing.layer)
            self._specials = self._embed(self._kind.hearing.specials)
        context.progress("warm-up", 0.9)
        self._warm_up()

    def add(self, job: Job) -> None:
        self._answers[job.request_id] = Answer(job, self._kind, self._detokenize, self._context)

    def push(self, request_id: str, piece: Piece) -> None:
        self._answers[request_id].push(piece)
        self._look()

    def cancel(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._stop(answer)
        self._look()

    def step(self, blocked: Set[str]) -> list[Output | Failure]:
        results: list[Output | Failure] = []
        for answer in [answer for answer in self._answers.values() if answer.features is not None]:
            try:
                self._begin(answer)
            except Exception as error:
                results.append(self._failed(answer, error))
        if self._running:
            results += self._advance()
        for name, answer in list(self._answers.items()):
            answer.tell(self._specials)
            if name not in blocked:
                results += self._collect(answer)
        self._look()
        return results

    def close(self) -> None:
        self._answers.clear()
        self._running.clear()
        self.busy = False
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None

    # ----------------------------------------------------------------------------------------------------- requests

    def _begin(self, answer: Answer) -> None:
        features, arrays = answer.features, answer.arrays
        assert features is not None
        answer.features = None
        ids = answer.open(self._embed)
        if answer.finish and not answer.listened:
            return
        # A finished answer whose states are wanted is computed again, and what comes after it dropped.
        wanted = 1 if answer.finish else answer.left
        choice = Choice(answer.params, answer.job.seed, sorted(self._kind.end_ids), len(ids) - len(answer.prompt))
        placed = positions(len(ids), features, arrays, self._kind.media)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=wanted,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            # States of positions that the cache holds are not computed.
            skip_reading_prefix_cache=bool(answer.listened),
            extra_args={HEARD: answer.listened, POSITIONS: placed} | choice.to_extra_args(),
        )
        prompt = engine_input(ids, features, arrays, self._kind.media)
        try:
            answer.name = self._vllm.add_request(answer.job.request_id, prompt, params)
        except (ValueError, VLLMValidationError) as error:
            raise invalid(str(error), "messages") from None
        self._running[answer.name] = answer
        answer.free()

    def _advance(self) -> list[Failure]:
        """One step of vLLM, and what came of it: a token of each answer that is past its prompt."""
        failures: list[Failure] = []
        outputs = self._vllm.step()
        if any(answer.listened for answer in self._running.values()):
            for name, start, states in self._call("heard"):
                if name in self._running:
                    self._running[name].hear(start, states)
        fresh: list[Answer] = []
        for output in outputs:
            answer = self._answers[output.request_id]
            for token in output.outputs[0].token_ids if not answer.finish else ():
                answer.append(token)
                fresh.append(answer)
            if answer.finish:
                self._stop(answer)
            elif output.finished:
                failures.append(self._failed(answer, RuntimeError(f"vLLM: {output.outputs[0].finish_reason}")))
        fed = [answer for answer in fresh if answer.talkers and not answer.finish]
        if fed:
            embeds = self._embed([answer.tokens[-1] for answer in fed])
            for row, answer in enumerate(fed):
                answer.embedded(len(answer.prompt) + len(answer.tokens) - 1, embeds[row : row + 1])
        return failures

    def _collect(self, answer: Answer) -> list[Output]:
        outputs = list(answer.outputs)
        answer.outputs.clear()
        for output in outputs:
            if output.last:
                answer.ended.update(answer.job.sinks if output.sinks is None else output.sinks)
        if answer.ended.issuperset(answer.job.sinks):
            self.cancel(answer.job.request_id)
        return outputs

    def _look(self) -> None:
        waiting = any(answer.features is not None or answer.outputs for answer in self._answers.values())
        self.busy = waiting or bool(self._running)

    def _stop(self, answer: Answer) -> None:
        if self._running.pop(answer.name, None) is not None:
            self._vllm.abort_request([answer.name], internal=True)

    def _failed(self, answer: Answer, error: Exception) -> Failure:
        name = answer.job.request_id
        self.cancel(name)
        if isinstance(error, OmniError):
            return Failure(name, error.message, error.code, error.status, error.param)
        log.exception("request %s failed", name, exc_info=error)
        return Failure(name, f"{type(error).__name__}: {error}")

    # --------------------------------------------------------------------------------------------------------- vLLM

    @property
    def _vllm(self) -> LLMEngine:
        assert self._engine is not None
        return self._engine

    def _call(self, method: str, *arguments: Any) -> Any:
        """A method of `vllm_extension.Extension`; of several workers the first knows it all."""
        return self._vllm.collective_rpc(method, args=arguments)[0]

    def _embed(self, ids: list[int]) -> Tensor:
        embedded: Tensor = self._call("embed", ids)
        return embedded

    def _detokenize(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _warm_up(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        self._vllm.add_request("warm-up", tokens_input([0]), params)
        while self._vllm.has_unfinished_requests():
            self._vllm.step()


def find_checkpoint(named: str, folder: Path) -> Path:
    """The complete checkpoint: as named, or what `folder` was prepared from, or `folder`. Raises OmniError."""
    manifest = read_manifest(folder)
    found = Path(named or (manifest.source.path if manifest else folder))
    if not any(found.glob("*.safetensors")):
        raise OmniError(f"no checkpoint in {found}: name one in options.checkpoint", status=503, code="model_missing")
    return found


def _register(kind: Kind) -> None:
    """Import the model's modules here. vLLM would look at them in a second process, which takes longer and is without
    what `torchvision_shim` does."""
    for name in kind.architectures:
        if name not in ModelRegistry.models:
            raise OmniError(f"vLLM has no {name}", code="bad_checkpoint")
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _engine_args(options: Options, checkpoint: Path, slots: int) -> EngineArgs:
    mib = options.kv_cache_mib or (CPU_CACHE_MIB if current_platform.is_cpu() else 0)
    return EngineArgs(
        model=str(checkpoint),
        dtype=options.dtype,
        max_model_len=options.context,
        max_num_seqs=slots,
        max_num_batched_tokens=options.max_num_batched_tokens,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=(mib << 20) or None,
        enable_prefix_caching=options.prefix_cache,
        enforce_eager=options.enforce_eager,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        enable_expert_parallel=options.enable_expert_parallel,
        # What the processor of vLLM would do is done already, and processed media are kept by the preprocessor.
        mm_processor_cache_gb=0,
        skip_mm_profiling=True,
        # A step gives its tokens when it returns.
        async_scheduling=False,
        logits_processors=["omni_worker.engines.vllm_choice:Chooser"],
        worker_extension_cls="omni_worker.engines.vllm_extension.Extension",
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
