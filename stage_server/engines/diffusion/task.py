"""A run in the diffusion engine, and its place in the queue."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from omni.v1 import content_pb2
from stage_server.engines.diffusion.model import ConditioningT, PictureRequest, SampleT

if TYPE_CHECKING:
    from stage_server.engines.base import Run
    from stage_server.output.pool import Lane


@dataclass(slots=True, eq=False)
class Task(Generic[ConditioningT, SampleT]):
    """A run's state. The engine's thread owns it, but for `_ended`, which the encoders race for."""

    run: Run
    request: PictureRequest
    lane: Lane
    """Where its pictures are encoded, one after the other."""
    conditioning: ConditioningT | None = None
    """None before the prompt was encoded."""
    sample: SampleT | None = None
    """The picture at work; None between two pictures."""
    picture: int = 0
    """Which picture is at work, or comes next."""
    steps: int = 0
    """Denoising steps done, over all pictures."""
    held: bool = False
    submitted: float = field(default_factory=time.monotonic)
    queued: float = 0.0
    """Seconds from submit to its first step."""
    gate: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever delivers for the run, so that nothing follows its end."""
    ended: bool = False
    """Guarded by `gate`."""

    @property
    def drawn(self) -> bool:
        """Whether all pictures are through the model."""
        return self.picture == self.request.outputs

    def progress(self) -> content_pb2.Progress:
        """Steps done and steps in all, over all pictures."""
        each = self.sample.steps if self.sample is not None else self.request.steps
        return content_pb2.Progress(step=self.steps, steps=each * self.request.outputs)

    def usage(self, images: int) -> content_pb2.Usage:
        """What the run used, given how many pictures are finished."""
        return content_pb2.Usage(steps=self.steps, images=images)

    def end(self) -> bool:
        """Claims the right to deliver the run's last event; whoever comes second gets False."""
        with self.gate:
            first = not self.ended
            self.ended = True
            return first


class Schedule(Generic[ConditioningT, SampleT]):
    """Who steps next: runs are admitted in the order they came, and the admitted ones take turns, a step each.

    A run leaves when its last picture is through the model, so encoding holds no place. A held run keeps its place and
    loses its turns.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._waiting: deque[Task[ConditioningT, SampleT]] = deque()
        self._running: OrderedDict[int, Task[ConditioningT, SampleT]] = OrderedDict()
        """By run, the one whose turn is longest ago first."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def ready(self) -> bool:
        """Whether somebody can step."""
        if self._waiting and len(self._running) < self._max_running:
            return True
        return any(not task.held for task in self._running.values())

    def add(self, task: Task[ConditioningT, SampleT]) -> None:
        """Queues a run."""
        self._waiting.append(task)

    def remove(self, task: Task[ConditioningT, SampleT]) -> None:
        """Takes a run out, wherever it is."""
        if self._running.pop(task.run.id, None) is None and task in self._waiting:
            self._waiting.remove(task)

    def next(self) -> Task[ConditioningT, SampleT] | None:
        """Admits who fits, and gives the run whose turn it is; None when all are held or there is none."""
        while self._waiting and len(self._running) < self._max_running:
            task = self._waiting.popleft()
            self._running[task.run.id] = task
        for task in self._running.values():
            if not task.held:
                self._running.move_to_end(task.run.id)
                return task
        return None
