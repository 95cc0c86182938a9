"""What the routes share, and how a body becomes a checked model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from gateway import errors, schemas
from gateway.coordinators import Coordinators
from gateway.media.fetch import Fetcher
from gateway.metrics import GatewayMetrics
from gateway.settings import Settings
from gateway.upstream import Call
from omni.rpc import context as call_context
from omni.rpc.errors import OmniError, Reason
from omni.rpc.validation import validate
from omni.v1 import generate_pb2

Body = TypeVar("Body", bound=schemas.Strict)


@dataclass(frozen=True, slots=True)
class Gateway:
    """Lives as long as the process: ``request.app.state.gateway``."""

    settings: Settings
    coordinators: Coordinators
    metrics: GatewayMetrics
    fetcher: Fetcher | None
    """Reads media behind URLs; None: they are refused."""


def gateway(request: Request) -> Gateway:
    """FastAPI's way to the shared state."""
    found: Gateway = request.app.state.gateway
    return found


async def read(request: Request, schema: type[Body], limit: int) -> Body:
    """The request's body, from here on in ``request.state.body`` too; its size is checked before and while it is read.

    Raises:
        OmniError: MESSAGE_TOO_LARGE, BAD_REQUEST or UNKNOWN_PARAMETER.
    """
    announced = request.headers.get("content-length", "")
    too_large = OmniError(Reason.MESSAGE_TOO_LARGE, f"the body is too large; at most {limit} bytes are taken")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise too_large
    except ClientDisconnect:
        raise OmniError(Reason.CANCELLED, "the client hung up before its body had come") from None
    try:
        body = request.state.body = schema.model_validate_json(b"".join(pieces))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        if first["type"] == "json_invalid":
            text = first["msg"].removeprefix("Invalid JSON: ")
            raise OmniError(Reason.BAD_REQUEST, f"the body is no valid JSON: {text}") from None
        raise errors.of_validation(error, lambda at: schemas.fields_at(schema, at)) from None
    return body


def json_body(schema: type[BaseModel]) -> dict[str, object]:
    """What ``/openapi.json`` says of a body that `read` reads."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def send(request: Request, asked: generate_pb2.GenerateRequest) -> Call:
    """Sends what an HTTP request asks for, under its id and in its trace.

    Raises:
        OmniError: BAD_REQUEST for what the contract does not allow; UNREACHABLE, MESSAGE_TOO_LARGE.
    """
    asked.client_request_id = request.state.request_id
    traceparent = request.headers.get(call_context.TRACEPARENT_KEY, "")
    if call_context.valid_traceparent(traceparent):
        asked.traceparent = traceparent
    validate(asked)
    return gateway(request).coordinators.start(asked)
