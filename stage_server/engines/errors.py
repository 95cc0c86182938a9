"""What a run's client is told of a failure inside an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni.rpc import logs
from omni.rpc.errors import OmniError, Reason
from stage_server.device import end_without_device

if TYPE_CHECKING:
    from stage_server.engines.base import Run

_log = logs.get(__name__)


def as_error(error: Exception, what: str, run: Run) -> OmniError:
    """The error as a client sees it; the cause of one that is not its own goes to the log only. Does not return when
    it was the device's end."""
    if isinstance(error, OmniError):
        return error.located(request_id=run.request_id)
    _log.error(what, request_id=run.request_id, exc_info=error)
    end_without_device()
    return OmniError(Reason.STAGE_FAILED, f"{what}: {type(error).__name__}", request_id=run.request_id)
