import fcntl
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_common.arena import Arena, sweep
from omni_common.errors import OmniError
from omni_common.frames import ArenaTensor
from omni_common.tensors import MappedArena

OWNER = "0123456789abcdef"
MIB = 1 << 20

Make = Callable[[int], Arena]


@pytest.fixture(params=["memfd", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes an arena of so many bytes, in memory or in a named file."""
    made: list[Arena] = []

    def make(nbytes: int) -> Arena:
        made.append(Arena(OWNER, nbytes, tmp_path, memfd=request.param == "memfd"))
        return made[-1]

    yield make
    for arena in made:
        arena.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def arena(make: Make) -> Arena:
    return make(MIB)


def put(arena: Arena, nbytes: int, **holders: int) -> ArenaTensor:
    ref = arena.put(np.arange(nbytes, dtype=np.uint8), holders or {"a": 1})
    assert ref is not None
    return ref


def slot(ref: ArenaTensor) -> tuple[int, int]:
    return ref.offset, ref.generation


def test_a_slot_is_free_when_everybody_has_released_it(arena: Arena) -> None:
    ref = put(arena, 5000, a=2, b=1)
    assert (arena.used, arena.held_by("a"), arena.held_by("b"), arena.held_by("c")) == (8192, 8192, 8192, 0)
    assert arena.release("a", [slot(ref)]) == 0
    assert arena.release("b", [slot(ref)]) == 0
    assert (arena.used, arena.held_by("a"), arena.held_by("b")) == (8192, 8192, 0)
    assert arena.release("a", [slot(ref)]) == 8192
    assert (arena.used, arena.held_by("a"), arena.bad_releases) == (0, 0, 0)


def test_what_is_not_held_cannot_be_released(arena: Arena) -> None:
    ref = put(arena, 100, a=1, b=1)
    assert arena.release("a", [slot(ref), slot(ref)]) == 0
    assert arena.release("c", [slot(ref)]) == 0
    assert arena.release("b", [(ref.offset, ref.generation + 1), (ref.offset + 64, ref.generation), (-5, 0)]) == 0
    assert arena.bad_releases == 5
    assert arena.release("b", [slot(ref)]) == 4096
    again = put(arena, 100, a=1)
    assert again.offset == ref.offset
    assert arena.release("a", [slot(ref)]) == 0
    assert arena.bad_releases == 6
    assert arena.held_by("a") == 4096


def test_holders_can_be_added(arena: Arena) -> None:
    ref = put(arena, 100, queue=1)
    arena.hold(*slot(ref), "a", 2)
    arena.hold(*slot(ref), "a")
    assert arena.release("queue", [slot(ref)]) == 0
    assert arena.release("a", [slot(ref)] * 3) == 4096
    with pytest.raises(OmniError) as caught:
        arena.hold(*slot(ref), "a")
    assert caught.value.code == "stale_tensor"
    assert arena.held_by("a") == 0


def test_the_dead_hold_nothing(arena: Arena) -> None:
    shared = put(arena, 100, a=3, b=1)
    put(arena, 9000, a=1)
    assert arena.forget("a") == 16384
    assert arena.forget("a") == 0
    assert arena.held_by("b") == arena.used == 4096
    assert arena.release("b", [slot(shared)]) == 4096


def test_the_owner_reads_what_it_holds(arena: Arena) -> None:
    ref = put(arena, 300, queue=1)
    view = arena.read(ref)
    assert view == np.arange(300, dtype=np.uint8).tobytes()
    assert view.readonly
    arena.release("queue", [slot(ref)])
    with pytest.raises(OmniError) as caught:
        arena.read(ref)
    assert caught.value.code == "stale_tensor"


def test_a_full_arena_says_so_and_goes_on_after_a_release(arena: Arena) -> None:
    calls: list[tuple[int, bool]] = []
    arena.on_free.append(lambda: calls.append((arena.used, arena._lock.locked())))
    refs = [put(arena, MIB // 4) for _ in range(4)]
    assert arena.used == arena.total
    assert arena.put(np.zeros(1, np.uint8), {"a": 1}) is None
    assert calls == []
    arena.release("a", [slot(refs[0])])
    assert calls == [(MIB * 3 // 4, False)]
    assert arena.put(np.zeros(MIB // 2, np.uint8), {"a": 1}) is None
    assert put(arena, MIB // 4).offset == refs[0].offset
    arena.forget("a")
    assert calls[1:] == [(0, False)]
    assert put(arena, MIB).nbytes == MIB


def test_what_never_fits_is_an_error(make: Make) -> None:
    arena = make(3 * MIB)
    assert put(arena, 2 * MIB).nbytes == 2 * MIB
    with pytest.raises(OmniError, match=r"2\.0 MiB .* arena of 3 MiB.*arena_mib") as caught:
        arena.put(np.zeros(2 * MIB + 1, np.uint8), {"a": 1})
    assert caught.value.code == "tensor_too_large"
    assert arena.used == 2 * MIB


@pytest.mark.parametrize("holders", [{}, {"a": 0}, {"a": 1, "b": -1}])
def test_a_slot_needs_holders(arena: Arena, holders: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs holders"):
        arena.put(np.zeros(1, np.uint8), holders)
    assert arena.used == 0


def test_a_closed_arena_takes_nothing(arena: Arena) -> None:
    ref = put(arena, 100)
    arena.close()
    arena.close()
    assert arena.release("a", [slot(ref)]) == arena.forget("a") == 0
    with pytest.raises(OmniError) as caught:
        arena.put(np.zeros(1), {"a": 1})
    assert caught.value.code == "arena_gone"


def test_consumers_cannot_write_or_cut(arena: Arena) -> None:
    descriptor = arena.descriptor
    mmap.mmap(descriptor, arena.size, mmap.MAP_SHARED, mmap.PROT_READ).close()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, arena.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    for length in (0, arena.size * 2):
        with pytest.raises(OSError, match="not permitted|Invalid argument"):
            os.ftruncate(descriptor, length)
    with pytest.raises(OSError, match="not permitted|Bad file descriptor"):
        os.write(descriptor, b"x")


def test_a_memfd_is_sealed_for_good(tmp_path: Path) -> None:
    arena = Arena(OWNER, MIB)
    seals = fcntl.fcntl(arena.descriptor, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    # The right to write cannot be had by opening it anew either.
    again = os.open(f"/proc/self/fd/{arena.descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, arena.size)
    os.close(again)
    arena.close()


def test_all_pages_are_there_from_the_start(arena: Arena) -> None:
    assert os.fstat(arena.descriptor).st_blocks * 512 >= arena.size


def test_many_random_cycles_leave_the_arena_empty_and_whole(make: Make) -> None:
    arena = make(4 * MIB)
    mapped = MappedArena(OWNER, mmap.mmap(arena.descriptor, arena.size, mmap.MAP_SHARED, mmap.PROT_READ))
    chance = random.Random(5)
    held: list[tuple[str, np.ndarray[Any, Any], bytes]] = []

    def release(name: str) -> Callable[[int, int], None]:
        return lambda offset, generation: void(arena.release(name, [(offset, generation)]))

    refused = 0
    for cycle in range(300):
        nbytes = chance.choice([0, 1, 4096, 100_000, MIB]) * chance.randint(1, 2)
        array = np.full(nbytes, cycle % 251, np.uint8)
        names = chance.sample(["a", "b", "c"], chance.randint(1, 3))
        ref = arena.put(array, dict.fromkeys(names, 1))
        if ref is not None:
            held += [(name, mapped.view(ref, release(name)), array.tobytes()) for name in names]
        refused += ref is None
        for _ in range(chance.randint(0, 3)):
            if held:
                del held[chance.randrange(len(held))]
        assert all(view.tobytes() == data for _, view, data in held)
    assert refused > 10
    held.clear()
    mapped.close()
    assert (arena.used, arena.bad_releases) == (0, 0)
    assert put(arena, 4 * MIB).nbytes == 4 * MIB


def void(_: object) -> None:
    """Callbacks return nothing."""


def test_threads_do_not_get_into_each_others_slots(make: Make) -> None:
    arena = make(2 * MIB)
    mapped = MappedArena(OWNER, mmap.mmap(arena.descriptor, arena.size, mmap.MAP_SHARED, mmap.PROT_READ))
    wrong: list[str] = []

    def work(me: int) -> None:
        name = f"t{me}"
        for cycle in range(150):
            array = np.full(300_000 + 1000 * me, me * 16 + cycle % 16, np.uint8)
            ref = arena.put(array, {name: 1, "x": 1})
            if ref is None:
                continue
            # Another thread's consumers die all the time.
            arena.forget("x")
            view = mapped.view(ref, lambda offset, generation: void(arena.release(name, [(offset, generation)])))
            if not np.array_equal(view, array):
                wrong.append(f"{name} in {cycle}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mapped.close()
    assert wrong == []
    assert (arena.used, arena.bad_releases) == (0, 0)


def test_a_slot_stays_while_it_is_filled(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only holder dies in the middle of the copy: the memory must not go to somebody else before its end."""
    copy = np.copyto
    others: list[ArenaTensor] = []

    def dying(to: np.ndarray[Any, Any], array: np.ndarray[Any, Any]) -> None:
        monkeypatch.setattr(np, "copyto", copy)
        arena.forget("a")
        others.append(put(arena, 100, b=1))
        copy(to, array)

    monkeypatch.setattr(np, "copyto", dying)
    ref = put(arena, 100, a=1)
    assert others[0].offset != ref.offset
    assert (arena.used, arena.held_by("b")) == (4096, 4096)


def python(script: str, *args: str, wrap: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*wrap, sys.executable, "-W", "error", "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_missing_memory_names_size_and_setting() -> None:
    done = python(f"""
import os, resource
from omni_common.arena import Arena
from omni_common.errors import OmniError
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), -1))
before = sorted(os.listdir("/proc/self/fd"))
try:
    Arena("{OWNER}", 48 << 20)
except OmniError as error:
    assert sorted(os.listdir("/proc/self/fd")) == before
    print(error.code, error)
""")
    assert done.stderr == ""
    assert done.stdout.startswith("arena_memory no room for an arena of 48 MiB")
    assert "arena_mib" in done.stdout


def test_docker_s_small_shm_is_no_limit_for_a_memfd() -> None:
    """B073, B061: with a small /dev/shm the memfd works, and the named file says what is missing before any SIGBUS."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no right to mount here")
    script = f"""
import os, pathlib
import numpy as np
from omni_common.arena import Arena
from omni_common.errors import OmniError
arena = Arena("{OWNER}", 128 << 20)
assert arena.put(np.ones(128 << 20, np.uint8), {{"a": 1}})
try:
    Arena("{OWNER}", 128 << 20, pathlib.Path("/dev/shm"), memfd=False)
except OmniError as error:
    print(os.listdir("/dev/shm"), error)
"""
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    done = python(script, wrap=("unshare", "-m", "sh", "-c", mount, "sh"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[] no room for an arena of 128 MiB in /dev/shm (No space left on device)")


def test_without_memfd_and_folder_there_is_no_arena() -> None:
    with pytest.raises(OmniError, match="needs a folder"):
        Arena(OWNER, MIB, memfd=False)


def test_pages_are_written_where_they_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    arena = Arena(OWNER, MIB, tmp_path, memfd=False)
    assert os.fstat(arena.descriptor).st_blocks * 512 >= arena.size
    arena.close()


def test_files_of_the_dead_are_swept_and_nothing_else(tmp_path: Path) -> None:
    """B060: a restart always succeeds, whatever a kill left behind."""
    dead = "dead0dead0dead00"
    done = python(
        f"""
import os, pathlib, sys
from omni_common.arena import Arena
arena = Arena("{dead}", 1 << 20, pathlib.Path(sys.argv[1]), memfd=False)
os.kill(os.getpid(), 9)
""",
        str(tmp_path),
    )
    assert done.returncode == -9
    foreign = [tmp_path / "foreign.arena", tmp_path / f"{OWNER}.in", tmp_path / f"{OWNER}.arena.txt"]
    for path in foreign:
        path.touch()
    link = tmp_path / "1111222233334444.arena"
    link.symlink_to(foreign[0])
    live = Arena("aaaabbbbccccdddd", MIB, tmp_path, memfd=False)
    expected = {*foreign, link, tmp_path / "aaaabbbbccccdddd.arena"}
    assert set(tmp_path.iterdir()) == expected
    assert sweep(tmp_path) == []
    assert set(tmp_path.iterdir()) == expected
    # A consumer that has the descriptor does not keep the lock.
    reader = os.dup(live.descriptor)
    live.close()
    (tmp_path / "aaaabbbbccccdddd.arena").touch()
    assert sweep(tmp_path) == ["aaaabbbbccccdddd.arena"]
    os.close(reader)


def test_nobody_warns_of_leaks_at_the_end() -> None:
    """B062, B065: no tracker, no warning, with the arena open or closed, in use or not."""
    for end in ("arena.close()", "pass"):
        done = python(f"""
import numpy as np
from omni_common.arena import Arena
arena = Arena("{OWNER}", 1 << 20)
arena.put(np.ones(5), {{"a": 1}})
{end}
""")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
