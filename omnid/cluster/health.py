"""Health is progress: a replica that has work and makes no step for the stall bound cannot take more."""

from __future__ import annotations

from omni.v1 import stage_pb2


class Progress:
    """Watches the counters of one replica; seconds of any monotonic clock."""

    def __init__(self, stall: float, now: float) -> None:
        """`stall`: seconds without a step, with work present, after which the replica counts as stalled."""
        self.stall = stall
        self._steps = -1
        self._moved = now

    def observe(self, load: stage_pb2.ReplicaLoad, now: float) -> None:
        """A report has come."""
        if load.steps != self._steps or not (load.running or load.waiting):
            self._steps = load.steps
            self._moved = now

    def stalled(self, now: float) -> float:
        """Seconds that it has made no step for, when that is longer than the bound; else 0."""
        idle = now - self._moved
        return idle if idle > self.stall else 0.0
