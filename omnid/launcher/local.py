"""A whole cluster on this host: the coordinator in this process, stage servers and gateway as children."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from omni.rpc.address import check_free
from omni.rpc.tls import TlsFiles
from omni.v1 import config_pb2
from omnid.daemon import Daemon
from omnid.launcher.launcher import Launcher, failures
from omnid.launcher.plan import GATEWAY, ProcessPlan, plan_stages


@dataclass(slots=True)
class LocalCluster:
    """Where a running cluster is reached."""

    daemon: Daemon
    launcher: Launcher
    grpc: str
    """The coordinator's address."""
    metrics: str
    http: str = ""
    """The gateway's address, "host:port"; empty while there is none."""
    waits_for: tuple[str, ...] = ()
    """Commands to run on other hosts for the replicas that belong there."""
    _serving: asyncio.Event = field(default_factory=asyncio.Event)

    async def ready(self, timeout: float) -> None:
        """Returns when every stage and the gateway serve.

        Raises:
            OmniError: NO_REPLICA after `timeout` seconds, with what is missing.
            TimeoutError: when the gateway does not serve by then.
        """
        await self.daemon.cluster.wait_ready(timeout)
        try:
            await asyncio.wait_for(self._serving.wait(), timeout)
        except TimeoutError:
            raise TimeoutError(f"the gateway does not serve after {timeout:g} s") from None
        self.launcher.settled = True

    def gateway_serves(self, address: str) -> None:
        """The gateway serves at `address`; "" when there is none."""
        self.http = address
        self._serving.set()


@contextlib.asynccontextmanager
async def local_cluster(
    pipelines: Sequence[config_pb2.ResolvedPipeline],
    *,
    grpc: str,
    http: str | None,
    metrics: str | None = None,
    tls: TlsFiles | None = None,
    logs: Sequence[str] = (),
    echo: Callable[[str], None] | None = None,
) -> AsyncIterator[LocalCluster]:
    """Starts a cluster and stops it at the end of the block.

    Args:
        pipelines: what to serve.
        grpc: the coordinator's address; port 0: the system chooses.
        http: the gateway's; None: no gateway.
        metrics: the coordinator's metrics page; None: not served.
        tls: files with which all of its processes speak mutual TLS; None: plain text.
        logs: options of the children that say how they log.
        echo: takes each line that a child prints; None: it goes to stderr.

    Raises:
        ProcessFailedError: when a process ends before it was ever ready, with its last words.
        ListenError: when an address is taken, or is none of this host.
    """
    if http is not None:  # The gateway would say so too, when everything else has been started.
        check_free(http)
    daemon = Daemon(pipelines, listen=grpc, tls=tls, metrics_listen=metrics)
    bound = await daemon.start()
    plan = plan_stages(pipelines, bound.door, logs)
    gateway = None if http is None else _gateway(bound.grpc, http, (*bound.door.tls, *logs))
    launcher = Launcher(plan, daemon.cluster.has_been_ready, echo)
    cluster = LocalCluster(daemon, launcher, bound.grpc, bound.metrics, waits_for=plan.elsewhere)

    if gateway is None:
        cluster.gateway_serves("")
    failed: BaseExceptionGroup[BaseException] | None = None
    try:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(launcher.run(gateway, cluster.gateway_serves))
                yield cluster
                await daemon.drain()
                running.cancel()
        except BaseExceptionGroup as group:
            failed = group
    finally:
        await daemon.stop()
    if failed is not None:
        if ended := failures(failed):
            raise ended[0] from None
        raise failed.exceptions[0] if len(failed.exceptions) == 1 else failed


def _gateway(coordinator: str, http: str, further: tuple[str, ...]) -> ProcessPlan:
    arguments = ("--coordinator", coordinator, "--listen", http, "--ready-fd", "3", *further)
    return ProcessPlan("gateway", GATEWAY, arguments)
