"""The one table of errors: reason -> gRPC status code, typed exception, retry hint.

An error is an `OmniError` inside a process, a ``google.rpc.Status`` in a message, and a gRPC status with the same
``google.rpc.Status`` in its trailing metadata on a call. All three carry the reason, the request, the stage and the
replica, so that a client of any language can tell what failed without reading the message.
"""

import contextlib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from omni.rpc.duration import duration_of, seconds_of
from omni.rpc.text import clip

DOMAIN = "omnid"
"""``ErrorInfo.domain`` of every error that this project makes."""

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata that holds the serialized ``google.rpc.Status``."""

# A status travels in HTTP/2 headers, of which many clients take 8 KiB: the message once percent-encoded (up to three
# times its size) and once more, with the fields, in base64.
MAX_MESSAGE_BYTES = 1024
MAX_FIELDS_BYTES = 2048


class Reason(enum.StrEnum):
    """What went wrong: ``ErrorInfo.reason``. The names are part of the contract."""

    BAD_REQUEST = "BAD_REQUEST"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNSUPPORTED_MODALITY = "UNSUPPORTED_MODALITY"
    UNKNOWN_PARAMETER = "UNKNOWN_PARAMETER"
    MEDIA_TOO_LARGE = "MEDIA_TOO_LARGE"
    MEDIA_INVALID = "MEDIA_INVALID"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    NOT_FOUND = "NOT_FOUND"
    QUEUE_FULL = "QUEUE_FULL"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    ARENA_FULL = "ARENA_FULL"
    NO_REPLICA = "NO_REPLICA"
    REPLICA_LOST = "REPLICA_LOST"
    DRAINING = "DRAINING"
    REPLACED = "REPLACED"
    UNREACHABLE = "UNREACHABLE"
    STAGE_FAILED = "STAGE_FAILED"
    SEQUENCE_BROKEN = "SEQUENCE_BROKEN"
    COUNT_MISMATCH = "COUNT_MISMATCH"
    TENSOR_LOST = "TENSOR_LOST"
    STAGE_TIMEOUT = "STAGE_TIMEOUT"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELLED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One thing wrong with a request.

    Attributes:
        field: path in the request, ``params["thinker"].sampling.top_p``.
        description: what it must be, and what it was.
    """

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}" if self.field else self.description


