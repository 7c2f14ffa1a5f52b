"""What a prepared checkpoint of a multi-stage model says of itself: the manifest that `omni_worker.split` writes."""

import json
from pathlib import Path

import msgspec

from omni_common.errors import OmniError

MANIFEST = "manifest.json"
#: `model_type` of a checkpoint's `config.json` to the pipeline that serves it.
FAMILIES = {"qwen3_omni_moe": "qwen3_omni", "qwen2_5_omni": "qwen2_5_omni"}


class FileState(msgspec.Struct, frozen=True):
    """What changes when a file does. `size` in bytes."""

    size: int
    mtime_ns: int


class Source(msgspec.Struct, frozen=True):
    """A checkpoint as it was when it was prepared. Equal: nothing has changed since."""

    #: Absolute, without symbolic links.
    path: str
    files: dict[str, FileState]


class Manifest(msgspec.Struct, frozen=True):
    """A prepared checkpoint; the presence of its manifest says that the folder is whole."""

    #: The pipeline that serves it.
    family: str
    source: Source
    #: Of the weights, as torch names it.
    dtype: str
    #: Bytes of each file of weights, by stage.
    stages: dict[str, dict[str, int]]
    #: Names of the voices.
    speakers: list[str]
    #: Of the packages that read the source.
    versions: dict[str, str]


def look_at(source: Path) -> Source:
    """The files in the checkpoint's folder, but hidden ones. Raises OmniError when it cannot be read."""
    try:
        states = {path.name: path.stat() for path in sorted(source.iterdir()) if path.is_file()}
    except OSError as error:
        raise bad_checkpoint(f"{error.filename}: {error.strerror}") from None
    files = {n: FileState(s.st_size, s.st_mtime_ns) for n, s in states.items() if not n.startswith(".")}
    return Source(str(source.resolve()), files)


def family_of(source: Path) -> str:
    """The pipeline that serves the checkpoint in `source`. Raises OmniError that says what is wrong with it."""
    try:
        config = json.loads((source / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise bad_checkpoint(f"{source} is no checkpoint: {error}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in FAMILIES:
        raise bad_checkpoint(f"model_type {kind!r} of {source} is none of {', '.join(FAMILIES)}")
    if not config.get("enable_audio_output", True):
        raise bad_checkpoint(f"{source} has a thinker only (enable_audio_output is false): no pipeline serves that")
    if not any(source.glob("*.safetensors")):
        raise bad_checkpoint(f"{source} has no weights as safetensors, and other files of weights are not read")
    return FAMILIES[kind]


def read_manifest(folder: Path) -> Manifest | None:
    """None when `folder` is not a prepared checkpoint."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def bad_checkpoint(text: str) -> OmniError:
    return OmniError(text, code="bad_checkpoint")
