import argparse
import fcntl
import json
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from omni_common.checkpoint import MANIFEST, Manifest, family_of, look_at
from omni_common.errors import OmniError
from omni_common.paths import deploy_file
from omni_common.pipeline_check import PipelineError
from omni_common.service import load_arguments
from omni_supervisor import checkpoint as module
from omni_supervisor.checkpoint import default_name, prepare_checkpoint, with_model
from omni_supervisor.cli import main
from omni_supervisor.plan import pipeline_flags
from omni_supervisor.prepare import TEMPORARY, list_names, load_list
from omni_supervisor.serve import add_arguments


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNI_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Sources that were split; the split itself, which needs torch, is in tests/unit/worker/test_split.py."""
    done: list[Path] = []

    def split(source: Path, models: Path, name: str, say: module.Say) -> None:
        done.append(source)
        (models / name).mkdir()
        manifest = Manifest(family_of(source), look_at(source), "float32", {}, [], {})
        (models / name / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    monkeypatch.setattr(module, "_split", split)
    monkeypatch.setattr(module, "_check_packages", lambda: None)
    return done


def make_source(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", **config}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def serve_arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------------------------------------ prepare


def test_a_folder_is_split_once(tmp_path: Path, models: Path, splits: list[Path], said: list[str]) -> None:
    source = make_source(tmp_path / "Qwen3-Omni Tiny")
    assert prepare_checkpoint(source, models, say=said.append) == "qwen3-omni-tiny"
    assert prepare_checkpoint(source, models, say=said.append) == "qwen3-omni-tiny"
    assert splits == [source]
    assert said[-1] == "qwen3-omni-tiny: already there"
    assert prepare_checkpoint(source, models, "other", said.append) == "other"
    assert len(splits) == 2


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Qwen2.5-Omni-7B", "qwen2.5-omni-7b"),
        ("a b+c", "a-b-c"),
        (".-hidden", "hidden"),
        ("漢字", ""),
        ("x" * 200, "x" * 100),
    ],
)
def test_names(folder: str, name: str) -> None:
    assert default_name(Path("/") / folder) == name


@pytest.mark.parametrize("name", ["../up", "a/b", ".", "..", ".lock", "Large", "a\n", "x" * 101])
def test_a_name_is_a_safe_file_name(tmp_path: Path, models: Path, splits: list[Path], name: str) -> None:
    with pytest.raises(OmniError, match="choose one: --name"):
        prepare_checkpoint(make_source(tmp_path / "source"), models, name)
    assert not splits and not models.exists()


def test_a_lists_models_keep_their_names(tmp_path: Path, models: Path, splits: list[Path]) -> None:
    taken = next(iter(load_list(deploy_file("models", f"{list_names()[0]}.yaml")).models))
    with pytest.raises(OmniError, match="is the name of a model of the list"):
        prepare_checkpoint(make_source(tmp_path / "source"), models, taken)


def test_another_source_does_not_take_a_name(tmp_path: Path, models: Path, splits: list[Path]) -> None:
    first, second = make_source(tmp_path / "a" / "m"), make_source(tmp_path / "b" / "m")
    prepare_checkpoint(first, models)
    with pytest.raises(OmniError, match=f"was prepared from {first}; choose another name"):
        prepare_checkpoint(second, models)
    (first / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(OmniError, match="before that changed"):
        prepare_checkpoint(first, models)
    (models / "else").mkdir()
    with pytest.raises(OmniError, match="is something else"):
        prepare_checkpoint(first, models, "else")
    assert splits == [first]


def test_what_is_no_source_is_told(tmp_path: Path, models: Path, splits: list[Path]) -> None:
    def refusal(source: Path) -> str:
        with pytest.raises(OmniError) as caught:
            prepare_checkpoint(source, models)
        return caught.value.message

    assert "Models are not fetched from a hub: do that first" in refusal(Path("Qwen/Qwen3-Omni"))
    (tmp_path / "empty").mkdir()
    assert "no checkpoint" in refusal(tmp_path / "empty")
    assert "'llama' of" in refusal(make_source(tmp_path / "llama", model_type="llama"))
    assert "thinker only" in refusal(make_source(tmp_path / "thinking", enable_audio_output=False))
    pickled = make_source(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "no weights as safetensors" in refusal(pickled)
    prepare_checkpoint(make_source(tmp_path / "m"), models)
    assert "is what omni prepare has made" in refusal(models / "m")


def test_missing_packages_are_named_with_the_remedy(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OmniError, match="torch and transformers not installed.*tools/install transformers"):
        prepare_checkpoint(make_source(tmp_path / "m"), models)


def test_one_at_a_time(tmp_path: Path, models: Path, splits: list[Path], said: list[str]) -> None:
    """Waits for who has the lock, and removes what a dead one left."""
    source, waits = make_source(tmp_path / "m"), threading.Event()
    models.mkdir()
    (models / f"{TEMPORARY}x").mkdir()

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    with (models / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=prepare_checkpoint, args=(source, models, "", say))
        other.start()
        assert waits.wait(10)
        assert said == ["waiting for another omni prepare"] and not splits
        fcntl.flock(lock, fcntl.LOCK_UN)
        other.join(10)
    assert splits == [source]
    assert sorted(path.name for path in models.iterdir()) == [".lock", "m"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "import sys; print('noise', file=sys.stderr); sys.exit('3 missing keys, first x')",
            "m: 3 missing keys, first x",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9; was there memory enough"),
    ],
)
def test_a_split_that_fails_leaves_nothing(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], script: str, message: str
) -> None:
    source, python = make_source(tmp_path / "m"), tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(module, "_check_packages", lambda: None)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(OmniError, match=message):
        prepare_checkpoint(source, models, say=said.append)
    assert [path.name for path in models.iterdir()] == [".lock"]


def test_the_command_tells_lists_from_folders(
    tmp_path: Path,
    models: Path,
    splits: list[Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_source(tmp_path / "m")
    assert main(["prepare", str(source), "--name", "mine"]) == 0
    assert "mine: ready in" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "m"]) == 0
    assert splits == [source, Path("m")]
    assert main(["prepare", "nothing"]) == 1
    assert "neither a list of models (embedded) nor a folder" in capsys.readouterr().err
    assert main(["prepare", "embedded", "--name", "x"]) == 1


# -------------------------------------------------------------------------------------------------------------- serve


@pytest.mark.parametrize("kind", ["qwen3_omni_moe", "qwen2_5_omni"])
def test_a_model_is_served_by_its_familys_pipeline(tmp_path: Path, models: Path, splits: list[Path], kind: str) -> None:
    family = kind.removesuffix("_moe")
    source = make_source(tmp_path / "1.0", model_type=kind)
    for model in (str(source), "1.0", str(models / "1.0")):
        served = with_model(serve_arguments("--model", model, "--platform=cpu"), models)
        # As every process does.
        processes = serve_arguments(*pipeline_flags(served))
        (pipeline,) = load_arguments(processes).values()
        assert pipeline.name == family
        assert {stage.model for stage in pipeline.stages.values()} == {"1.0"}
        assert pipeline.stages["thinker"].options["device"] == "cpu"
        assert "1.0" in pipeline.aliases and len(pipeline.aliases) > 1
    assert splits == [source]


def test_what_is_set_by_hand_wins(tmp_path: Path, models: Path, splits: list[Path]) -> None:
    source = make_source(tmp_path / "m")
    given = serve_arguments("--model", str(source), "--set=stages.talker.model=other", "--pipeline=qwen3_omni")
    stages = load_arguments(with_model(given, models))["qwen3_omni"].stages
    assert (stages["thinker"].model, stages["talker"].model) == ("m", "other")


def test_contradictions_and_typing_errors_come_before_the_split(
    tmp_path: Path, models: Path, splits: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(make_source(tmp_path / "m"))
    with pytest.raises(OmniError, match="served by pipeline qwen3_omni, not by embedded"):
        with_model(serve_arguments("--model", source, "--pipeline=embedded"), models)
    with pytest.raises(PipelineError, match="tinker"):
        with_model(serve_arguments("--model", source, "--set=stages.tinker.slots=1"), models)
    assert main(["serve", "--model", "nothing"]) == 2
    assert "omni prepare FOLDER --name nothing" in capsys.readouterr().err
    assert not splits
