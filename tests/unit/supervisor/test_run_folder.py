import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from omni_common.errors import OmniError
from omni_common.run_dir import PREFIX
from omni_supervisor.run_folder import LOCK, run_folder, sweep


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path


HOLDER = """
import sys, time
from pathlib import Path
from omni_supervisor.run_folder import run_folder
with run_folder(None, Path(sys.argv[1])) as run:
    (run.path / "scheduler").touch()
    print(run.path, flush=True)
    time.sleep(60)
"""


def killed_instance(base: Path) -> Path:
    """The run folder of an instance that was killed with SIGKILL."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(base)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        holder.send_signal(signal.SIGKILL)
    return path


def test_a_fresh_folder_is_private_to_the_group_and_removed(base: Path) -> None:
    mask = os.umask(0o077)
    try:
        with run_folder(None, base) as run:
            assert stat.S_IMODE(run.path.stat().st_mode) == 0o770
            (run.path / "socket").touch()
    finally:
        os.umask(mask)
    assert list(base.iterdir()) == []


def test_instances_get_folders_of_their_own(base: Path) -> None:
    with run_folder(None, base) as one, run_folder(None, base) as two:
        assert one.path != two.path
        assert one.path.exists()


def test_what_a_killed_instance_left_is_swept_by_the_next(base: Path) -> None:
    dead = killed_instance(base)
    assert dead.exists()
    with run_folder(None, base):
        assert not dead.exists()


def test_foreign_folders_are_left_alone(base: Path) -> None:
    (base / f"{PREFIX}notes").mkdir()
    (base / "other").mkdir()
    (base / "other" / LOCK).touch()
    (base / f"{PREFIX}link").symlink_to(base / "other")
    (base / f"{PREFIX}file").touch()
    assert sweep(base) == []
    assert len(list(base.iterdir())) == 4


def test_a_given_folder_stays_if_it_was_there(base: Path) -> None:
    (base / "kept").touch()
    with run_folder(base, base):
        assert (base / LOCK).exists()
    assert [path.name for path in base.iterdir()] == ["kept"]


def test_a_given_folder_is_made_and_removed(base: Path) -> None:
    with run_folder(base / "new", base) as run:
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o770
    assert not (base / "new").exists()


def test_a_given_folder_has_one_instance(base: Path) -> None:
    with run_folder(base, base):
        with pytest.raises(OmniError, match="another omni serve"), run_folder(base, base):
            pass
        assert (base / LOCK).exists()


def test_a_path_too_long_for_sockets_is_refused(base: Path) -> None:
    with pytest.raises(OmniError, match="too long"), run_folder(base / ("x" * 100), base):
        pass


def test_a_base_that_cannot_be_written_is_named(base: Path) -> None:
    with pytest.raises(OmniError, match="cannot make a run folder"), run_folder(None, base / "missing"):
        pass
