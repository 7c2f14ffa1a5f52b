"""`omni-worker --stage NAME`: one replica of a stage, for as long as it lives."""

import argparse
import importlib
import os

from threadpoolctl import threadpool_limits

from omni_common.errors import OmniError
from omni_common.ids import default_name
from omni_common.paths import models_dir
from omni_common.pipeline import Stage
from omni_common.service import Common, Stop, run_service
from omni_worker.engine import Engine
from omni_worker.shell import Worker

#: `engine:` of a pipeline file -> module and class; imported by the worker that needs it only.
ENGINES = {
    "llamacpp": ("omni_worker.engines.llamacpp", "Llamacpp"),
    "recogniser": ("omni_worker.engines.recogniser", "Recogniser"),
    "onnx": ("omni_worker.engines.onnx", "Onnx"),
    "processor": ("omni_worker.engines.processor", "Processor"),
    "transformers": ("omni_worker.engines.autoregressive", "Autoregressive"),
    "codec": ("omni_worker.engines.codec", "Codec"),
    "vllm": ("omni_worker.engines.vllm_engine", "Vllm"),
    "fake": ("omni_worker.engines.fake", "FakeEngine"),
}
#: Those that import transformers, before which something must be in order.
ON_TRANSFORMERS = frozenset({"processor", "transformers", "codec", "vllm"})


def make_engine(kind: str) -> Engine:
    """Raises OmniError when the packages that the engine stands on are not installed."""
    module, name = ENGINES[kind]
    try:
        if kind in ON_TRANSFORMERS:
            importlib.import_module("omni_worker.torchvision_shim").declare_ops()
        engine: Engine = getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise OmniError(f"engine {kind} needs packages that are not installed: {error}", code="not_installed") from None
    return engine


def find_stage(common: Common, name: str) -> Stage:
    for pipeline in common.pipelines.values():
        if name in pipeline.stages:
            return pipeline.stages[name]
    known = sorted({stage for pipeline in common.pipelines.values() for stage in pipeline.stages})
    raise OmniError(f"no stage {name!r} in {', '.join(common.pipelines)}; there are {', '.join(known)}")


def held_inputs(common: Common, name: str) -> frozenset[str]:
    """Inputs of the stage that it takes when they are complete; pipelines that share it agree on those they share."""
    return frozenset[str]().union(*(p.held(name) for p in common.pipelines.values() if name in p.stages))


def limit_threads(stage: Stage) -> None:
    """Keep numeric libraries to the stage's threads: numpy's, which is loaded, and those that engines load later."""
    threadpool_limits(stage.threads)
    os.environ["OMP_NUM_THREADS"] = str(stage.threads)
    # onnxruntime otherwise keeps a telemetry database in the user's home and writes into the temporary folder.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"


async def serve(arguments: argparse.Namespace, common: Common, stop: Stop) -> None:
    stage = find_stage(common, arguments.stage)
    limit_threads(stage)
    name = arguments.name or default_name(arguments.stage)
    engine = make_engine(stage.engine)
    models = str(arguments.models or models_dir())
    held = held_inputs(common, arguments.stage)
    worker = Worker(common.run, name, arguments.stage, stage, engine, models, stop, held)
    await worker.serve()


def main() -> int:
    parser = argparse.ArgumentParser(prog="omni-worker", description=__doc__)
    parser.add_argument("--stage", required=True, help="a stage of the pipelines")
    parser.add_argument("--name", help="how logs and `omni status` call this replica")
    parser.add_argument("--models", help="folder with prepared models (default: OMNI_MODELS or the user's cache)")
    return run_service(parser, serve)


if __name__ == "__main__":
    raise SystemExit(main())
