"""``POST /v1/images/generations``."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway import answers, translate
from gateway.context import gateway, read
from gateway.errors import bad_request
from gateway.metrics import Stopwatch
from gateway.routes.chat import collect
from gateway.schemas import ImageRequest
from omni.v1 import content_pb2

router = APIRouter()


@router.post("/v1/images/generations", openapi_extra={"requestBody": {"content": {"application/json": {}}}})
async def create(request: Request) -> Response:
    """Pictures from a prompt, as base64."""
    shared = gateway(request)
    body = await read(request, ImageRequest, shared.settings.max_body_bytes)
    name = body.model
    if name is None:
        able = [
            model.model
            for model in await shared.coordinators.models()
            if any(output.modality == content_pb2.MODALITY_IMAGE for output in model.outputs)
        ]
        if len(able) != 1:
            raise bad_request("model", f"must be given; models that make pictures: {', '.join(able) or 'none'}")
        name = able[0]
    asked = translate.image(body, await shared.coordinators.model(name))
    asked.client_request_id = request.state.request_id[:128]
    answer = await collect(shared.coordinators.start(asked), Stopwatch(shared.metrics, name), request)
    return Response(orjson.dumps(answers.images(answer)), media_type="application/json")
