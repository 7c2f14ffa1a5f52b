"""The tensors of one process: its own arena and who reads it, the arenas of others that it reads, and their releases.

Runs on the event loop, but for `publish` and the end of a view, which happen in whatever thread.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from omni_common.arena import Arena
from omni_common.errors import OmniError
from omni_common.frames import ArenaTensor, InlineTensor, PartTensor, Release, Tensor
from omni_common.handover import DescriptorClient, DescriptorServer
from omni_common.run_dir import RunDir
from omni_common.tensors import INLINE_BYTES, from_inline, from_part, inline

log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray[Any, Any]]

#: Holder of a slot for as long as its chunk may be sent, or sent again.
RETAINED = "retained"


class TensorPort:
    """`send_release(owner, frame)` carries releases; `on_mapped(owner, success)` is called when a mapping that `map`
    began is there, or cannot be had because its owner is dead."""

    def __init__(
        self,
        run: RunDir,
        incarnation: str,
        arena_bytes: int,
        send_release: Callable[[str, Release], None],
        on_mapped: Callable[[str, bool], None],
    ) -> None:
        self._run = run
        self._incarnation = incarnation
        self._send_release = send_release
        self._on_mapped = on_mapped
        self.arena = Arena(incarnation, arena_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._released: deque[tuple[str, tuple[int, int]]] = deque()
        self._release_due = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        # The end of a consumer's socket means that its mapping is gone: nobody reads what it held.
        self._descriptors = DescriptorServer(
            self._run.descriptor(self._incarnation), self.arena, lambda consumer: void(self.arena.forget(consumer))
        )
        await self._descriptors.start()
        self._mapped = DescriptorClient(self._run.path, self._incarnation)

    # ----------------------------------------------------------------------------------------------- the own arena

    def publish(self, arrays: Arrays, times: int) -> dict[str, Tensor] | None:
        """Put `arrays` where `times` chunks can refer to them. Any thread. None: the arena has no room now.

        Raises OmniError `tensor_too_large` for what can never fit.
        """
        tensors: dict[str, Tensor] = {}
        for name, array in arrays.items():
            if array.nbytes <= INLINE_BYTES:
                tensors[name] = inline(array)
                continue
            ref = self.arena.put(array, {RETAINED: times})
            if ref is None:
                self.let_go(tensors, times)
                return None
            tensors[name] = ref
        return tensors

    def let_go(self, tensors: dict[str, Tensor], times: int = 1) -> None:
        """`times` chunks that referred to `tensors` will not be sent (again)."""
        slots = [(ref.offset, ref.generation) for ref in arena_tensors(tensors)]
        for _ in range(times):
            self.arena.release(RETAINED, slots)

    def lend(self, tensors: dict[str, Tensor], consumer: str) -> None:
        """`consumer` is about to be sent references to `tensors`."""
        for ref in arena_tensors(tensors):
            self.arena.hold(ref.offset, ref.generation, consumer)

    def as_parts(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[memoryview]]:
        """The same tensors for another host: references to raw parts, and the parts (valid while they are held)."""
        rewritten: dict[str, Tensor] = {}
        parts: list[memoryview] = []
        for name, ref in tensors.items():
            if isinstance(ref, ArenaTensor):
                rewritten[name] = PartTensor(ref.dtype, ref.shape, len(parts))
                parts.append(self.arena.read(ref))
            else:
                rewritten[name] = ref
        return rewritten, parts

    # -------------------------------------------------------------------------------------------- arenas of others

    def is_mapped(self, owner: str) -> bool:
        return self._mapped.is_mapped(owner)

    def map(self, owner: str) -> None:
        task = self._loop.create_task(self._map(owner), name=f"map {owner}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _map(self, owner: str) -> None:
        try:
            await self._mapped.arena_of(owner)
        except OmniError as error:
            log.info("arena of %s: %s", owner, error)
            self._on_mapped(owner, False)
        else:
            self._on_mapped(owner, True)

    def open(self, owner: str, ref: Tensor, parts: list[memoryview]) -> np.ndarray[Any, Any]:
        """A read-only array over `ref` of `owner`; its slot is released when the last view of it dies.

        Raises OmniError when the reference cannot be what it says.
        """
        if isinstance(ref, InlineTensor):
            return from_inline(ref)
        if isinstance(ref, PartTensor):
            return from_part(ref, parts)
        if ref.arena != owner:
            raise OmniError(f"{owner} refers to the arena of {ref.arena}", code="stale_tensor")
        return self._mapped.view(ref, lambda offset, generation: self._release(owner, offset, generation))

    def refuse(self, tensors: dict[str, Tensor]) -> None:
        """Release what was received and will not be opened."""
        for ref in arena_tensors(tensors):
            self._release(ref.arena, ref.offset, ref.generation)

    def _release(self, owner: str, offset: int, generation: int) -> None:
        self._released.append((owner, (offset, generation)))
        if not self._release_due:
            self._release_due = True
            # At the end of the process the loop may be closed already; the kernel then gives everything back.
            with contextlib.suppress(RuntimeError):
                # Another thread must wake the loop, which costs a system call.
                on_loop = threading.get_ident() == self._thread
                (self._loop.call_soon if on_loop else self._loop.call_soon_threadsafe)(self._send_releases)

    def _send_releases(self) -> None:
        self._release_due = False
        by_owner: dict[str, list[tuple[int, int]]] = {}
        while self._released:
            owner, slot = self._released.popleft()
            by_owner.setdefault(owner, []).append(slot)
        for owner, slots in by_owner.items():
            self._send_release(owner, Release(self._incarnation, slots))

    # ---------------------------------------------------------------------------------------------------- the end

    def lost(self, incarnation: str) -> None:
        """A peer is dead. A stopped one keeps its slots as long as it could still read them."""
        self._mapped.drop(incarnation)
        if not self._descriptors.is_connected(incarnation):
            self.arena.forget(incarnation)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._mapped.close()
        await self._descriptors.close()
        self.arena.close()


def arena_tensors(tensors: dict[str, Tensor]) -> list[ArenaTensor]:
    return [ref for ref in tensors.values() if isinstance(ref, ArenaTensor)] if tensors else []


def size_of(tensors: dict[str, Tensor]) -> int:
    """Payload bytes that credit counts; raw parts are not known here and count nothing."""
    if not tensors:
        return 0
    return sum(
        ref.nbytes if isinstance(ref, ArenaTensor) else len(ref.data) if isinstance(ref, InlineTensor) else 0
        for ref in tensors.values()
    )


def void(_: object) -> None:
    """Drop a value where a callback must return none."""
