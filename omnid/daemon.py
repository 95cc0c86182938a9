"""The coordinator daemon: everything composed, started and stopped in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from omni.rpc import logs
from omni.rpc.address import ListenError, split_address
from omni.rpc.metrics import MetricsServer, serve_metrics
from omni.rpc.server import Server, make_server
from omni.rpc.tls import TlsFiles
from omni.v1 import cluster_pb2, cluster_pb2_grpc, config_pb2, generate_pb2, generate_pb2_grpc
from omnid.alarm import Alarm
from omnid.cluster.attachment import Attachment
from omnid.cluster.door import Door
from omnid.cluster.membership import Cluster
from omnid.metrics import CoordinatorMetrics
from omnid.orchestrator.core import Orchestrator
from omnid.services.cluster_service import ClusterService
from omnid.services.desk import Desk
from omnid.services.omni_service import OmniService

OMNI_SERVICE = generate_pb2.DESCRIPTOR.services_by_name["OmniService"].full_name
CLUSTER_SERVICE = cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"].full_name

_LAST_WORDS_S = 0.2
"""For the last events of requests to be written."""

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class BoundAddresses:
    """Where a daemon listens, "host:port"; `metrics` is empty when they are not served."""

    grpc: str
    metrics: str
    door: Door
    """As stage servers find it."""


class Daemon:
    """One coordinator in the running event loop.

    Attributes:
        cluster: its replicas; `await daemon.cluster.wait_ready(timeout)`.
        orchestrator: its requests.
        registry: its metrics.
    """

    def __init__(
        self,
        pipelines: Sequence[config_pb2.ResolvedPipeline],
        *,
        listen: str,
        tls: TlsFiles | None = None,
        metrics_listen: str | None = None,
    ) -> None:
        """
        Args:
            pipelines: what to serve.
            listen: gRPC address, "host:port"; port 0: the system chooses.
            tls: files to serve and to call stage servers with; None: plain text.
            metrics_listen: address of the metrics page; None: it is not served.
        """
        self.registry = CollectorRegistry()
        self._listen = listen
        self._metrics_listen = metrics_listen
        self._tls = tls
        self._server: Server | None = None
        self._metrics_server: MetricsServer | None = None
        self._alarm = Alarm()
        clock = time.monotonic
        metrics = CoordinatorMetrics(self.registry)
        self.cluster = Cluster(pipelines)
        self.orchestrator = Orchestrator(self.cluster, metrics, self._alarm.earlier)
        self._desk = Desk(self.orchestrator, self.cluster, clock)
        self._attachment = Attachment(self.cluster, self.orchestrator, metrics, clock, tls.client() if tls else None)
        self._health_changed = asyncio.Event()
        self._health: asyncio.Task[None] | None = None

        def room(key: tuple[str, str]) -> None:
            self._desk.tick()
            self.orchestrator.room_on(key)

        self.cluster.on_room = room
        self.cluster.on_change = self._health_changed.set

    async def start(self) -> BoundAddresses:
        """Listens; answers health checks from here on. OmniService is healthy while every model is ready.

        Raises:
            ListenError: an address is taken, or is none of this host.
            OSError: a TLS file cannot be read.
        """
        server = self._server = make_server(
            registry=self.registry,
            tls=self._tls.server() if self._tls else None,
            service_names=(OMNI_SERVICE, CLUSTER_SERVICE),
        )
        server.add(generate_pb2_grpc.add_OmniServiceServicer_to_server, OmniService(self._desk))
        server.add(
            cluster_pb2_grpc.add_ClusterServiceServicer_to_server, ClusterService(self.cluster, self._attachment)
        )
        await server.health.set_serving(OMNI_SERVICE, serving=False)
        await server.health.set_serving(CLUSTER_SERVICE, serving=True)
        await server.health.set_serving("", serving=True)
        grpc = f"{self._listen.rpartition(':')[0]}:{await server.start(self._listen)}"
        door = self.cluster.door = Door(grpc, self._tls.arguments() if self._tls else ())
        metrics = ""
        if self._metrics_listen is not None:
            host, port = split_address(self._metrics_listen)
            try:
                self._metrics_server = await serve_metrics(host, port, self.registry)
            except OSError as error:
                await server.stop()
                raise ListenError(self._metrics_listen, error) from error
            metrics = f"{self._metrics_listen.rpartition(':')[0]}:{self._metrics_server.port}"
        self._alarm.watch(self.orchestrator)
        self._health = asyncio.create_task(self._follow_health(server), name="health")
        _log.info("listening", grpc=grpc, metrics=metrics)
        return BoundAddresses(grpc, metrics, door)

    async def drain(self, grace: float = 2.0) -> None:
        """Takes no new request, ends those at work, and gives their stages `grace` seconds to let go."""
        if self._server is not None:
            await self._server.health.set_serving(OMNI_SERVICE, serving=False)
        await self._desk.close(grace)

    async def stop(self, grace: float = 2.0) -> None:
        """Drains, then stops serving."""
        await self.drain(grace)
        if self._server is not None:
            await self._server.stop(_LAST_WORDS_S)
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)
        if self._metrics_server is not None:
            await self._metrics_server.close()
        self._alarm.stop()

    async def _follow_health(self, server: Server) -> None:
        serving = False
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            ready = all(self.cluster.ready(model) for model in self.cluster.pipelines)
            if ready != serving:
                serving = ready
                await server.health.set_serving(OMNI_SERVICE, serving=serving)
