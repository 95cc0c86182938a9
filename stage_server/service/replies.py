"""What a stream says next: messages of a bounded size, and whether the last of them has been written."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from omni.v1 import stage_pb2

RESPONSE_BYTES = 4 << 20
"""A message that has grown to this waits for no more; the rest goes out in the next ones."""

_FRAME_BYTES = 8
"""Upper bound of what the wire adds to an event."""


class Replies:
    """Fed by a session and emptied by its one writer, both on the event loop."""

    def __init__(self) -> None:
        self._events: deque[tuple[stage_pb2.RunEvent, int]] = deque()
        self._bytes = 0
        self._given_back = stage_pb2.StageServiceAttachResponse()
        self._filled = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self._closed = False

    @property
    def empty(self) -> bool:
        """The writer waits for nothing that has been said."""
        return not self._filled.is_set()

    @property
    def full(self) -> bool:
        """The next message has no room for more events."""
        return self._bytes >= RESPONSE_BYTES

    def say(self, event: stage_pb2.RunEvent, wire: int) -> None:
        """Adds an event of at most `wire` bytes."""
        framed = wire + _FRAME_BYTES
        self._events.append((event, framed))
        self._bytes += framed
        if not self._filled.is_set():
            self.wake()

    def credit(self, run: int) -> None:
        """An input of a run has been taken."""
        self._given_back.credits.append(run)
        self.wake()

    def release(self, owner: str, leases: Iterable[int]) -> None:
        """Tensors of another replica have been read."""
        self._given_back.releases.add(owner=owner, leases=leases)
        self.wake()

    def wake(self) -> None:
        """The writer is to look for more to say."""
        if not self._closed:
            self._filled.set()
            self._written.clear()

    def close(self) -> None:
        """Nobody reads any more: nothing that is left will be written."""
        self._closed = True
        self._filled.set()
        self._written.set()

    async def wait(self) -> None:
        """Waits until there is something to say. Called by the writer when it has written what it took before."""
        if not self._filled.is_set():
            self._written.set()
        await self._filled.wait()

    async def written(self) -> None:
        """Waits until everything that has been said is written."""
        await self._written.wait()

    def take(self) -> stage_pb2.StageServiceAttachResponse:
        """The next message: the oldest events, as many as it has room for; a larger event goes alone."""
        message, self._given_back = self._given_back, stage_pb2.StageServiceAttachResponse()
        held = 0
        events = self._events
        while events and (not held or held + events[0][1] <= RESPONSE_BYTES):
            event, wire = events.popleft()
            message.events.append(event)
            held += wire
        self._bytes -= held
        if not events and not self._closed:
            self._filled.clear()
        return message
