"""An HTTP client that hangs up cancels its request on every stage, and nothing of it is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from omni.rpc.channel import make_channel
from omni.v1 import cluster_pb2, cluster_pb2_grpc, stage_pb2, stage_pb2_grpc

BODY = {
    "model": "tiny-omni",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "tiny", "format": "pcm16"},
    "sampling_params": {
        "thinker": {"min_tokens": 1500, "max_tokens": 1500},
        "talker": {"min_tokens": 1500, "max_tokens": 1500},
    },
}


Loads = dict[str, stage_pb2.ReplicaLoad]


async def loads(target: str) -> Loads:
    """What each stage server of the model says of itself, by stage."""
    found = {}
    async with make_channel(target) as channel:
        listed = await cluster_pb2_grpc.ClusterServiceStub(channel).ListReplicas(cluster_pb2.ListReplicasRequest())
    for each in listed.replicas:
        if each.model == "tiny-omni":
            async with make_channel(each.address.target) as channel:
                described = await stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest())
            found[each.stage] = described.load
    return found


async def until(target: str, holds: Callable[[Loads], bool]) -> Loads:
    """The loads when they are as wanted. A stage tells nobody: it has to be asked."""
    while True:
        found = await loads(target)
        if holds(found):
            return found
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("streamed", [True, False], ids=["in a stream", "before an answer"])
async def test_a_client_that_hangs_up_cancels_every_stage(demo, streamed: bool) -> None:
    before = await loads(demo.grpc)
    address = urlsplit(demo.http)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(BODY | {"stream": streamed}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(30):
        if streamed:
            while b'"audio"' not in await reader.readline():
                pass
        else:
            await until(demo.grpc, lambda found: found["code2wav"].running > 0)
        writer.transport.abort()
        after = await until(
            demo.grpc,
            lambda found: not any(load.running or load.waiting or load.arena.used_bytes for load in found.values()),
        )
    for stage, load in after.items():
        was = before[stage]
        assert (load.cancelled_runs, load.failed_runs, load.finished_runs) == (
            was.cancelled_runs + 1,
            was.failed_runs,
            was.finished_runs,
        ), stage
