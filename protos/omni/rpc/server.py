"""The one way to make a server."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from omni.rpc.address import ListenError, check_free
from omni.rpc.interceptors import CallInterceptor
from omni.rpc.metrics import RpcMetrics
from omni.rpc.options import server_options
from omni.rpc.tls import ServerTls, server_credentials

Servicer = TypeVar("Servicer")

_CHANNELZ: str = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name


class Health:
    """``grpc.health.v1``: which services take work. "" is the server as a whole."""

    def __init__(self, services: Sequence[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._unsaid = set(services)

    async def set_serving(self, service: str, serving: bool) -> None:
        """Says whether `service` takes work; watchers are told."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self._unsaid.discard(service)
        await self.servicer.set(service, status)

    async def begin(self) -> None:
        """Says "not serving" of each service that nothing was said of yet."""
        for service in tuple(self._unsaid):
            await self.set_serving(service, False)


class Server:
    """A gRPC server of the running event loop; made by `make_server`.

    Attributes:
        grpc: the server itself.
        health: what its health service says; services begin as not serving.
    """

    def __init__(self, server: grpc.aio.Server, tls: ServerTls | None, services: Sequence[str]) -> None:
        self.grpc = server
        self.health = Health(services)
        self._tls = tls

    def add(self, add_to_server: Callable[[Servicer, grpc.aio.Server], None], servicer: Servicer) -> None:
        """Serves `servicer`; `add_to_server` is the generated ``add_XServicer_to_server``."""
        add_to_server(servicer, self.grpc)

    async def start(self, address: str) -> int:
        """Listens on `address` ("host:port"; port 0: the system chooses) and returns the bound port.

        Raises:
            ListenError: when the address is taken or is none of this host.
            OSError: when a TLS file cannot be read.
        """
        check_free(address)
        try:
            if self._tls is None:
                port = self.grpc.add_insecure_port(address)
            else:
                port = self.grpc.add_secure_port(address, server_credentials(self._tls))
        except RuntimeError as error:
            raise ListenError(address, OSError(str(error))) from error
        await self.health.begin()
        await self.grpc.start()
        return port

    async def stop(self, grace: float | None = None) -> None:
        """Says "not serving", takes no new call, gives those that run `grace` seconds, then cancels them."""
        await self.health.servicer.enter_graceful_shutdown()
        await self.grpc.stop(grace)


def make_server(
    *,
    registry: CollectorRegistry,
    tls: ServerTls | None = None,
    service_names: Sequence[str] = (),
) -> Server:
    """A server with the interceptors, health, reflection, channelz, limits and keepalive that all of ours have.

    Args:
        registry: where the metrics of its calls go.
        tls: files to serve TLS with; None: plain text.
        service_names: full names of the services to be added, for reflection and health.
    """
    core = grpc.aio.server(
        interceptors=[CallInterceptor(RpcMetrics(registry))],
        options=server_options(),
    )
    server = Server(core, tls, service_names)
    health_pb2_grpc.add_HealthServicer_to_server(server.health.servicer, core)
    channelz.add_channelz_servicer(core)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, _CHANNELZ, reflection.SERVICE_NAME), core)
    return server
