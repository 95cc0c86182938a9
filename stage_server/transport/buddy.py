"""A buddy allocator: blocks are powers of two, a freed block joins its free neighbour of the same size.

Chosen over size classes because what is published ranges from a token's few hundred bytes to hundreds of megabytes in
one arena: a buddy system needs no guess of the mix, and its fragmentation is bounded both ways. Within a block less
than half is wasted (all but the tensor, in the smallest block). Between blocks: a size finds no room only if each
aligned block of that size holds something, so n tensors spoil at most n of them; and as neighbours join, memory comes
back to one free block whatever the order of frees was.
"""

from __future__ import annotations

SMALLEST = 256
"""Bytes of the smallest block: a cache-line multiple, and alignment for every dtype."""


class Buddy:
    """Hands out ranges of a region of `capacity` bytes, a power of two of at least `SMALLEST`."""

    def __init__(self, capacity: int) -> None:
        if capacity < SMALLEST or capacity & (capacity - 1):
            raise ValueError(f"capacity must be a power of two of at least {SMALLEST}, is {capacity}")
        self.capacity = capacity
        self.used = 0
        """Bytes in allocated blocks."""
        self._top = capacity.bit_length() - 1
        self._free: list[dict[int, None]] = [{} for _ in range(self._top + 1)]
        self._free[self._top][0] = None

    @staticmethod
    def order(size: int) -> int:
        """Binary logarithm of the block that holds `size` bytes."""
        return (max(size, SMALLEST) - 1).bit_length()

    def allocate(self, size: int) -> int | None:
        """Offset of a block for `size` bytes; None when no block is free."""
        wanted = self.order(size)
        order = wanted
        while order <= self._top and not self._free[order]:
            order += 1
        if order > self._top:
            return None
        # The block that was freed last is the likeliest to be in the processor's cache and to have its pages.
        offset, _ = self._free[order].popitem()
        while order > wanted:
            order -= 1
            self._free[order][offset + (1 << order)] = None
        self.used += 1 << wanted
        return offset

    def free(self, offset: int, size: int) -> None:
        """Gives a block back; `size` as it was allocated."""
        order = self.order(size)
        self.used -= 1 << order
        while order < self._top:
            buddy = offset ^ (1 << order)
            if buddy not in self._free[order]:
                break
            del self._free[order][buddy]
            offset = min(offset, buddy)
            order += 1
        self._free[order][offset] = None
