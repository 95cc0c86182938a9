"""The ASGI application: routes, errors, request ids, API keys."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, HTTPException
from prometheus_client import CollectorRegistry
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.context import Gateway
from gateway.coordinators import Coordinators
from gateway.media.fetch import Fetcher
from gateway.metrics import GatewayMetrics
from gateway.routes import chat, health, images, models
from gateway.schemas import ChatRequest, ImageRequest
from gateway.settings import Settings
from omni.rpc import context as call_context
from omni.rpc.errors import OmniError, Reason


def make_app(settings: Settings) -> FastAPI:
    """The application; its streams to the coordinators live as long as it does."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            coordinators = await stack.enter_async_context(Coordinators(settings.coordinators, settings.tls, registry))
            fetcher = await stack.enter_async_context(Fetcher()) if settings.allow_media_urls else None
            app.state.gateway = Gateway(settings, coordinators, metrics, fetcher)
            yield

    # A path with a slash too many is answered here: a redirect would trust the host and scheme that the sender names.
    app = FastAPI(
        title="omnid",
        version=version("omnid"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for route in (chat, images, models, health):
        app.include_router(route.router)
    app.add_exception_handler(OmniError, errors.on_omni_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    app.add_exception_handler(StarletteHTTPException, errors.on_http_exception)
    app.add_exception_handler(Exception, errors.on_exception)

    app.add_middleware(_Border, settings=settings, metrics=metrics)
    _describe_bodies(app)
    return app


def _describe_bodies(app: FastAPI) -> None:
    """Adds the schemas of the bodies, which the routes read themselves, to ``/openapi.json``."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        _, schemas = models_json_schema(
            [(ChatRequest, "validation"), (ImageRequest, "validation")], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]


class _Border:
    """What happens to every request before its route and after it: request id, API key, count. Plain ASGI, so that
    it costs nothing for each event of a stream.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: GatewayMetrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if call_context.valid_request_id(given) else call_context.new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", request_id)
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        keys = self._settings.api_keys
        if keys and scope["path"].startswith("/v1/") and not _known(headers, keys):
            error = OmniError(Reason.UNAUTHENTICATED, "no valid API key was given as Authorization: Bearer")
            await errors.response(error, request_id)(scope, receive, answer)
        else:
            await self._app(scope, receive, answer)


def _known(headers: Headers, keys: frozenset[str]) -> bool:
    kind, _, given = headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and any(hmac.compare_digest(given.encode(), key.encode()) for key in keys)
