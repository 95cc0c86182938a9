"""Who is being served: request id, trace and deadline of the running task, set by the server's interceptors.

They are context variables, so tasks that a handler starts inherit them.
"""

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import structlog

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_request_id: ContextVar[str] = ContextVar("omni_request_id", default="")
_traceparent: ContextVar[str] = ContextVar("omni_traceparent", default="")
_deadline: ContextVar[float | None] = ContextVar("omni_deadline", default=None)


def new_request_id() -> str:
    """A request id that nobody else makes: "req-" and 96 random bits in hex."""
    return f"req-{secrets.token_hex(12)}"


def valid_request_id(text: str) -> bool:
    """Whether `text` may be taken over as a request id: 1 to 128 printable ASCII characters without blanks."""
    return _REQUEST_ID.fullmatch(text) is not None


def valid_traceparent(text: str) -> bool:
    """Whether `text` is a W3C trace context of version 00 that names a trace and a span."""
    return _TRACEPARENT.fullmatch(text) is not None


def request_id() -> str:
    """Id of the request that the running task serves, or ""."""
    return _request_id.get()


def traceparent() -> str:
    """W3C trace context of the running task, or ""."""
    return _traceparent.get()


def remaining() -> float | None:
    """Seconds left until the caller's deadline, not below 0; None when the caller set none."""
    deadline = _deadline.get()
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def enter(*, request_id: str = "", traceparent: str = "", remaining: float | None = None, logged: bool = True) -> None:
    """Sets what is given for the rest of the running task and what it starts.

    With `logged` its log lines carry the request id.
    """
    if request_id:
        _request_id.set(request_id)
    if request_id and logged:
        structlog.contextvars.bind_contextvars(request_id=request_id)
    if traceparent:
        _traceparent.set(traceparent)
    if remaining is not None:
        _deadline.set(time.monotonic() + remaining)


@contextmanager
def bound(*, request_id: str = "", traceparent: str = "") -> Iterator[None]:
    """Sets what is given within the block only: for loops that serve many requests in one task."""
    tokens = _request_id.set(request_id or _request_id.get()), _traceparent.set(traceparent or _traceparent.get())
    try:
        with structlog.contextvars.bound_contextvars(request_id=_request_id.get()):
            yield
    finally:
        _request_id.reset(tokens[0])
        _traceparent.reset(tokens[1])
