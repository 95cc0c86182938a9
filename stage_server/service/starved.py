"""Runs that wait for room in the arena.

What fills it goes away when it has been read, so they wait. A run whose reader waits for it takes from the arena's
reserve, so readers that have not begun, whose turn comes after it, do not keep it waiting. But none waits for ever:
input that is read whole at its end stays until its producer has ended, and a producer that waits for room in its own
output would not. Such a run fails before its reader gives it up as too slow, since nobody else can tell why it says
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni.rpc.duration import seconds_of
from omni.rpc.errors import OmniError, Reason
from stage_server.service.host import StageHost
from stage_server.service.runs import SessionRun

PATIENCE = 0.5
"""The part of the time that its reader waits for a run's next output, for which it may wait for room."""


class Starved:
    """Those of one session, on the event loop.

    Args:
        host: its arena is full, its spec has the bounds.
        again: called with each run when there is room.
        fail: called with a run that has waited for too long.
    """

    def __init__(
        self, host: StageHost, *, again: Callable[[SessionRun], None], fail: Callable[[SessionRun, OmniError], None]
    ) -> None:
        self._host = host
        self._again = again
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._timers: dict[SessionRun, asyncio.TimerHandle] = {}

    def add(self, run: SessionRun) -> None:
        """There is no room for a run's output; it may wait already."""
        if run in self._timers:
            return
        bounds = self._host.spec.bounds
        reader_waits = bounds.gap if run.outbox.first else bounds.first_output
        seconds = PATIENCE * seconds_of(reader_waits)
        self._timers[run] = self._loop.call_later(seconds, self._expire, run, seconds)

    def drop(self, run: SessionRun) -> None:
        """A run has got room, or has ended; it may not have waited."""
        timer = self._timers.pop(run, None)
        if timer is not None:
            timer.cancel()

    def look_again(self) -> None:
        """Memory was freed."""
        for run in self._timers:
            self._again(run)

    def _expire(self, run: SessionRun, seconds: float) -> None:
        arena = self._host.arena
        load = arena.load()
        message = (
            f"its output found no room for {seconds:g} s: of the arena's {arena.largest} bytes and its reserve of"
            f" {arena.capacity - arena.largest}, {load.used_bytes} are taken, in {load.leases} tensors that nobody has"
            f" given back;"
            f" raise `arena` of stage {self._host.spec.stage}"
        )
        self._fail(run, OmniError(Reason.ARENA_FULL, message))
