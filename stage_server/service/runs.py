"""A run as its session sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from google.rpc import status_pb2

from omni.v1 import stage_pb2
from stage_server.engines.base import Finished
from stage_server.service.outbox import Outbox


@dataclass(slots=True)
class Source:
    """What came so far from one of the runs that feed this one."""

    next: int = 0
    ended: bool = False


@dataclass(slots=True, eq=False)
class SessionRun:
    """One run of a session; touched on the event loop only."""

    number: int
    """On the wire, unique on the stream."""
    id: int
    """In the engine, unique in this process."""
    request_id: str
    role: str
    traceparent: str
    begun: float
    credit: float
    """Messages that may still be sent; infinite for a reader without credits."""
    sources: dict[tuple[str, str], Source]
    outbox: Outbox = field(default_factory=Outbox)
    queued: bool = False
    """In the session's list of runs that have something to send."""
    publishing: bool = False
    """Large tensors of its outbox are being copied on another thread."""
    held: bool = False
    """Its engine was told to hold it."""
    inbox: deque[stage_pb2.RunInput | stage_pb2.RunInputEnd] = field(default_factory=deque)
    fetching: bool = False
    first_output: float = 0.0
    """Seconds from its begin; 0 while there is none."""
    cancelled: bool = False
    error: status_pb2.Status | None = None
    """How it fails, once its engine has let go."""
    finished: Finished | None = None
    timer: asyncio.TimerHandle | None = None
