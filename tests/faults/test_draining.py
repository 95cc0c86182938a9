"""A stage server that is told to stop finishes what it has: nobody loses a request to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest

from omni.rpc.errors import OmniError
from omni.v1 import content_pb2
from tests.faults.cluster import DEPLOY, Cluster, request, running, script

TEXT_AND_SOUND = (content_pb2.MODALITY_TEXT, content_pb2.MODALITY_AUDIO)


async def outcome(cluster: Cluster, tokens: int, working: asyncio.Event, **scripts: float) -> str:
    """How a request ends: "finished", or the reason of its failure."""
    asked = request(TEXT_AND_SOUND, a=script(tokens=tokens, rate=50, **scripts), b=script(rows=4))
    try:
        async for response in cluster.omni.Generate(asked):
            if any(event.output.stage == "c" for event in response.events):
                working.set()
            if response.events[-1].HasField("finished"):
                return "finished"
    except grpc.aio.AioRpcError as error:
        meant = OmniError.from_rpc_error(error)
        return f"{meant.reason}: {meant.message}"
    return "ended without an end"


@pytest.mark.parametrize("stage", ["a", "b", "c"])
async def test_requests_at_work_end_well_when_a_stage_is_told_to_stop(tmp_path: Path, stage: str) -> None:
    async with running(tmp_path, DEPLOY) as cluster:
        working = [asyncio.Event() for _ in range(20)]
        asked = [asyncio.create_task(outcome(cluster, 50, each, rows=16)) for each in working]
        async with asyncio.timeout(30):
            for each in working:
                await each.wait()
            cluster.servers[stage].terminate()
            assert Counter(await asyncio.gather(*asked)) == {"finished": 20}
            assert await cluster.servers[stage].wait() == 0


async def test_requests_that_arrive_while_a_replica_drains_go_to_another_one(tmp_path: Path) -> None:
    async with running(tmp_path, DEPLOY + "    stages: {a: {replicas: 2}}\n") as cluster:
        await cluster.start("a", 1)
        await cluster.ready_replica("chain/a/1")
        working = [asyncio.Event() for _ in range(8)]
        asked = [asyncio.create_task(outcome(cluster, 50, each)) for each in working]
        async with asyncio.timeout(30):
            for each in working:
                await each.wait()
            cluster.servers["a"].terminate()
            for _ in range(20):
                asked.append(asyncio.create_task(outcome(cluster, 3, asyncio.Event())))
                await asyncio.sleep(0.01)  # Some before the coordinator has been told, some after.
            assert Counter(await asyncio.gather(*asked)) == {"finished": 28}
            assert await cluster.servers["a"].wait() == 0


async def test_a_stage_with_runs_that_never_end_stops_within_its_bound(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        working = asyncio.Event()
        asked = asyncio.create_task(outcome(cluster, 100_000, working))
        async with asyncio.timeout(30):
            await working.wait()
            cluster.servers["b"].terminate()
            assert (await asked).startswith("DRAINING: ")
            assert await cluster.servers["b"].wait() == 0
