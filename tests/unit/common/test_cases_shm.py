"""Cases of shared memory between processes, and of what must never happen to a process that has sockets."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    file for folder in ("common", "gateway", "services", "tools") for file in (ROOT / folder).rglob("*.py")
)
OWNER = "0123456789abcdef"

OWNING = """
import asyncio, sys
from pathlib import Path
import msgspec, numpy as np
from omni_common.arena import Arena
from omni_common.handover import DescriptorServer

async def main():
    run, me, memfd = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "memfd"
    arena = Arena(me, 1 << 20, run, memfd=memfd)
    gone = asyncio.Queue()
    server = DescriptorServer(run / f"{me}.fd", arena, gone.put_nowait)
    await server.start()
    ref = arena.put(np.arange(100_000, dtype=np.uint8), {"queue": 1, "1" * 16: 1, "2" * 16: 1})
    print(msgspec.json.encode(ref).decode(), flush=True)
    for reader in "12":
        who = await gone.get()
        assert who == reader * 16, who
        arena.forget(who)
        print(arena.used, flush=True)
    arena.release("queue", [(ref.offset, ref.generation)])
    print(arena.used, arena.bad_releases, flush=True)
    await server.close()
    arena.close()

asyncio.run(main())
"""

READING = """
import asyncio, sys
from pathlib import Path
import msgspec
from omni_common.frames import ArenaTensor
from omni_common.handover import DescriptorClient

async def main():
    run, me, owner, ref = sys.argv[1:]
    client = DescriptorClient(Path(run), me)
    await client.arena_of(owner)
    view = client.view(msgspec.json.decode(ref, type=ArenaTensor), lambda *slot: None)
    print(int(view.sum()))
    return view

kept = asyncio.run(main())
"""


@pytest.mark.parametrize("backend", ["memfd", "file"])
def test_readers_that_end_in_order_take_nothing_with_them(tmp_path: Path, backend: str) -> None:
    """B062: after one has ended, the next reads the same tensor, and the owner frees it; nobody speaks of leaks."""
    python = [sys.executable, "-W", "error"]
    expected = str(int(np.arange(100_000, dtype=np.uint8).sum()))
    with subprocess.Popen(
        [*python, "-c", OWNING, str(tmp_path), OWNER, backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None and owner.stderr is not None
        try:
            ref = owner.stdout.readline().strip()
            for reader in "12":
                command = [*python, "-c", READING, str(tmp_path), reader * 16, OWNER, ref]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                assert (done.returncode, done.stdout.strip(), done.stderr) == (0, expected, "")
                # What the reader held is free, what somebody else holds is not.
                assert owner.stdout.readline().strip() == "131072"
            assert owner.stdout.readline().split() == ["0", "0"]
            assert owner.stderr.read() == ""
        except BaseException:
            owner.kill()
            raise
    assert owner.returncode == 0
    assert list(tmp_path.iterdir()) == []


DYING = f"""
import os, sys
from pathlib import Path
from omni_common.arena import Arena
folder = Path(sys.argv[1])
alike = [folder / name for name in ("{OWNER}.arena.bak", "x{OWNER}.arena", "{OWNER.upper()}.arena")]
for path in alike:
    path.touch()
for number in range(20):
    if os.fork() == 0:
        arena = Arena(f"{{number:016x}}", 4 << 20, folder, memfd=False)
        arena._memory[-1] = 1
        os.kill(os.getpid(), 9)
    assert os.wait()[1] == 9
    assert set(folder.iterdir()) == {{*alike, folder / f"{{number:016x}}.arena"}}
Arena("{OWNER}", 4 << 20, folder, memfd=False).close()
assert set(folder.iterdir()) == set(alike)
"""


def test_twenty_deaths_in_a_folder_that_holds_two_arenas(tmp_path: Path) -> None:
    """B060: a start always finds room, and what only has a similar name stays."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no right to mount here")
    mount = 'mount -t tmpfs -o size=10m tmpfs "$0" && exec "$@" "$0"'
    command = ["unshare", "-m", "sh", "-c", mount, str(tmp_path), sys.executable, "-c", DYING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# --------------------------------------------------------------------------------------------------------------- forks

FORKS = {"fork", "forkpty", "ProcessPoolExecutor"}
UNSAFE_OPTIONS = {"preexec_fn": True, "close_fds": False, "shell": True}


def forks(tree: ast.AST) -> Iterator[str]:
    """Whatever runs Python in a copy of this process, or hands descriptors down that it does not name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names]
            for name in names:
                if name.split(".")[0] in ("multiprocessing", "pty") or name in FORKS:
                    yield f"{node.lineno}: imports {name}"
        elif isinstance(node, ast.Attribute) and node.attr in FORKS:
            yield f"{node.lineno}: {node.attr}"
        elif isinstance(node, ast.Call):
            for word in node.keywords:
                if word.arg in UNSAFE_OPTIONS and _may_be(word.value, UNSAFE_OPTIONS[word.arg]):
                    yield f"{node.lineno}: {word.arg}"


def _may_be(value: ast.expr, wanted: bool) -> bool:
    return not isinstance(value, ast.Constant) or bool(value.value) == wanted


def test_no_process_is_forked_without_another_program() -> None:
    """B069: contexts, lifelines and threads do not survive in a copy; it would hold a dead process's sockets open."""
    assert [
        f"{file.relative_to(ROOT)}:{line}" for file in SOURCES for line in forks(ast.parse(file.read_bytes()))
    ] == []


@pytest.mark.parametrize(
    "code",
    [
        "import multiprocessing as mp",
        "from multiprocessing.pool import Pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "import os; os.fork()",
        "import pty",
        "concurrent.futures.ProcessPoolExecutor()",
        "subprocess.Popen(argv, preexec_fn=os.setsid)",
        "subprocess.Popen(argv, close_fds=False)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_the_check_sees_a_fork(code: str) -> None:
    assert list(forks(ast.parse(code)))


def test_the_check_lets_pass_what_starts_another_program() -> None:
    fine = "import subprocess\nsubprocess.Popen(['x'], close_fds=True, shell=False, pass_fds=(3,))\nasyncio.run(main())"
    assert list(forks(ast.parse(fine))) == []


# --------------------------------------------------------------------------------------------------------- line ends


def test_what_runs_in_containers_has_unix_line_ends_on_every_checkout() -> None:
    """B074: with carriage returns a script's interpreter is not found."""
    files = [
        *(ROOT / "deploy").rglob("*"),
        *(file for file in (ROOT / "tools").iterdir() if file.suffix == ""),
        *ROOT.glob("*.lock"),
        ROOT / "docker-compose.yaml",
    ]
    texts = [file for file in files if file.is_file()]
    assert len(texts) > 8
    assert [file.name for file in texts if b"\r" in file.read_bytes()] == []
    assert (ROOT / ".gitattributes").read_text().splitlines()[0] == "* text=auto eol=lf"
    scripts = [file for file in texts if file.read_bytes().startswith(b"#!")]
    assert scripts and all(os.access(file, os.X_OK) for file in scripts)
