"""``/health``, ``/ready`` and ``/metrics``."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway.context import gateway

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """The gateway itself is alive."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when every model can be served, else 503 and what is missing."""
    missing = await gateway(request).coordinators.missing()
    content = {"status": "waiting" if missing else "ready", "missing": missing}
    return Response(orjson.dumps(content), 503 if missing else 200, media_type="application/json")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics of this process."""
    return Response(generate_latest(gateway(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)
