"""One run of a request, and the lanes along which its output travels to the runs that read it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omni.v1 import config_pb2, content_pb2, stage_pb2

if TYPE_CHECKING:
    from omnid.orchestrator.plan import Stage
    from omnid.orchestrator.ports import Replica

WINDOW = 2
"""Messages of a run that may be under way without a credit, in each direction."""

NEVER = math.inf


@dataclass(slots=True)
class Pending:
    """An output that has not been passed on along all its routes: its producer's credit waits for them."""

    routes: int


@dataclass(slots=True)
class Lane:
    """From one run to another. Owned by the request; touched by its state machine only."""

    name: str
    """Of the edge, "thinker->talker"."""
    waits: bool
    producer: Run
    consumer: Run
    queue: deque[tuple[stage_pb2.RunOutput, Pending | None]] = field(default_factory=deque)
    """Outputs that the consumer cannot take yet, and whose credit they hold up."""
    sent: deque[stage_pb2.RunOutput] = field(default_factory=deque)
    """Under way: sent and not credited."""
    taken: int = 0
    """Messages that the consumer has credited."""
    end: stage_pb2.RunInputEnd | None = None
    end_sent: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """One (request, stage, role)."""

    stage: Stage
    role: str
    params: config_pb2.StageParams
    to_client: bool
    tensors: tuple[str, ...]
    number: int = 0
    """On the wire; 0 while it is not started. A run that is started anew gets a new one."""
    replica: Replica | None = None
    wanted: bool = False
    """To be started as soon as there is a replica."""
    accepted: bool = False
    ended: bool = False
    lost: bool = False
    """Given up: it did not acknowledge its cancellation."""
    next: int = 0
    """Number of the next output."""
    inputs: list[Lane] = field(default_factory=list)
    outputs: list[Lane] = field(default_factory=list)
    withheld: int = 0
    """Outputs that are not passed on and not credited."""
    client_queue: deque[tuple[content_pb2.Payload, Pending]] = field(default_factory=deque)
    client_in_flight: int = 0
    finished: stage_pb2.RunFinished | None = None
    due: float = NEVER
    bound: str = ""
    """Which bound `due` is."""
    avoid: frozenset[str] = frozenset()
    created: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.stage.name}[{self.role}]" if self.role else self.stage.name

    def wait(self, bound: str, due: float) -> None:
        """Bounds what the run does next."""
        self.bound, self.due = bound, due

    def can_start(self) -> bool:
        """Whether its inputs allow it to start: all that it waits for have ended, one of the others has begun."""
        if not self.inputs:
            return True
        waiting = [lane for lane in self.inputs if lane.waits]
        if waiting:
            return all(lane.end is not None for lane in waiting)
        return any(lane.queue or lane.end is not None for lane in self.inputs)
