"""omni.v1.ClusterService: how stage servers join."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.rpc.validation import validate
from omni.v1 import cluster_pb2, cluster_pb2_grpc
from omnid.cluster.attachment import Attachment
from omnid.cluster.member import Member
from omnid.cluster.membership import Cluster

REPORT_INTERVAL_S = 1.0
"""What replicas are asked for."""

HELLO_BOUND_S = 10.0
"""From the begin of a Join stream to its hello."""

SILENCE_BOUND_S = 30.0
"""Without a report for this long the replica counts as gone; long enough for a process that is busy loading a model."""

SECOND_LOOK_S = 2.0


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Translates between the service and the cluster: a membership lasts as long as its call."""

    def __init__(self, cluster: Cluster, attachment: Attachment) -> None:
        self._cluster = cluster
        self._attachment = attachment

    async def Join(  # type: ignore[override]  # It writes its responses itself.
        self, request_iterator: AsyncIterator[cluster_pb2.JoinRequest], context: Any
    ) -> None:
        messages = aiter(request_iterator)
        try:
            async with asyncio.timeout(HELLO_BOUND_S):
                first = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise OmniError(Reason.DEADLINE, f"no hello within {HELLO_BOUND_S:g} s") from error
        validate(first)
        if not first.HasField("hello"):
            raise invalid(FieldViolation("hello", "must be in the first message of a Join stream"))
        member = self._cluster.enter(first.hello)
        try:
            await context.write(cluster_pb2.JoinResponse(spec=member.spec, report_interval=REPORT_INTERVAL_S))
            async with asyncio.TaskGroup() as group:
                kept = group.create_task(self._attachment.keep(member))
                watch = group.create_task(_until_replaced(member))
                await self._reports(member, messages)
                await self._attachment.read_out(member)
                kept.cancel()
                watch.cancel()
        finally:
            self._cluster.leave(member)

    async def ListReplicas(
        self, request: cluster_pb2.ListReplicasRequest, context: Any
    ) -> cluster_pb2.ListReplicasResponse:
        return cluster_pb2.ListReplicasResponse(replicas=self._cluster.statuses())

    async def _reports(self, member: Member, messages: AsyncIterator[cluster_pb2.JoinRequest]) -> None:
        while True:
            reading = asyncio.ensure_future(anext(messages))
            try:
                # When it is us who stood still, a second look finds what came meanwhile.
                for bound in (SILENCE_BOUND_S, SECOND_LOOK_S):
                    done, _ = await asyncio.wait([reading], timeout=bound)
                    if done:
                        break
                else:
                    text = f"{member.name} sent no report for {SILENCE_BOUND_S:g} s"
                    raise OmniError(Reason.DEADLINE, text, replica=member.name)
                message = reading.result()
            except StopAsyncIteration:
                return
            finally:
                reading.cancel()
            validate(message)
            if message.HasField("load"):
                self._cluster.report(member, message.load)


async def _until_replaced(member: Member) -> None:
    await member.replaced.wait()
    text = f"another process has joined as {member.name}: this one is no longer a replica"
    raise OmniError(Reason.REPLACED, text, replica=member.name)
