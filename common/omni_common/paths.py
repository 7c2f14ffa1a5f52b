"""Where files that belong to the deployment stand: the YAML files of `deploy/` and the prepared models."""

import os
from pathlib import Path
from typing import Literal

Kind = Literal["pipelines", "models"]
#: Folder below this package in an installed wheel, by folder of `deploy/`; the build copies them (pyproject.toml).
_PACKAGED: dict[Kind, str] = {"pipelines": "pipelines", "models": "model_lists"}
_HERE = Path(__file__).resolve().parent


def deploy_dir(kind: Kind) -> Path:
    """The folder `deploy/<kind>`, in an installed wheel its copy inside this package."""
    packaged = _HERE / _PACKAGED[kind]
    return packaged if packaged.is_dir() else _HERE.parents[1] / "deploy" / kind


def deploy_file(kind: Kind, name: str) -> Path:
    """Path of `deploy/<kind>/<name>`; it may not exist. Raises ValueError if `name` is more than a file name."""
    if not name or Path(name).name != name:
        raise ValueError(f"{name!r} is not a file name")
    return deploy_dir(kind) / name


def models_dir() -> Path:
    """Where prepared models are kept, one folder each: `$OMNI_MODELS`, else `~/.cache/omnibus/models`."""
    given = os.environ.get("OMNI_MODELS")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "omnibus" / "models"
