"""ClusterService: replicas join, and anybody may ask which there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from omni.rpc import logs
from omni.rpc.errors import OmniError, Reason
from omni.rpc.tls import ClientTls
from omni.rpc.validation import validate
from omni.v1 import cluster_pb2, cluster_pb2_grpc
from omnid.cluster.cluster import REPORT_SECONDS, Cluster, Member
from omnid.cluster.link import Link
from omnid.orchestrator.orchestrator import Orchestrator

_log = logs.get(__name__)

_HELLO_SECONDS = 10.0


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """Translates between Join streams and the cluster. A Join call's task owns the replica's link."""

    def __init__(self, cluster: Cluster, orchestrator: Orchestrator, tls: ClientTls | None) -> None:
        self._cluster = cluster
        self._orchestrator = orchestrator
        self._tls = tls

    async def Join(  # type: ignore[override] # writes its stream itself, which the stubs do not know
        self,
        request_iterator: AsyncIterator[cluster_pb2.JoinRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                first = await anext(aiter(request_iterator))
        except (TimeoutError, StopAsyncIteration):
            raise OmniError(
                Reason.BAD_REQUEST, f"hello: must be the first message, within {_HELLO_SECONDS:g} s"
            ) from None
        validate(first)
        if not first.HasField("hello"):
            raise OmniError(Reason.BAD_REQUEST, "hello: must be the first message of a Join stream")
        member = self._cluster.admit(first.hello)
        _log.info("replica joined", replica=member.name, pid=first.hello.pid, target=first.hello.address.target)
        try:
            await context.write(cluster_pb2.JoinResponse(spec=member.spec, report_interval=REPORT_SECONDS))
            async with asyncio.TaskGroup() as group:
                link: asyncio.Task[None] | None = None
                async for message in request_iterator:
                    if message.HasField("load"):
                        self._cluster.reported(member, message.load)
                        if link is None:
                            link = group.create_task(self._hold(member, first.hello))
                if link is not None:
                    link.cancel()
        except* (grpc.aio.AioRpcError, OmniError) as broken:
            _log.warning("stream to replica broke", replica=member.name, error=str(broken.exceptions[0]))
            raise OmniError(Reason.UNREACHABLE, f"the stream to {member.name} broke") from broken
        finally:
            _log.info("replica left", replica=member.name)
            self._cluster.left(member)

    async def _hold(self, member: Member, hello: cluster_pb2.ReplicaHello) -> None:
        """Holds the Attach stream to the replica; when it breaks, so does the Join stream."""
        link = Link(hello.address, self._tls)
        await link.run(lambda: self._cluster.connected(member, link), self._orchestrator.receive)
        raise OmniError(Reason.UNREACHABLE, f"{member.name} has ended its stream")

    async def ListReplicas(
        self, request: cluster_pb2.ListReplicasRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.ListReplicasResponse:
        return cluster_pb2.ListReplicasResponse(replicas=[member.status() for member in self._cluster])
