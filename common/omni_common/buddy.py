"""A buddy allocator over offsets: pure bookkeeping, no memory is touched."""


class Buddy:
    """Hands out blocks of [0, `size`): powers of two times `smallest`, each aligned to its own length.

    Two halves of a block that are both free are always merged. `size` is a multiple of `smallest`, which is a power of
    two; a size that is no power of two begins as several blocks, the largest first. Not thread-safe.
    """

    def __init__(self, size: int, smallest: int = 4096) -> None:
        if smallest < 1 or smallest & (smallest - 1):
            raise ValueError(f"smallest block {smallest} is not a power of two")
        if size < smallest or size % smallest:
            raise ValueError(f"size {size} is not a multiple of {smallest}")
        self.size = size
        self.used = 0
        self._smallest = smallest
        orders = (size // smallest).bit_length()
        #: Free offsets by order. A dict is an ordered set: the block freed last, still in the cache, is taken first.
        self._free: list[dict[int, None]] = [{} for _ in range(orders)]
        self._order_of: dict[int, int] = {}
        offset = 0
        for order in reversed(range(orders)):
            if size // smallest & 1 << order:
                self._free[order][offset] = None
                offset += smallest << order

    @property
    def largest(self) -> int:
        """Bytes of the largest block when nothing is used: more can never be had."""
        return self._smallest << len(self._free) - 1

    @property
    def largest_free(self) -> int:
        """Bytes of the largest block that can be had now, 0 when full."""
        for order in reversed(range(len(self._free))):
            if self._free[order]:
                return self._smallest << order
        return 0

    def alloc(self, nbytes: int) -> int | None:
        """Offset of a block of at least `nbytes` > 0, or None when no free block is large enough."""
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        wanted = ((nbytes - 1) // self._smallest).bit_length()
        order = wanted
        while order < len(self._free) and not self._free[order]:
            order += 1
        if order >= len(self._free):
            return None
        offset, _ = self._free[order].popitem()
        while order > wanted:
            order -= 1
            self._free[order][offset + (self._smallest << order)] = None
        self._order_of[offset] = wanted
        self.used += self._smallest << wanted
        return offset

    def nbytes_of(self, offset: int) -> int:
        """Bytes of the used block that begins at `offset`. Raises KeyError when none does."""
        return self._smallest << self._order_of[offset]

    def free(self, offset: int) -> int:
        """Give a block back; returns its bytes. Raises ValueError when none begins at `offset`."""
        order = self._order_of.pop(offset, None)
        if order is None:
            raise ValueError(f"no block begins at {offset}")
        nbytes = self._smallest << order
        self.used -= nbytes
        while (partner := offset ^ self._smallest << order) in self._free[order]:
            del self._free[order][partner]
            offset = min(offset, partner)
            order += 1
        self._free[order][offset] = None
        return nbytes
