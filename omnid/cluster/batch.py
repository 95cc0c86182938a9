"""Messages that collect what is to be written until a writer takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

SPLIT_BYTES = 2 * 1024 * 1024
"""A message above this size goes out in several, as far as it has several entries: half of what a gRPC client takes
whose limits nobody has changed, since a single entry may be larger than its neighbours."""
_FRAME_BYTES = 8
"""Upper bound of what the wire adds to an entry."""


class WriteBatch(Generic[M]):
    """A pending message of one stream. Many fill it, one task takes it.

    Attributes:
        message: what is pending; fill it and call `wake`. Another object after each `take`.
    """

    def __init__(self, make: Callable[[], M]) -> None:
        self._make = make
        self.message = make()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

    def wake(self) -> None:
        """There is something to take."""
        if not self._woken:
            self._woken = True
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def take(self) -> M:
        """All that is pending, as soon as there is something. Called by one task."""
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._woken = False
        message, self.message = self.message, self._make()
        return message


async def write_out(
    batch: WriteBatch[M], field: str, at_work: Callable[[], bool], write: Callable[[M], Awaitable[None]]
) -> None:
    """Writes what comes into `batch` until nothing is at work and all of it is written.

    Args:
        batch: filled by others, and woken when `at_work` has become false.
        field: the repeated message that its messages are split by.
        at_work: whether more may come.
        write: gets each message; one without entries is nothing to send, but somebody has woken the batch.
    """
    while at_work() or len(getattr(batch.message, field)):
        for part in split(await batch.take(), field):
            await write(part)


def split(message: M, field: str) -> Iterator[M]:
    """`message`, cut between the entries of the repeated message `field` into parts of at most `SPLIT_BYTES`, as far
    as entries are small enough. Other fields travel in the first part, so that no entry arrives before them."""
    if message.ByteSize() <= SPLIT_BYTES:
        yield message
        return
    entries = list(getattr(message, field))
    part = type(message)()
    part.CopyFrom(message)
    part.ClearField(field)
    room = SPLIT_BYTES - part.ByteSize()
    held = part.ByteSize() > 0
    for entry in entries:
        size = entry.ByteSize() + _FRAME_BYTES
        if held and size > room:
            yield part
            part = type(message)()
            room = SPLIT_BYTES
        getattr(part, field).append(entry)
        held = True
        room -= size
    yield part
