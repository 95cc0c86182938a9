"""What the routes share, and how a body becomes a checked model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from gateway import errors, schemas
from gateway.coordinators import Coordinators
from gateway.metrics import GatewayMetrics
from gateway.settings import Settings
from omni.rpc.errors import OmniError, Reason

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Gateway:
    """Lives as long as the process: ``request.app.state.gateway``."""

    settings: Settings
    coordinators: Coordinators
    metrics: GatewayMetrics


def gateway(request: Request) -> Gateway:
    """FastAPI's way to the shared state."""
    found: Gateway = request.app.state.gateway
    return found


async def read(request: Request, schema: type[Body], limit: int) -> Body:
    """The request's body; its size is checked before, and while, it is read.

    Raises:
        OmniError: MESSAGE_TOO_LARGE, BAD_REQUEST or UNKNOWN_PARAMETER.
    """
    announced = request.headers.get("content-length", "")
    too_large = OmniError(Reason.MESSAGE_TOO_LARGE, f"the body is too large; at most {limit} bytes are taken")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    try:
        return schema.model_validate_json(bytes(body))
    except ValidationError as error:
        if any(each["type"] == "json_invalid" for each in error.errors(include_input=False, include_url=False)):
            raise OmniError(Reason.BAD_REQUEST, f"the body is no valid JSON: {error.errors()[0]['msg']}") from None
        raise errors.of_validation(error, lambda at: schemas.fields_at(schema, at)) from None
