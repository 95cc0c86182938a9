"""The coordinator daemon: composes cluster, orchestrator and services into one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from omni.rpc import logs
from omni.rpc.metrics import MetricsServer, serve_metrics
from omni.rpc.server import Server, make_server
from omni.rpc.tls import ClientTls, ServerTls
from omni.v1 import cluster_pb2_grpc, config_pb2, generate_pb2_grpc
from omnid.cluster.cluster import Cluster
from omnid.orchestrator.observer import Observer
from omnid.orchestrator.orchestrator import Orchestrator
from omnid.orchestrator.plan import Pipeline
from omnid.services.cluster import ClusterServicer
from omnid.services.omni import OmniServicer

OMNI = "omni.v1.OmniService"
CLUSTER = "omni.v1.ClusterService"
_STOP_SECONDS = 5.0

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class BoundAddresses:
    """Where a daemon listens, "host:port"; `metrics` is empty when it does not serve any."""

    grpc: str
    metrics: str = ""


class _LoopClock:
    """The event loop's clock with the one timer of an orchestrator; implements `orchestrator.Clock`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.orchestrator: Orchestrator | None = None

    def now(self) -> float:
        return time.monotonic()  # the loop's own time may be rounded to milliseconds

    def wake_at(self, due: float) -> None:
        self.stop()
        self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._expire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        if self.orchestrator is not None:
            self.orchestrator.expire()


class Daemon:
    """A coordinator for the given pipelines. Made and used within a running event loop."""

    def __init__(
        self,
        pipelines: Sequence[config_pb2.ResolvedPipeline],
        *,
        listen: str,
        tls: ServerTls | None = None,
        stage_tls: ClientTls | None = None,
        metrics_listen: str | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.cluster = Cluster(pipelines)
        self._clock = _LoopClock()
        self.orchestrator = self._clock.orchestrator = Orchestrator(
            [Pipeline.of(each) for each in pipelines], self.cluster, self._clock, Observer(self.registry)
        )
        self.cluster.on_up = self.orchestrator.replica_up
        self.cluster.on_down = self.orchestrator.replica_down
        self._listen = listen
        self._metrics_listen = metrics_listen
        self._metrics: MetricsServer | None = None
        self._server: Server = make_server(registry=self.registry, tls=tls, service_names=(OMNI, CLUSTER))
        self._server.add(
            generate_pb2_grpc.add_OmniServiceServicer_to_server, OmniServicer(self.orchestrator, self.cluster)
        )
        self._server.add(
            cluster_pb2_grpc.add_ClusterServiceServicer_to_server,
            ClusterServicer(self.cluster, self.orchestrator, stage_tls),
        )

    async def start(self) -> BoundAddresses:
        """Binds and serves.

        Raises:
            OSError: when an address is taken.
        """
        port = await self._server.start(self._listen)
        metrics = ""
        if self._metrics_listen is not None:
            host, _, wanted = self._metrics_listen.rpartition(":")
            self._metrics = await serve_metrics(host, int(wanted), self.registry)
            metrics = f"{host}:{self._metrics.port}"
        for service in ("", OMNI, CLUSTER):
            await self._server.health.set_serving(service, True)
        return BoundAddresses(grpc=f"{self._listen.rpartition(':')[0]}:{port}", metrics=metrics)

    async def stop(self) -> None:
        """Cancels every request, waits a bounded time for the stages to let go, then stops serving."""
        self.orchestrator.cancel_all("the coordinator stops")
        await self._server.stop(_STOP_SECONDS if not self.orchestrator.idle else 0.5)
        self._clock.stop()
        if self._metrics is not None:
            await self._metrics.close()
