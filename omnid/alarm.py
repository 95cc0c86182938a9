"""Rings when the orchestrator's next deadline has come: one timer handle of the event loop, no task and no polling.

The time is `time.monotonic`: the loop's own may be rounded to milliseconds."""

from __future__ import annotations

import asyncio
import time

from omnid.orchestrator.core import Orchestrator


class Alarm:
    """Wakes one orchestrator."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._core: Orchestrator | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._when = 0.0
        """When the handle rings."""

    def watch(self, core: Orchestrator) -> None:
        """From now on the deadlines of `core` are looked at."""
        self._core = core
        self.earlier()

    def earlier(self) -> None:
        """The next deadline is an earlier one, or may be."""
        when = self._core.timers.first() if self._core is not None else None
        if self._handle is not None:
            if when is not None and self._when <= when:
                return
            self._handle.cancel()
        self._handle = None
        if when is not None:
            self._when = when
            self._handle = self._loop.call_later(max(0.0, when - time.monotonic()), self._ring)

    def stop(self) -> None:
        """Rings no more."""
        self._core = None
        self.earlier()

    def _ring(self) -> None:
        self._handle = None
        if self._core is None:
            return
        try:
            self._core.tick(time.monotonic())
            self._core.expire()
        finally:
            self.earlier()
