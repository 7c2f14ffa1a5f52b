"""`omni-worker --stage NAME`: one replica of a stage, for as long as it lives."""

import argparse
import importlib
import os

from omni_common.errors import OmniError
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
    "fake": ("omni_worker.engines.fake", "FakeEngine"),
}


def make_engine(kind: str) -> Engine:
    """Raises OmniError when the packages that the engine stands on are not installed."""
    module, name = ENGINES[kind]
    try:
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


async def serve(arguments: argparse.Namespace, common: Common, stop: Stop) -> None:
    stage = find_stage(common, arguments.stage)
    name = arguments.name or f"{arguments.stage}-{os.getpid()}"
    engine = make_engine(stage.engine)
    worker = Worker(common.run, name, arguments.stage, stage, engine, str(arguments.models or models_dir()), stop)
    await worker.serve()


def main() -> int:
    parser = argparse.ArgumentParser(prog="omni-worker", description=__doc__)
    parser.add_argument("--stage", required=True, help="a stage of the pipelines")
    parser.add_argument("--name", help="how logs and `omni status` call this replica")
    parser.add_argument("--models", help="folder with prepared models (default: OMNI_MODELS or the user's cache)")
    return run_service(parser, serve)


if __name__ == "__main__":
    raise SystemExit(main())
