"""The arena of a stage server: one memfd region that holds what this replica has published, under lease.

The region has no name, so nothing is left behind in /dev/shm; the kernel frees it when the last process that maps it
has gone. A table at its end holds a generation for each smallest block: it changes when a block is freed, so a reader
in place that looks before and after its read notices that the memory was taken back.

Beside the memory that all share there is a reserve for runs whose reader waits: it has begun, and has given back all
that it got. Else the chunks of requests whose readers have not begun could fill the arena, while those readers wait for
their turn behind one that waits for a chunk which finds no room.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from omni.rpc.errors import OmniError, Reason
from omni.v1 import stage_pb2, tensor_pb2
from stage_server.transport import dtypes
from stage_server.transport.buddy import SMALLEST, Buddy

RESERVE = 8
"""The reserve is this part of what all share, and lies beside it."""
RESERVED_PIECES = 128
"""So many runs at least have room in the reserve at a time, for a tensor of at most this part of it each: a block is
spoiled for larger ones by no less than one smaller piece in it."""


class Holder:
    """Who published: its leases can be released together. What a part holds, its whole holds too."""

    __slots__ = ("leases", "read", "whole")

    def __init__(self, whole: Holder | None = None) -> None:
        self.leases: set[int] = set()
        self.whole = whole
        self.read = False
        """Something was given back: its reader has begun."""

    @property
    def waited_for(self) -> bool:
        """Its reader has begun and has nothing left to read."""
        return self.read and not self.leases

    def add(self, lease: int) -> None:
        """A tensor was published."""
        self.leases.add(lease)
        if self.whole is not None:
            self.whole.add(lease)

    def drop(self, lease: int) -> None:
        """A lease has ended."""
        self.leases.discard(lease)
        if self.whole is not None:
            self.whole.drop(lease)


@dataclass(slots=True)
class _Lease:
    offset: int
    size: int
    since: float
    holder: Holder | None
    filling: bool = False
    """Another thread copies into it: it is freed when that has ended."""
    ended: bool = False


def region_bytes(capacity: int) -> int:
    """Bytes of the region of an arena of `capacity`: its memory and the table of generations."""
    return capacity + capacity // SMALLEST * 4


class Arena:
    """Owned by the server's event loop; `fill` alone works on another thread.

    Args:
        owner: name of this replica.
        epoch: its incarnation.
        capacity: bytes that all share, rounded down to a power of two; the reserve comes on top.
        lease_seconds: after which a tensor that nobody released is taken back.
        checksum: whether handles carry the checksum of their bytes.

    Attributes:
        capacity: bytes in all, the reserve among them.
        largest: bytes of the largest tensor that fits: what all share.
    """

    def __init__(self, owner: str, epoch: int, capacity: int, lease_seconds: float, *, checksum: bool = False) -> None:
        self.owner = owner
        self.epoch = epoch
        self.largest = max(SMALLEST, 1 << (capacity.bit_length() - 1)) if capacity else SMALLEST
        reserve = max(SMALLEST, self.largest // RESERVE)
        self.capacity = self.largest + reserve
        self.descriptor = os.memfd_create(f"omni-{owner}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, region_bytes(self.capacity))
        self._map = mmap.mmap(self.descriptor, region_bytes(self.capacity))
        region = torch.frombuffer(self._map, dtype=torch.uint8)
        self._memory = region[: self.capacity]
        self._generations = memoryview(self._map)[self.capacity :].cast("I")
        self._shared = Buddy(self.largest)
        self._reserved = Buddy(reserve)
        self._piece = max(SMALLEST, reserve // RESERVED_PIECES)
        self._leases: dict[int, _Lease] = {}
        self._lease_seconds = lease_seconds
        self._checksum = checksum
        self._released = self._dropped = self._expired = 0
        """Leases ended, by cause."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when memory was freed."""

    def publish(self, tensor: torch.Tensor, holder: Holder | None = None) -> tensor_pb2.TensorHandle | None:
        """Copies a tensor in (device to host directly) and returns its handle; None when there is no room now.

        Raises:
            OmniError: ARENA_FULL, when it could never fit.
        """
        handles = self.reserve([tensor], holder)
        if handles is None:
            return None
        self.copy(tensor, handles[0])
        return handles[0]

    def reserve(
        self, tensors: Sequence[torch.Tensor], holder: Holder | None = None
    ) -> list[tensor_pb2.TensorHandle] | None:
        """Handles for all of the tensors, whose bytes are still to be copied in; None when there is no room now.

        Raises:
            OmniError: ARENA_FULL, when they could never fit.
        """
        handles: list[tensor_pb2.TensorHandle] = []
        waited_for = holder is not None and holder.waited_for
        for tensor in tensors:
            handle = self._reserve(tensor, holder, waited_for)
            if handle is None:
                for each in handles:
                    self._free(each.lease)
                return None
            handles.append(handle)
        return handles

    def _reserve(self, tensor: torch.Tensor, holder: Holder | None, waited_for: bool) -> tensor_pb2.TensorHandle | None:
        size = tensor.nbytes
        if size > self.largest:
            message = (
                f"a tensor of {size} bytes does not fit into the arena of {self.largest}: raise `arena` of its stage"
            )
            raise OmniError(Reason.ARENA_FULL, message)
        offset = self._shared.allocate(size)
        if offset is None and waited_for and size <= self._piece:
            offset = self._reserved.allocate(size)
            if offset is not None:
                offset += self.largest
        if offset is None:
            return None
        lease = secrets.randbits(63) + 1
        self._leases[lease] = _Lease(offset, size, time.monotonic(), holder)
        if holder is not None:
            holder.add(lease)
        return tensor_pb2.TensorHandle(
            owner=self.owner,
            epoch=self.epoch,
            lease=lease,
            offset=offset,
            size=size,
            generation=self._generations[offset // SMALLEST],
            dtype=dtypes.to_wire(tensor.dtype),
            shape=tensor.shape,
        )

    def copy(self, tensor: torch.Tensor, handle: tensor_pb2.TensorHandle) -> None:
        """Fills a reserved slot."""
        if not handle.size:
            return
        slot = self._memory[handle.offset : handle.offset + handle.size]
        dtypes.view(slot, tensor.dtype, tensor.shape).copy_(tensor)
        if self._checksum:
            handle.checksum = xxhash.xxh3_64_intdigest(memoryview(slot.numpy()))

    async def fill(self, tensors: Sequence[torch.Tensor], handles: Sequence[tensor_pb2.TensorHandle]) -> bool:
        """Fills reserved slots on another thread; False when a lease of them has ended meanwhile.

        However this call and the leases end, the memory is given to nobody else before the copying has ended.
        """
        leases = [lease for handle in handles if (lease := self._leases.get(handle.lease)) is not None]
        if len(leases) < len(handles):
            return False
        loop = asyncio.get_running_loop()

        def copy_all() -> None:
            try:
                for tensor, handle in zip(tensors, handles, strict=True):
                    self.copy(tensor, handle)
            finally:
                loop.call_soon_threadsafe(self._filled, leases)

        for lease in leases:
            lease.filling = True
        await asyncio.shield(loop.run_in_executor(None, copy_all))
        return not any(lease.ended for lease in leases)

    def _filled(self, leases: list[_Lease]) -> None:
        for lease in leases:
            lease.filling = False
            if lease.ended:
                self._reclaim(lease)
        self.on_room()

    def bytes_of(self, handle: tensor_pb2.TensorHandle) -> torch.Tensor:
        """The memory of a handle of this arena, uint8 [size].

        Raises:
            OmniError: TENSOR_LOST, when it is not, or no longer, under that lease.
        """
        lease = self._leases.get(handle.lease)
        if (
            lease is None
            or handle.owner != self.owner
            or handle.epoch != self.epoch
            or (lease.offset, lease.size) != (handle.offset, handle.size)
        ):
            raise lost(handle)
        return self._memory[lease.offset : lease.offset + lease.size]

    def release(self, lease: int) -> None:
        """Nobody reads a tensor any more: frees it; a lease that has ended already is ignored."""
        held = self._leases.get(lease)
        if held is None:
            return
        self._released += 1
        if held.holder is not None:
            held.holder.read = True
        if self._free(lease):
            self.on_room()

    def _free(self, lease: int) -> bool:
        held = self._leases.pop(lease, None)
        if held is None:
            return False
        if held.holder is not None:
            held.holder.drop(lease)
        held.ended = True
        if held.filling:
            return False
        self._reclaim(held)
        return True

    def _reclaim(self, lease: _Lease) -> None:
        at = lease.offset // SMALLEST
        self._generations[at] = (self._generations[at] + 1) & 0xFFFFFFFF
        if lease.offset < self.largest:
            self._shared.free(lease.offset, lease.size)
        else:
            self._reserved.free(lease.offset - self.largest, lease.size)

    def release_all(self, holder: Holder) -> None:
        """Frees what the holder published and nobody released."""
        self._dropped += len(holder.leases)
        freed = [self._free(lease) for lease in list(holder.leases)]
        if any(freed):
            self.on_room()

    def expire(self) -> float | None:
        """Takes back what has outlived its lease; seconds until the next one ends, None when there is none."""
        now = time.monotonic()
        while self._leases:
            lease, held = next(iter(self._leases.items()))  # All leases are equally long: the oldest is the first.
            left = held.since + self._lease_seconds - now
            if left > 0:
                return left
            self._expired += 1
            if self._free(lease):
                self.on_room()
        return None

    def load(self) -> stage_pb2.ArenaLoad:
        """Gauges and counters."""
        oldest = next(iter(self._leases.values()), None)
        return stage_pb2.ArenaLoad(
            capacity_bytes=self.capacity,
            used_bytes=self._shared.used + self._reserved.used,
            leases=len(self._leases),
            oldest_lease_seconds=time.monotonic() - oldest.since if oldest else 0.0,
            released_leases=self._released,
            dropped_leases=self._dropped,
            expired_leases=self._expired,
        )

    def close(self) -> None:
        """Gives the descriptor back; memory that views still show is freed with the last of them."""
        self._leases.clear()
        os.close(self.descriptor)


def lost(handle: tensor_pb2.TensorHandle) -> OmniError:
    """What a reader says that finds the handle's memory taken back."""
    return OmniError(
        Reason.TENSOR_LOST,
        f"a tensor of {handle.owner} (lease {handle.lease:016x}) is no longer there",
        replica=handle.owner,
    )
