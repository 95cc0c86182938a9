"""A servicer of the contract that does what each test tells it, and a server that runs it on the loopback."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from omni.rpc.channel import make_channel
from omni.rpc.server import Server, make_server
from omni.rpc.tls import ClientTls, ServerTls
from omni.v1 import generate_pb2, generate_pb2_grpc

SERVICE = "omni.v1.OmniService"

Unary = Callable[[Any, Any], Awaitable[Any]]


async def _nothing(_request: Any, _context: Any) -> Any:
    return generate_pb2.ListModelsResponse()


@dataclass
class Echo(generate_pb2_grpc.OmniServiceServicer):
    """Each method runs what the test put in its place.

    Attributes:
        on_list: ListModels.
        on_generate: Generate; yields its responses.
        on_attach: Attach; writes its responses.
    """

    on_list: Unary = _nothing
    on_generate: Callable[[Any, Any], AsyncIterator[Any]] | None = None
    on_attach: Unary | None = None

    async def ListModels(self, request: Any, context: Any) -> Any:
        return await self.on_list(request, context)

    async def GetModel(self, request: Any, _context: Any) -> Any:
        return generate_pb2.GetModelResponse(model=generate_pb2.Model(model=request.model))

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        assert self.on_generate is not None
        async for response in self.on_generate(request, context):
            yield response

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        assert self.on_attach is not None
        await self.on_attach(request_iterator, context)


@dataclass
class Running:
    """A server that runs and a channel to it."""

    server: Server
    address: str
    channel: grpc.aio.Channel
    registry: CollectorRegistry

    @property
    def stub(self) -> "generate_pb2_grpc.OmniServiceAsyncStub":
        return generate_pb2_grpc.OmniServiceStub(self.channel)


@asynccontextmanager
async def running(
    echo: Echo, *, tls: ServerTls | None = None, client_tls: ClientTls | None = None
) -> AsyncIterator[Running]:
    """Serves `echo` on a free loopback port within the block."""
    registry = CollectorRegistry()
    server = make_server(registry=registry, tls=tls, service_names=[SERVICE])
    server.add(generate_pb2_grpc.add_OmniServiceServicer_to_server, echo)
    address = f"localhost:{await server.start('localhost:0')}"
    try:
        async with make_channel(address, tls=client_tls) as channel:
            yield Running(server, address, channel, registry)
    finally:
        await server.stop(0)


def request(model: str = "m") -> generate_pb2.GenerateRequest:
    """A request that the contract allows."""
    asked = generate_pb2.GenerateRequest(model=model)
    asked.prompt.text = "hello"
    return asked
