"""The arena: shared memory that one process owns and hands out in slots. Only the owner allocates and frees.

The memory is a sealed memfd, allocated and mapped at start, so that no page fault is taken later and a full machine is
told at once instead of by SIGBUS. Consumers get its descriptor (`handover.py`) and cannot write, grow or shrink it; the
kernel frees it with its last mapping. Where memfd does not exist, a named file takes its place: it is locked while its
owner lives, and the next owner in the folder removes those that no lock protects. The layout is that of `tensors.py`.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omni_common.buddy import Buddy
from omni_common.errors import OmniError
from omni_common.frames import ArenaTensor
from omni_common.tensors import GRAIN, HEADER, HEADER_BYTES, header_at, name_of

#: linux/fcntl.h (5.1): no new writable mapping, existing ones stay. The fcntl module does not have it yet.
F_SEAL_FUTURE_WRITE = 0x0010
#: Holds a slot while it is being filled, so that it stays although its consumers die meanwhile.
_WRITER = "<writer>"
_FILE_NAME = re.compile(r"[0-9a-f]{16}\.arena")


@dataclass(slots=True)
class _Slot:
    generation: int
    #: How many releases each holder still owes; never empty, never zero.
    holders: dict[str, int]


class _Backing(NamedTuple):
    #: What consumers get.
    descriptor: int
    #: The owner's writable mapping.
    memory: mmap.mmap
    #: Holds the lock of a named file.
    locked: int | None = None


class Arena:
    """`nbytes` of shared memory for the tensors of one incarnation, all of it populated.

    A slot is used until each of its holders has released it as often as it holds it. Holders are incarnations of
    consumers, or names of the owner's own. Every method may be called from any thread.

    `folder` is where a named file goes when `memfd` is false. Raises OmniError `arena_memory` when the machine does not
    have the memory.
    """

    def __init__(
        self,
        incarnation: str,
        nbytes: int,
        folder: Path | None = None,
        memfd: bool = hasattr(os, "memfd_create"),
    ) -> None:
        self.incarnation = incarnation
        self._buddy = Buddy(_round_up(max(nbytes, GRAIN)), GRAIN)
        # The table has headers for its own pages too, so that a header's place follows from the offset alone.
        self._start = _round_up(-(-self._buddy.size // (GRAIN // HEADER_BYTES - 1)))
        #: Bytes of the file: the table of headers, then the slots.
        self.size = self._start + self._buddy.size
        self._path = None if memfd else _file_path(folder, incarnation)
        try:
            self._backing = _open_file(self._path, self.size) if self._path else _open_memfd(incarnation, self.size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                raise
            place = self._path.parent if self._path else "the machine's memory"
            raise OmniError(
                f"no room for an arena of {nbytes / 2**20:g} MiB in {place} ({error.strerror}): "
                "make room or set a smaller `arena_mib`",
                code="arena_memory",
            ) from None
        self._memory: mmap.mmap | None = self._backing.memory
        self._lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        #: Offsets by holder.
        self._held: dict[str, set[int]] = {}
        self._generation = 0
        #: Releases of what was not held: doubled, or of a former use of the slot. They change nothing.
        self.bad_releases = 0
        #: Called without arguments after bytes came free, in the thread that freed them.
        self.on_free: list[Callable[[], None]] = []

    @property
    def descriptor(self) -> int:
        """The file, for consumers: it can be mapped for reading only."""
        return self._backing.descriptor

    @property
    def total(self) -> int:
        """Bytes for slots."""
        return self._buddy.size

    @property
    def used(self) -> int:
        """Bytes of blocks in use."""
        return self._buddy.used

    def held_by(self, holder: str) -> int:
        """Bytes of the blocks that `holder` has, alone or with others."""
        with self._lock:
            return sum(self._buddy.nbytes_of(offset - self._start) for offset in self._held.get(holder, ()))

    def put(self, array: np.ndarray[Any, Any], holders: Mapping[str, int]) -> ArenaTensor | None:
        """Copy `array`, of any strides, into a slot that each of `holders` has to release so many times (> 0).

        None: no room now; `on_free` tells when to try again. Raises OmniError: `tensor_too_large` for what would not
        fit an empty arena, `bad_tensor` for a dtype that has no name on the wire, `arena_gone` after `close`.
        """
        dtype = name_of(array.dtype)
        owed = {**holders, _WRITER: 1}
        if not holders or min(holders.values()) < 1:
            raise ValueError(f"a slot needs holders, not {dict(holders)}")
        with self._lock:
            memory = self._open_memory()
            block = self._alloc(array.nbytes)
            if block is None:
                return None
            offset = self._start + block
            self._generation += 1
            generation = self._generation
            self._slots[offset] = _Slot(generation, owed)
            for holder in owed:
                self._held.setdefault(holder, set()).add(offset)
        HEADER.pack_into(memory, header_at(offset), generation, array.nbytes)
        if array.nbytes:
            # Any bits, whatever they mean: numpy copies unsigned integers without the interpreter's lock.
            bits = np.dtype(f"u{array.dtype.itemsize}")
            slot = np.frombuffer(memory, bits, array.size, offset).reshape(array.shape)
            np.copyto(slot, array.view(bits))
        self.release(_WRITER, [(offset, generation)])
        return ArenaTensor(dtype, list(array.shape), self.incarnation, offset, array.nbytes, generation)

    def hold(self, offset: int, generation: int, holder: str, n: int = 1) -> None:
        """One more holder, or `n` more releases that it owes. Raises OmniError `stale_tensor` if the slot is free."""
        with self._lock:
            holders = self._slot(offset, generation).holders
            holders[holder] = holders.get(holder, 0) + n
            self._held.setdefault(holder, set()).add(offset)

    def read(self, ref: ArenaTensor) -> memoryview:
        """The owner's own look at a payload, as read-only bytes, good as long as the caller holds the slot.

        Raises OmniError `stale_tensor`.
        """
        with self._lock:
            self._slot(ref.offset, ref.generation)
            return memoryview(self._open_memory()).toreadonly()[ref.offset : ref.offset + ref.nbytes]

    def release(self, holder: str, slots: Iterable[tuple[int, int]]) -> int:
        """`holder` no longer reads these (offset, generation). Returns the bytes that came free.

        What it does not hold is counted in `bad_releases`, nothing else.
        """
        freed = 0
        with self._lock:
            for offset, generation in slots:
                slot = self._slots.get(offset)
                if slot is None or slot.generation != generation or holder not in slot.holders:
                    self.bad_releases += 1
                else:
                    freed += self._drop(offset, slot, holder, 1)
        self._tell(freed)
        return freed

    def forget(self, holder: str) -> int:
        """Release everything that `holder` has, because it is dead. Returns the bytes that came free."""
        freed = 0
        with self._lock:
            for offset in list(self._held.get(holder, ())):
                slot = self._slots[offset]
                freed += self._drop(offset, slot, holder, slot.holders[holder])
        self._tell(freed)
        return freed

    def close(self) -> None:
        """Give everything back to the kernel, once the last reader in any process is gone. Idempotent."""
        with self._lock:
            if self._memory is None:
                return
            # Not closed by force: a `put` in another thread may still be copying.
            self._memory = None
            self._slots.clear()
            self._held.clear()
        descriptor, _, locked = self._backing
        del self._backing
        os.close(descriptor)
        if self._path is not None and locked is not None:
            self._path.unlink(missing_ok=True)
            os.close(locked)

    def _open_memory(self) -> mmap.mmap:
        if self._memory is None:
            raise OmniError(f"the arena of {self.incarnation} is closed", code="arena_gone")
        return self._memory

    def _alloc(self, nbytes: int) -> int | None:
        if nbytes > self._buddy.largest:
            raise OmniError(
                f"a tensor of {nbytes / 2**20:.1f} MiB can never fit an arena of {self.total / 2**20:g} MiB, whose "
                f"largest slot has {self._buddy.largest / 2**20:g} MiB: set a larger `arena_mib`",
                code="tensor_too_large",
            )
        return self._buddy.alloc(max(nbytes, 1))

    def _slot(self, offset: int, generation: int) -> _Slot:
        slot = self._slots.get(offset)
        if slot is None or slot.generation != generation:
            raise OmniError(f"the slot at {offset} is no longer use {generation}", code="stale_tensor")
        return slot

    def _drop(self, offset: int, slot: _Slot, holder: str, n: int) -> int:
        """Take `n` releases off what `holder` owes; returns the bytes that came free. The lock is held."""
        slot.holders[holder] -= n
        if slot.holders[holder]:
            return 0
        del slot.holders[holder]
        self._held[holder].discard(offset)
        if not self._held[holder]:
            del self._held[holder]
        if slot.holders:
            return 0
        del self._slots[offset]
        HEADER.pack_into(self._open_memory(), header_at(offset), 0, 0)
        return self._buddy.free(offset - self._start)

    def _tell(self, freed: int) -> None:
        if freed:
            for callback in self.on_free:
                callback()


def sweep(folder: Path) -> list[str]:
    """Remove arena files whose owner is dead: nobody holds their lock. Returns their names; leaves all else alone.

    A lock tells the living from the dead where a pid cannot: in another container, or used again.
    """
    removed = []
    for path in folder.iterdir():
        if not _FILE_NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink:
                    path.unlink()
                    removed.append(path.name)
            finally:
                os.close(descriptor)
    return removed


def _open_memfd(incarnation: str, size: int) -> _Backing:
    descriptor = os.memfd_create(f"omni-{incarnation}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        memory = _allocate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return _Backing(descriptor, memory)


def _file_path(folder: Path | None, incarnation: str) -> Path:
    if folder is None:
        raise OmniError("this system has no memfd: an arena needs a folder for its file", code="arena_memory")
    return folder / f"{incarnation}.arena"


def _open_file(path: Path, size: int) -> _Backing:
    sweep(path.parent)
    locked = _create_locked(path)
    try:
        memory = _allocate(locked, size)
        # A second open file, so that consumers can neither write nor keep the lock.
        return _Backing(os.open(path, os.O_RDONLY | os.O_CLOEXEC), memory, locked)
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(locked)
        raise


def _create_locked(path: Path) -> int:
    while True:
        locked = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
        fcntl.flock(locked, fcntl.LOCK_EX)
        if os.fstat(locked).st_nlink:
            return locked
        # A sweeper was quicker than the lock.
        os.close(locked)


def _allocate(descriptor: int, size: int) -> mmap.mmap:
    os.ftruncate(descriptor, size)
    # tmpfs gives pages at the first write, and kills the writer when it is full; this says so now.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        for offset in range(0, size, GRAIN):
            os.pwrite(descriptor, bytes(GRAIN), offset)
    populate = getattr(mmap, "MAP_POPULATE", 0)
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | populate, mmap.PROT_READ | mmap.PROT_WRITE)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN
