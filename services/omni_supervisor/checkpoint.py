"""`omni prepare DIR` and `omni serve --model`: checkpoints of the omni families, split into a folder a stage, once.

The split runs in a process of its own (`omni_worker.split`): it takes as much memory as the checkpoint has bytes, and
PyTorch, which nothing else here needs.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omni_common.checkpoint import family_of, look_at, read_manifest
from omni_common.errors import OmniError
from omni_common.orphan import PARENT_PIPE
from omni_common.paths import deploy_file
from omni_common.pipeline import Pipeline
from omni_common.service import DEFAULT_PIPELINES, load_arguments
from omni_supervisor.prepare import TEMPORARY, list_names, load_list, only_one

Say = Callable[[str], None]
#: At once, also into a pipe: what follows may take minutes.
tell: Say = partial(print, flush=True)

_NAME = re.compile(r"[a-z0-9_][a-z0-9._-]{0,99}")


def is_folder(text: str) -> bool:
    """Whether `text` means a folder rather than a name."""
    return "/" in text or Path(text).is_dir()


def default_name(folder: Path) -> str:
    """The folder's own name, in letters that are safe in a file name. May be empty."""
    return re.sub(r"[^a-z0-9._-]", "-", folder.resolve().name.lower()).lstrip(".-")[:100]


def prepare_checkpoint(source: Path, models: Path, name: str = "", say: Say = tell) -> str:
    """Split the checkpoint in `source` into the folder `models`/`name`, if that is not done; returns the name.

    Safe beside another run, and after an interrupted one. Raises OmniError when the source is of no use, when something
    else has the name, or when the packages that read it are not installed.
    """
    _check_source(source)
    name = name or default_name(source)
    _check_name(name)
    try:
        if not _is_there(source, models, name):
            _check_packages()
            models.mkdir(parents=True, exist_ok=True)
            with only_one(models, say):
                if not _is_there(source, models, name):
                    _split(source, models, name, say)
                    say(f"{name}: ready in {models / name}")
                    return name
    except OSError as error:
        raise _wrong(f"{error.filename or models}: {error.strerror}") from None
    say(f"{name}: already there")
    return name


def with_model(arguments: argparse.Namespace, models: Path, say: Say = tell) -> argparse.Namespace:
    """The arguments of `omni serve --model`, as if its pipeline and the settings of its stages had been given.

    Prepares a folder. Raises OmniError when the model cannot be prepared or fits not with the other arguments.
    """
    model: str = arguments.model
    path = Path(model).resolve()
    source = path if is_folder(model) and path.parent != models.resolve() else None
    family = _check_source(source) if source else _family_of_prepared(path.name, models)
    if arguments.pipelines not in (DEFAULT_PIPELINES, family):
        raise _wrong(f"--model {model} is served by pipeline {family}, not by {arguments.pipelines}: leave --pipeline")
    served = argparse.Namespace(**vars(arguments) | {"pipelines": family})
    # Before the model is prepared, which takes its time.
    pipeline = load_arguments(served)[family]
    name = prepare_checkpoint(source, models, say=say) if source else path.name
    served.overrides = [*settings(pipeline, name), *arguments.overrides]
    return served


def settings(pipeline: Pipeline, name: str) -> list[str]:
    """Values of `--set` by which the pipeline serves a prepared model, to clients under its name too."""
    # JSON is YAML, in which some names would else be numbers.
    value = json.dumps(name)
    aliases = [alias for alias in dict.fromkeys([*pipeline.aliases, name]) if alias != pipeline.name]
    return [*(f"stages.{stage}.model={value}" for stage in pipeline.stages), f"aliases={json.dumps(aliases)}"]


def _check_source(source: Path) -> str:
    """The family of the checkpoint in `source`."""
    if not source.is_dir():
        raise _wrong(
            f"no folder {source}. Models are not fetched from a hub: do that first, as by "
            "`hf download OWNER/MODEL --local-dir FOLDER`, then `omni prepare FOLDER`"
        )
    if read_manifest(source):
        raise _wrong(f"{source} is what omni prepare has made; wanted is the checkpoint itself")
    return family_of(source)


def _family_of_prepared(name: str, models: Path) -> str:
    manifest = read_manifest(models / name)
    if manifest is None:
        raise _wrong(f"no model {name} in {models}; prepare it from its folder: omni prepare FOLDER --name {name}")
    return manifest.family


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise _wrong(f"name {name!r}: wants small letters, digits, `.`, `_` and `-`; choose one: --name NAME")
    for each in list_names():
        if name in load_list(deploy_file("models", f"{each}.yaml")).models:
            raise _wrong(f"{name} is the name of a model of the list {each}; choose another: --name NAME")


def _check_packages() -> None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise _wrong(f"{' and '.join(missing)} not installed, which read checkpoints; run: tools/install transformers")


def _is_there(source: Path, models: Path, name: str) -> bool:
    folder = models / name
    if not os.path.lexists(folder):
        return False
    manifest = read_manifest(folder)
    if manifest is not None and manifest.source == look_at(source):
        return True
    if manifest is None:
        what = "is something else"
    elif manifest.source.path != str(source.resolve()):
        what = f"was prepared from {manifest.source.path}"
    else:
        what = f"was prepared from {source} before that changed"
    raise _wrong(f"{folder} {what}; choose another name (--name NAME), or remove it")


def _split(source: Path, models: Path, name: str, say: Say) -> None:
    gigabytes = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    say(f"{name}: splitting {source} ({gigabytes:.3g} GB, and as much memory)")
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=models) as temporary, contextlib.ExitStack() as stack:
        read, write = os.pipe()
        stack.callback(os.close, read)
        stack.callback(os.close, write)
        fresh = Path(temporary) / name
        done = subprocess.run(
            # -P: a folder of that name where the command happens to be run is not ours.
            [sys.executable, "-P", "-m", "omni_worker.split", str(source.resolve()), str(fresh)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, PARENT_PIPE: str(read)},
            pass_fds=[read],
        )
        if done.returncode < 0:
            raise _wrong(f"{name}: the split was ended by signal {-done.returncode}; was there memory enough?")
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise _wrong(f"{name}: {said[-1] if said else f'the split ended with {done.returncode}'}")
        fresh.rename(models / name)


def _wrong(text: str) -> OmniError:
    return OmniError(text, code="prepare")
