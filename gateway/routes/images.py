"""``POST /v1/images/generations``."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway import answers, translate
from gateway.context import gateway, json_body, read, send
from gateway.errors import bad_request
from gateway.metrics import Stopwatch
from gateway.routes.chat import collect
from gateway.schemas import ImageRequest
from omni.v1 import content_pb2

router = APIRouter()


@router.post("/v1/images/generations", openapi_extra=json_body(ImageRequest))
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
    watch = Stopwatch(shared.metrics, name)
    asked, count = translate.image(body, await shared.coordinators.model(name))
    call = send(request, asked)
    answer = await collect(call, watch, request)
    content = answers.images(answer, count, call.request_id)
    return Response(orjson.dumps(content), headers={"x-request-id": call.request_id}, media_type="application/json")
