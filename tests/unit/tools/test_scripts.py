"""The shell scripts: what they do on a machine that lacks something, and that they do their work once."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PYTHONS = ("python3", *(f"python3.{minor}" for minor in range(9, 16)))
LOCKS = {
    name: (ROOT / name).read_text()
    for name in (
        "requirements.lock",
        "requirements-transformers.lock",
        "requirements-vllm.lock",
        "requirements-test.lock",
        "requirements-openai2.lock",
    )
}


class Checkout:
    """The install script in a folder of its own, where every Python is a stand-in that notes what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path / "some where" / "omnibus"
        self.bin = path / "bin"
        (self.path / "tools").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("pyproject.toml", *LOCKS, "tools/install", "tools/quickstart"):
            shutil.copy(ROOT / name, self.path / name)

    def python(self, body: str) -> None:
        for name in PYTHONS:
            (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
            (self.bin / name).chmod(0o755)

    def working_python(self) -> None:
        note = f'echo "$*" >>"{self.path}/asked"\n'
        omni = '#!/bin/sh\\necho omni "$@"\\n'
        self.python(
            note
            + f"""
if [ "$2" = venv ]; then
    mkdir -p .venv/bin && cp "$0" .venv/bin/python && printf '{omni}' >.venv/bin/omni && chmod +x .venv/bin/omni
fi"""
        )

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.path / command[0], *command[1:]],
            cwd="/",
            env={"PATH": f"{self.bin}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str) -> tuple[int, str, str]:
        process = self.start(*command)
        out, err = process.communicate()
        return process.returncode, out, err

    def asked(self, words: str) -> int:
        """How often Python was asked for `words` since the last look at it."""
        file = self.path / "asked"
        return len(re.findall(words, file.read_text())) if file.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_an_old_python_is_refused_with_what_to_install(checkout: Checkout) -> None:
    checkout.python("exit 1")
    code, _, err = checkout.run("tools/install")
    assert code == 1
    assert "Python 3.11 or later is needed" in err


def test_a_python_without_venv_names_the_package(checkout: Checkout) -> None:
    checkout.python('case "$2" in *ensurepip*) exit 1 ;; esac')
    code, _, err = checkout.run("tools/quickstart", "--no-serve")
    assert code == 1
    assert "apt-get install python3-venv" in err


def test_installing_again_does_nothing_until_a_lock_changes(checkout: Checkout) -> None:
    checkout.working_python()
    assert checkout.run("tools/install", "test")[0] == 0
    assert checkout.asked("-m venv") == 1
    assert checkout.asked("--require-hashes -r requirements-test.lock") == 1
    assert checkout.asked("--target .venv/openai2 --require-hashes -r requirements-openai2.lock") == 1
    assert checkout.asked("--require-hashes -r requirements-transformers.lock") == 1
    for kind in ("run", "transformers", "test"):
        assert checkout.run("tools/install", kind) == (0, "", "")
    assert checkout.asked("--require-hashes") == 3
    with (checkout.path / "requirements.lock").open("a") as file:
        file.write("# changed\n")
    assert checkout.run("tools/install")[0] == 0
    assert checkout.asked("--require-hashes") == 4
    assert checkout.run("tools/install", "test")[0] == 0
    assert checkout.asked("--require-hashes") == 7
    assert checkout.asked("-m venv") == 1


def test_vllm_brings_the_engines_on_pytorch(checkout: Checkout) -> None:
    checkout.working_python()
    assert checkout.run("tools/install", "vllm")[0] == 0
    assert checkout.asked("--require-hashes -r requirements-vllm.lock") == 1
    for kind in ("run", "transformers", "vllm"):
        assert checkout.run("tools/install", kind) == (0, "", "")
    with (checkout.path / "requirements-vllm.lock").open("a") as file:
        file.write("# changed\n")
    assert checkout.run("tools/install", "transformers") == (0, "", "")
    assert checkout.run("tools/install", "vllm")[0] == 0
    assert checkout.asked("--require-hashes -r requirements-vllm.lock") == 2


def test_an_interrupted_install_is_done_again(checkout: Checkout) -> None:
    checkout.working_python()
    failing = checkout.bin / "python3.11"
    whole = failing.read_text()
    checkout.python(whole.removeprefix("#!/bin/sh\n") + '\ncase "$*" in *require-hashes*) exit 1 ;; esac')
    assert checkout.run("tools/install")[0] == 1
    assert not list((checkout.path / ".venv").glob("*.stamp"))
    (checkout.path / ".venv/bin/python").write_text(whole)
    assert checkout.run("tools/install")[0] == 0


def test_two_at_once_install_once(checkout: Checkout) -> None:
    checkout.working_python()
    both = [checkout.start("tools/install") for _ in range(2)]
    for process in both:
        process.communicate()
    assert [process.returncode for process in both] == [0, 0]
    assert checkout.asked("-m venv") == 1
    assert checkout.asked("--require-hashes") == 1


def test_quickstart_passes_arguments_on_and_can_stop_before_serving(checkout: Checkout) -> None:
    checkout.working_python()
    code, out, _ = checkout.run("tools/quickstart", "--port", "80 80")
    assert code == 0
    assert out.splitlines()[-2:] == ["omni prepare embedded", "omni serve --port 80 80"]
    assert checkout.run("tools/quickstart", "--no-serve")[1] == "omni prepare embedded\n"
    assert checkout.run("tools/quickstart")[1].endswith("omni serve\n")


def test_an_unknown_kind_is_refused(checkout: Checkout) -> None:
    assert checkout.run("tools/install", "everything")[0] == 2


PIN = re.compile(r"^([a-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def pins(lock: str) -> dict[str, str]:
    return dict(PIN.findall(LOCKS[lock]))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_hashes_and_no_place(lock: str) -> None:
    entries = re.split(r"\n(?=[a-z0-9])", LOCKS[lock])[1:]
    assert len(entries) >= len(pins(lock)) > 10
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in LOCKS[lock]
    assert "--index" not in LOCKS[lock]


def test_the_locks_fit_the_project_and_each_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    run = [*project["project"]["dependencies"], *extras["embedded"], *project["dependency-groups"]["build"]]
    torch = [*project["project"]["dependencies"], *extras["transformers"]]
    vllm = [*torch, *extras["vllm"]]
    for lock, wanted in (
        ("requirements.lock", run),
        ("requirements-test.lock", run + extras["test"]),
        ("requirements-transformers.lock", torch),
        ("requirements-vllm.lock", vllm),
    ):
        have = pins(lock)
        for requirement in map(Requirement, wanted):
            version = have.get(canonicalize_name(requirement.name), "")
            assert requirement.specifier.contains(version or "0"), f"{requirement} is not in {lock}; run tools/lock"
    assert pins("requirements.lock").items() <= pins("requirements-test.lock").items()
    # The one lock is for every Python, and may have a package in several versions.
    together = set(PIN.findall(LOCKS["requirements-test.lock"]))
    names = {name for name, _ in together}
    for lock in ("requirements-transformers.lock", "requirements-vllm.lock"):
        assert [pin for pin in pins(lock).items() if pin[0] in names and pin not in together] == []
    assert pins("requirements-transformers.lock").items() <= pins("requirements-vllm.lock").items()
