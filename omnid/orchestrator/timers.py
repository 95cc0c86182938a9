"""Deadlines in one heap, cheap to move later: a target's deadline is an attribute, and the heap finds out when it asks.

A run's deadline moves with each of its outputs. Moving it later costs one assignment (``target.deadline = ...``); its
heap entry stays, and is put in again at the new time when it comes up. Only a deadline that moves earlier needs `set`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

_COMPACT_FROM = 64

Entry = tuple[float, int]


class Timed:
    """Something with a deadline, in seconds of the clock that its owner uses."""

    __slots__ = ("deadline", "entry")

    def __init__(self) -> None:
        self.deadline = 0.0
        self.entry: Entry | None = None
        """The heap entry that looks at it; owned by `Timers`."""


class Timers:
    """The heap."""

    def __init__(self, earlier: Callable[[], None] = lambda: None) -> None:
        """`earlier` is called when the first deadline became an earlier one."""
        self._heap: list[Entry] = []
        self._targets: dict[int, Timed] = {}
        self._numbers = itertools.count()
        self._earlier = earlier

    def __len__(self) -> int:
        return len(self._targets)

    def set(self, target: Timed, deadline: float) -> None:
        """Gives `target` a deadline, earlier or later than the one that it has."""
        target.deadline = deadline
        if target.entry is not None:
            if target.entry[0] <= deadline:
                return
            self.clear(target)
        self._push(target)
        if self._heap[0] is target.entry:
            self._earlier()

    def clear(self, target: Timed) -> None:
        """Takes the deadline away; the heap keeps no reference to `target`."""
        if target.entry is not None:
            del self._targets[target.entry[1]]
            target.entry = None
            if len(self._heap) > _COMPACT_FROM and len(self._heap) > 2 * len(self._targets):
                self._heap = [entry for entry in self._heap if entry[1] in self._targets]
                heapq.heapify(self._heap)

    def first(self) -> float | None:
        """When to call `due` next: no deadline lies before it. None: there is none."""
        while self._heap and self._heap[0][1] not in self._targets:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Timed | None:
        """A target whose deadline has passed, which it then has no more; None: there is none. Asked one by one, because
        what is done about one of them may move the deadlines of others."""
        while self._heap and self._heap[0][0] <= now:
            target = self._targets.pop(heapq.heappop(self._heap)[1], None)
            if target is None:
                continue
            target.entry = None
            if target.deadline <= now:
                return target
            self._push(target)
        return None

    def _push(self, target: Timed) -> None:
        entry = target.entry = (target.deadline, next(self._numbers))
        self._targets[entry[1]] = target
        heapq.heappush(self._heap, entry)
