"""A run as its session sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from google.rpc import status_pb2

from stage_server.engines.base import Finished
from stage_server.service.inbox import Inbox
from stage_server.service.outbox import Outbox


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
    inbox: Inbox
    outbox: Outbox = field(default_factory=Outbox)
    queued: bool = False
    """In the session's list of runs that have something to send."""
    publishing: bool = False
    """Large tensors of its outbox are being copied on another thread."""
    held: bool = False
    """Its engine was told to hold it."""
    first_output: float = 0.0
    """Seconds from its begin; 0 while there is none."""
    cancelled: bool = False
    error: status_pb2.Status | None = None
    """How it fails, once its engine has let go."""
    finished: Finished | None = None
    timer: asyncio.TimerHandle | None = None
