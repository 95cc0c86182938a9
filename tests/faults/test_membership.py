"""Coordinators and replicas that come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from omni.rpc.channel import make_channel
from omni.v1 import generate_pb2_grpc
from omnid.config import load_deploy, resolve
from omnid.daemon import Daemon
from tests.faults.cluster import DEPLOY, Cluster, request, script

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_second_process_takes_a_replicas_place_and_the_first_one_ends_saying_so(cluster: Cluster) -> None:
    first = cluster.servers["a"]
    await cluster.start("a")
    async with asyncio.timeout(20):
        assert await first.wait() == 1
    await cluster.ready()
    async with asyncio.timeout(10):
        call = cluster.omni.Generate(request(a=script(tokens=3)))
        assert [event async for response in call for event in response.events][-1].HasField("finished")


async def test_stage_servers_join_a_coordinator_that_was_restarted(tmp_path: Path) -> None:
    (tmp_path / "deploy.yaml").write_text(DEPLOY)
    pipelines = resolve(load_deploy(str(tmp_path / "deploy.yaml")))
    daemon = Daemon(pipelines, listen="127.0.0.1:0")
    target = (await daemon.start()).grpc
    servers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stage_server.server", "--coordinator", target, "--model", "chain"),
            *("--stage", stage, "--log-level", "ERROR"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for stage in ("a", "b", "c")
    ]
    try:
        await daemon.cluster.wait_ready(60)
        await daemon.stop()
        daemon = Daemon(pipelines, listen=target)
        await daemon.start()
        await daemon.cluster.wait_ready(30)
        async with make_channel(target) as channel, asyncio.timeout(20):
            call = generate_pb2_grpc.OmniServiceStub(channel).Generate(request(a=script(tokens=3)))
            assert [event async for response in call for event in response.events][-1].HasField("finished")
        assert all(server.returncode is None for server in servers)
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                server.terminate()
            assert await server.wait() == 0
        await daemon.stop()
