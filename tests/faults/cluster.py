"""A cluster of synthetic stages: the coordinator in the test's own loop, each stage server a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from google.protobuf import struct_pb2

from omni.rpc.channel import make_channel
from omni.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    config_pb2,
    content_pb2,
    generate_pb2,
    generate_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
)
from omnid.config import load_deploy, resolve
from omnid.daemon import Daemon

READY_SECONDS = 60
DEPLOY = """
models:
  - name: chain
    pipeline: synthetic
    arena: 4MiB
    lease: 3  # What a lost message has published comes back only so.
    bounds: {queue: 5, first_output: 4, gap: 2, cancel: 2, total: 60}
    max_requests: 2048
"""


class Cluster:
    """The coordinator's client side, and the stage servers by name of the stage."""

    def __init__(self, daemon: Daemon, target: str, model: str, channel: grpc.aio.Channel) -> None:
        self.daemon = daemon
        self.target = target
        self.model = model
        self.omni = generate_pb2_grpc.OmniServiceStub(channel)
        self.membership = cluster_pb2_grpc.ClusterServiceStub(channel)
        self.servers: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, stage: str, index: int = 0) -> None:
        """Starts the stage's server; the one before must have ended. A further replica is "a/1" among the servers."""
        self.servers[f"{stage}/{index}" if index else stage] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stage_server.server", "--coordinator", self.target),
            *("--model", self.model, "--stage", stage, "--index", str(index), "--log-level", "WARNING"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    async def ready(self) -> None:
        await self.daemon.cluster.wait_ready(READY_SECONDS)

    async def ready_replica(self, name: str) -> None:
        """Waits for one replica of several, which `ready` does not."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                if self.daemon.cluster.has_been_ready(name):
                    return
                await asyncio.sleep(0.02)  # Nobody is told of a single replica: it has to be asked.

    def kill(self, stage: str) -> None:
        self.servers[stage].send_signal(signal.SIGKILL)

    async def loads(self) -> dict[str, stage_pb2.ReplicaLoad]:
        """What each stage server itself says of its load just now."""
        answer = await self.membership.ListReplicas(cluster_pb2.ListReplicasRequest())
        found: dict[str, stage_pb2.ReplicaLoad] = {}
        for each in answer.replicas:
            async with make_channel(each.address.target) as channel:
                described = await stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest())
                found[each.stage] = described.load
        return found

    async def drained(self) -> dict[str, stage_pb2.ReplicaLoad]:
        """Returns the loads when no replica has a run or a published tensor."""
        async with asyncio.timeout(10):
            while True:
                loads = await self.loads()
                if not any(load.running or load.waiting or load.arena.used_bytes for load in loads.values()):
                    return loads
                await asyncio.sleep(0.02)  # A stage tells nobody that its arena is empty: it has to be asked.


def script(**values: float | bool) -> config_pb2.StageParams:
    """Parameters of a synthetic stage."""
    extra = struct_pb2.Struct()
    extra.update(values)
    return config_pb2.StageParams(extra=extra)


def request(
    outputs: tuple[int, ...] = (content_pb2.MODALITY_TEXT, content_pb2.MODALITY_AUDIO),
    **params: config_pb2.StageParams,
) -> generate_pb2.GenerateRequest:
    """A request for the chain, with a script for each stage that is named."""
    return generate_pb2.GenerateRequest(
        model="chain", prompt=content_pb2.Prompt(text="go"), outputs=outputs, params=params
    )


@contextlib.asynccontextmanager
async def running(folder: Path, deploy: str = DEPLOY) -> AsyncIterator[Cluster]:
    """A cluster of one replica for each stage of the deployment's only model, stopped at the end."""
    path = folder / "deploy.yaml"
    path.write_text(deploy)
    (pipeline,) = resolve(load_deploy(str(path)))
    daemon = Daemon([pipeline], listen="127.0.0.1:0")
    bound = await daemon.start()
    cluster = None
    try:
        async with make_channel(bound.grpc) as channel:
            cluster = Cluster(daemon, bound.grpc, pipeline.model, channel)
            for spec in pipeline.stages:
                await cluster.start(spec.stage)
            await cluster.ready()
            yield cluster
    finally:
        for server in cluster.servers.values() if cluster else ():
            with contextlib.suppress(ProcessLookupError):
                server.kill()
            await server.wait()
        await daemon.stop()
