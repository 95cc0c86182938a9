"""Health is progress, judged by the stage itself: who is stuck says so, who waits for another does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni.rpc.channel import make_channel
from omni.v1 import cluster_pb2
from tests.faults.cluster import DEPLOY, Cluster, request, running, script

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def targets(cluster: Cluster) -> dict[str, str]:
    listed = await cluster.membership.ListReplicas(cluster_pb2.ListReplicasRequest())
    return {each.stage: each.address.target for each in listed.replicas}


@pytest.mark.parametrize("service", ["", "omni.v1.StageService"])
async def test_a_stuck_stage_says_so_until_it_goes_on_and_one_that_waits_for_it_is_well(
    tmp_path: Path, service: str
) -> None:
    deploy = DEPLOY.replace("gap: 2", "gap: 4").replace("lease: 3", "stall: 1")
    async with running(tmp_path, deploy) as cluster, asyncio.timeout(30):
        at = await targets(cluster)
        asked = health_pb2.HealthCheckRequest(service=service)
        async with make_channel(at["a"]) as stuck, make_channel(at["b"]) as waits:
            said = health_pb2_grpc.HealthStub(stuck).Watch(asked)
            assert (await said.read()).status == SERVING
            call = cluster.omni.Generate(request(a=script(tokens=10, rate=100, stall_at=3)))
            assert (await said.read()).status == NOT_SERVING
            [status] = [each for each in cluster.daemon.cluster.statuses() if each.stage == "b"]
            assert (await health_pb2_grpc.HealthStub(waits).Check(asked)).status == SERVING
            assert status.load.running == 1
            call.cancel()
            assert (await said.read()).status == SERVING
            said.cancel()