class OmniError(Exception):
    """Any failure that crosses a process boundary, on both sides of it.

    ``OmniError(reason, ...)`` makes the exception class that the table names for the reason, so callers can catch
    `UnavailableError` and need not compare reasons.

    Attributes:
        reason: row of the table.
        message: for people; names what they can change.
        request_id: the request, or "" when there is none.
        stage: the stage that failed, or "".
        replica: the replica that failed, or "".
        fields: what is wrong with the request.
        retry_after: seconds after which the same call may succeed; None when a retry does not help.
    """

    def __new__(cls, reason: Reason, *_args: Any, **_kwargs: Any) -> Self:
        exception = TABLE[reason].exception
        if not issubclass(exception, cls):
            raise TypeError(f"{reason} is a {exception.__name__}, not a {cls.__name__}")
        return super().__new__(exception)

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        request_id: str = "",
        stage: str = "",
        replica: str = "",
        fields: Sequence[FieldViolation] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message
        self.request_id = request_id
        self.stage = stage
        self.replica = replica
        self.fields = tuple(fields)
        self.retry_after = TABLE[reason].retry_after if retry_after is None else retry_after

    def __str__(self) -> str:
        where = [f"{name} {value}" for name, value in self.metadata().items()]
        return f"{self.reason}: {self.message}" + (f" ({', '.join(where)})" if where else "")

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code of the reason."""
        return TABLE[self.reason].code

    def metadata(self) -> dict[str, str]:
        """``ErrorInfo.metadata``: those of request_id, stage and replica that are known."""
        known = {"request_id": self.request_id, "stage": self.stage, "replica": self.replica}
        return {name: value for name, value in known.items() if value}

    def located(self, *, request_id: str = "", stage: str = "", replica: str = "") -> Self:
        """The error itself, with the places filled in that it does not name yet."""
        self.request_id = self.request_id or request_id
        self.stage = self.stage or stage
        self.replica = self.replica or replica
        return self

    def to_status(self) -> status_pb2.Status:
        """The error as a message; long texts are cut so that it fits into trailing metadata."""
        status = status_pb2.Status(code=self.code.value[0], message=clip(self.message, MAX_MESSAGE_BYTES))
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata())
        status.details.add().Pack(info)
        if self.fields:
            bad = error_details_pb2.BadRequest()
            room = MAX_FIELDS_BYTES
            for violation in self.fields:
                field, description = clip(violation.field, 256), clip(violation.description, 512)
                room -= len(field.encode()) + len(description.encode())
                if room < 0:
                    break
                bad.field_violations.add(field=field, description=description)
            status.details.add().Pack(bad)
        if self.retry_after is not None:
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=duration_of(self.retry_after)))
        return status

    @staticmethod
    def from_status(status: status_pb2.Status) -> "OmniError":
        """The error that `to_status` was called on; for a foreign status, the nearest reason of its code."""
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            for known in (info, bad, retry):
                with contextlib.suppress(DecodeError):  # A peer at fault: its status and message still tell.
                    detail.Unpack(known)  # does nothing for another type
        ours = info.domain == DOMAIN and info.reason in Reason.__members__
        return OmniError(
            Reason(info.reason) if ours else reason_of_code(status.code),
            status.message,
            request_id=info.metadata.get("request_id", ""),
            stage=info.metadata.get("stage", ""),
            replica=info.metadata.get("replica", ""),
            fields=[FieldViolation(each.field, each.description) for each in bad.field_violations],
            retry_after=seconds_of(retry.retry_delay) if retry.HasField("retry_delay") else None,
        )

    @staticmethod
    def from_rpc_error(error: grpc.RpcError) -> "OmniError":
        """The error that the server of a failed call meant, or what gRPC itself says when it never got to say it."""
        code = error.code()
        for key, value in trailing_metadata(error):
            if key == DETAILS_KEY:
                try:
                    status = status_pb2.Status.FromString(
                        value if isinstance(value, bytes) else value.encode("latin-1")
                    )
                except ValueError:
                    break
                if status.code == code.value[0]:
                    return OmniError.from_status(status)
        return OmniError(reason_of_code(code.value[0]), error.details() or code.name.lower().replace("_", " "))


def invalid(*violations: FieldViolation, reason: Reason = Reason.BAD_REQUEST) -> OmniError:
    """The error of a request with wrong fields; its message says of each what is wrong."""
    return OmniError(reason, "; ".join(map(str, violations)), fields=violations)


class InvalidArgumentError(OmniError):
    """The request is wrong and will stay so; `fields` says where."""


class NotFoundError(OmniError):
    """No model, request or replica of that name."""


class ResourceExhaustedError(OmniError):
    """A limit is reached: queue, message size, or room for tensors."""


class UnavailableError(OmniError):
    """Nobody can take the work just now; a retry may find somebody."""


class DataLossError(OmniError):
    """Output of a stage was lost or doubled on its way."""


class DeadlineExceededError(OmniError):
    """A bound has passed: the caller's deadline or one of the deployment's bounds."""


class RequestCancelledError(OmniError):
    """The request was cancelled."""


class UnauthenticatedError(OmniError):
    """No valid credentials were given."""


class PermissionDeniedError(OmniError):
    """The credentials do not allow this."""


class UnimplementedError(OmniError):
    """The server does not have this method."""


class InternalError(OmniError):
    """A stage, or the server itself, failed."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a reason means on the wire and in Python.

    Attributes:
        code: gRPC status code.
        exception: class that `OmniError(reason)` makes.
        retry_after: seconds to suggest when the error itself does not say; None: a retry does not help.
    """

    code: grpc.StatusCode
    exception: type[OmniError]
    retry_after: float | None = None


TABLE: dict[Reason, Row] = {
    Reason.BAD_REQUEST: Row(grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
    Reason.UNKNOWN_MODEL: Row(grpc.StatusCode.NOT_FOUND, NotFoundError),
    Reason.UNSUPPORTED_MODALITY: Row(grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
    Reason.UNKNOWN_PARAMETER: Row(grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
    Reason.MEDIA_TOO_LARGE: Row(grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
    Reason.MEDIA_INVALID: Row(grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
    Reason.PROMPT_TOO_LONG: Row(grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
    Reason.NOT_FOUND: Row(grpc.StatusCode.NOT_FOUND, NotFoundError),
    Reason.QUEUE_FULL: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError, 1.0),
    Reason.MESSAGE_TOO_LARGE: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
    Reason.ARENA_FULL: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
    Reason.NO_REPLICA: Row(grpc.StatusCode.UNAVAILABLE, UnavailableError, 1.0),
    Reason.REPLICA_LOST: Row(grpc.StatusCode.UNAVAILABLE, UnavailableError, 0.5),
    Reason.DRAINING: Row(grpc.StatusCode.UNAVAILABLE, UnavailableError, 1.0),
    Reason.REPLACED: Row(grpc.StatusCode.ABORTED, UnavailableError),
    Reason.UNREACHABLE: Row(grpc.StatusCode.UNAVAILABLE, UnavailableError, 0.5),
    Reason.STAGE_FAILED: Row(grpc.StatusCode.INTERNAL, InternalError),
    Reason.SEQUENCE_BROKEN: Row(grpc.StatusCode.DATA_LOSS, DataLossError),
    Reason.COUNT_MISMATCH: Row(grpc.StatusCode.DATA_LOSS, DataLossError),
    Reason.TENSOR_LOST: Row(grpc.StatusCode.DATA_LOSS, DataLossError),
    Reason.STAGE_TIMEOUT: Row(grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
    Reason.DEADLINE: Row(grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
    Reason.CANCELLED: Row(grpc.StatusCode.CANCELLED, RequestCancelledError),
    Reason.UNAUTHENTICATED: Row(grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError),
    Reason.PERMISSION_DENIED: Row(grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
    Reason.UNIMPLEMENTED: Row(grpc.StatusCode.UNIMPLEMENTED, UnimplementedError),
    Reason.INTERNAL: Row(grpc.StatusCode.INTERNAL, InternalError),
}

# What a status without our ErrorInfo means: gRPC itself made it, or a proxy, or a server that is not ours.
_FOREIGN: dict[int, Reason] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: Reason.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: Reason.BAD_REQUEST,
    grpc.StatusCode.NOT_FOUND.value[0]: Reason.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: Reason.MESSAGE_TOO_LARGE,
    grpc.StatusCode.UNAVAILABLE.value[0]: Reason.UNREACHABLE,
    grpc.StatusCode.DATA_LOSS.value[0]: Reason.SEQUENCE_BROKEN,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: Reason.DEADLINE,
    grpc.StatusCode.CANCELLED.value[0]: Reason.CANCELLED,
    grpc.StatusCode.UNAUTHENTICATED.value[0]: Reason.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED.value[0]: Reason.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED.value[0]: Reason.UNIMPLEMENTED,
}


def reason_of_code(code: int) -> Reason:
    """The nearest reason of a gRPC status code (its number)."""
    return _FOREIGN.get(code, Reason.INTERNAL)


def trailing_metadata(error: grpc.RpcError) -> Iterable[tuple[str, str | bytes]]:
    """Trailing metadata of a failed call, of both of gRPC's Python APIs; empty when the call never began."""
    return cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
