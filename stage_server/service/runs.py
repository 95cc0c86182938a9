"""A run as its session sees it, and its errors as its reader sees them."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from google.rpc import status_pb2

from omni.rpc import logs
from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from stage_server.engines.base import Finished
from stage_server.service.inbox import Inbox
from stage_server.service.outbox import Outbox
from stage_server.transport.arena import Holder

_log = logs.get(__name__)


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
    window: float
    """Messages that may be on their way without a credit; infinite for a reader without credits."""
    credit: float
    """Messages that may still be sent: at most `window`, whatever the reader says that it took."""
    inbox: Inbox
    published: Holder
    """What it has published, a part of what its session has."""
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


def meant(run: SessionRun, what: str, error: Exception) -> OmniError:
    """The error as a client sees it; the cause of one that is not its own goes to the log only."""
    if isinstance(error, OmniError):
        return error
    _log.error("a run failed in its session", request_id=run.request_id, what=what, exc_info=error)
    return OmniError(Reason.STAGE_FAILED, f"{what}: {type(error).__name__}")


def located(error: OmniError, run: SessionRun, *, stage: str, replica: str) -> OmniError:
    """The error with its place. An engine says `params.x`; a request has parameters for each of its stages."""
    if any(wrong.field.startswith("params.") for wrong in error.fields):
        named = [
            FieldViolation(re.sub(r"^params\.", f'params["{stage}"].', wrong.field), wrong.description)
            for wrong in error.fields
        ]
        error = invalid(*named, reason=error.reason)
    return error.located(request_id=run.request_id, stage=stage, replica=replica)
