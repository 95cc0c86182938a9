"""Errors as OpenAI's clients know them: one mapping from the error table to HTTP."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import orjson
from fastapi import Request
from fastapi.exceptions import HTTPException
from fastapi.responses import Response
from pydantic import ValidationError

from gateway.naming import public_error
from omni.rpc import logs
from omni.rpc.errors import MAX_MESSAGE_BYTES, FieldViolation, OmniError, Reason, invalid
from omni.rpc.text import clip, shown

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Http:
    """How a reason is said over HTTP: the status, and `type` and `code` of the body."""

    status: int
    type: str
    code: str


_MOST_MISTAKES = 16
"""Of one body, that its sender is told."""
_INVALID = "invalid_request_error"
TABLE: dict[Reason, Http] = {
    Reason.BAD_REQUEST: Http(400, _INVALID, "invalid_value"),
    Reason.UNKNOWN_MODEL: Http(404, _INVALID, "model_not_found"),
    Reason.UNSUPPORTED_MODALITY: Http(400, _INVALID, "unsupported_modality"),
    Reason.UNKNOWN_PARAMETER: Http(400, _INVALID, "unknown_parameter"),
    Reason.MEDIA_TOO_LARGE: Http(413, _INVALID, "media_too_large"),
    Reason.MEDIA_INVALID: Http(400, _INVALID, "invalid_media"),
    Reason.PROMPT_TOO_LONG: Http(400, _INVALID, "context_length_exceeded"),
    Reason.NOT_FOUND: Http(404, _INVALID, "not_found"),
    Reason.QUEUE_FULL: Http(429, "rate_limit_error", "queue_full"),
    Reason.MESSAGE_TOO_LARGE: Http(413, _INVALID, "request_too_large"),
    Reason.ARENA_FULL: Http(503, "service_unavailable_error", "arena_full"),
    Reason.NO_REPLICA: Http(503, "service_unavailable_error", "no_replica"),
    Reason.REPLICA_LOST: Http(503, "service_unavailable_error", "replica_lost"),
    Reason.REPLACED: Http(503, "service_unavailable_error", "replaced"),
    Reason.DRAINING: Http(503, "service_unavailable_error", "draining"),
    Reason.UNREACHABLE: Http(503, "service_unavailable_error", "coordinator_unreachable"),
    Reason.STAGE_FAILED: Http(500, "server_error", "stage_failed"),
    Reason.SEQUENCE_BROKEN: Http(500, "server_error", "sequence_broken"),
    Reason.COUNT_MISMATCH: Http(500, "server_error", "count_mismatch"),
    Reason.TENSOR_LOST: Http(500, "server_error", "tensor_lost"),
    Reason.STAGE_TIMEOUT: Http(504, "timeout_error", "stage_timeout"),
    Reason.DEADLINE: Http(504, "timeout_error", "deadline_exceeded"),
    Reason.CANCELLED: Http(499, "cancelled_error", "cancelled"),
    Reason.UNAUTHENTICATED: Http(401, "authentication_error", "invalid_api_key"),
    Reason.PERMISSION_DENIED: Http(403, "permission_error", "permission_denied"),
    Reason.UNIMPLEMENTED: Http(501, "server_error", "unimplemented"),
    Reason.INTERNAL: Http(500, "server_error", "internal_error"),
}

# What the router's own exceptions say, by HTTP status.
_ROUTER: dict[int, tuple[str, str]] = {404: ("not_found", "no such path"), 405: ("method_not_allowed", "not allowed")}


def bad_request(param: str, description: str, reason: Reason = Reason.BAD_REQUEST) -> OmniError:
    """An error about one field of the request body, named as its sender named it."""
    return invalid(FieldViolation(param, description), reason=reason)


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)' when one of `known` looks like `name`, else ''."""
    close = difflib.get_close_matches(name[:64], list(known), 1, 0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def body(error: OmniError, request_id: str) -> dict[str, object]:
    """The body of an error answer, or of an error event on a stream."""
    http = TABLE[error.reason]
    param = clip(error.fields[0].field, 256) if error.fields else ""
    return _body(
        error.message, http.type, http.code, param=param, request_id=error.request_id or request_id, stage=error.stage
    )


def _body(
    message: str, kind: str, code: str, *, param: str = "", request_id: str = "", stage: str = ""
) -> dict[str, object]:
    return {
        "error": {
            "message": clip(message, MAX_MESSAGE_BYTES),
            "type": kind,
            "param": param or None,
            "code": code,
            "request_id": request_id or None,
            "stage": stage or None,
        }
    }


def response(error: OmniError, request_id: str) -> Response:
    """An error as an HTTP answer."""
    headers = {"x-request-id": error.request_id or request_id}
    if error.retry_after is not None and TABLE[error.reason].status in (429, 503):
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if error.reason is Reason.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return Response(
        orjson.dumps(body(error, request_id)), TABLE[error.reason].status, headers, media_type="application/json"
    )


def of_validation(error: ValidationError, fields_at: Callable[[tuple[int | str, ...]], Iterable[str]]) -> OmniError:
    """What pydantic found, in words for the sender.

    Args:
        error: of a model of gateway.schemas.
        fields_at: names of the fields that the object at a place in the body may have.
    """
    violations = []
    unknown = False
    for each in error.errors(include_url=False, include_input=True)[:_MOST_MISTAKES]:
        path = _path(each["loc"])
        description = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            unknown = True
            description = "is not a known field" + nearest(str(each["loc"][-1]), fields_at(each["loc"][:-1]))
        elif each["type"] != "missing" and isinstance(each["input"], str | int | float | bool):
            description += f", got {shown(each['input'])}"
        violations.append(FieldViolation(path, description))
    reason = Reason.UNKNOWN_PARAMETER if unknown and len(violations) == 1 else Reason.BAD_REQUEST
    return invalid(*violations, reason=reason)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "@text") -> "messages[0].content": names that begin with @ are tags of unions."""
    text = ""
    for part in location:
        if isinstance(part, str) and part.startswith("@"):
            continue
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{clip(part, 64)}"
    return text


def log_failure(error: OmniError, client_request_id: str) -> None:
    """Logs a failure that is not the sender's fault, under the coordinator's id and under the sender's."""
    if TABLE[error.reason].status >= 500:
        _log.warning("request failed", error=str(error), client_request_id=client_request_id)


async def on_omni_error(request: Request, error: Exception) -> Response:
    """FastAPI's handler of `OmniError`."""
    assert isinstance(error, OmniError)
    request_id = request.state.request_id
    log_failure(error, request_id)
    return response(public_error(error, getattr(request.state, "body", None)), request_id)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """FastAPI's handler of the router's own exceptions: no such path, method not allowed."""
    assert isinstance(error, HTTPException) or hasattr(error, "status_code")
    status = error.status_code
    code, message = _ROUTER.get(status, ("http_error", str(getattr(error, "detail", ""))))
    where = f"{request.method} {clip(request.url.path, 256)}"
    content = _body(f"{where}: {message}", _INVALID, code, request_id=request.state.request_id)
    headers = {**(getattr(error, "headers", None) or {}), "x-request-id": request.state.request_id}
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


async def on_exception(request: Request, error: Exception) -> Response:
    """FastAPI's handler of everything else: a fault of the gateway."""
    _log.error("gateway fault", path=request.url.path, exc_info=error)
    return response(OmniError(Reason.INTERNAL, "the gateway failed; its log says why"), request.state.request_id)
