"""``GET /v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.context import gateway
from omni.rpc.text import modality_name
from omni.v1 import generate_pb2

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All models of all coordinators."""
    return {"object": "list", "data": [_model(model) for model in await gateway(request).coordinators.models()]}


@router.get("/v1/models/{name}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One model."""
    return _model(await gateway(request).coordinators.model(name))


def _model(model: generate_pb2.Model) -> dict[str, Any]:
    return {
        "id": model.model,
        "object": "model",
        "created": 0,
        "owned_by": "omnid",
        "pipeline": model.pipeline,
        "input_modalities": [modality_name(each) for each in model.inputs],
        "output_modalities": [modality_name(each.modality) for each in model.outputs],
        "stages": list(model.stages),
        "voices": list(model.voices),
        "ready": model.ready,
    }
