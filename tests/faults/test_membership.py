"""Coordinators and replicas that come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from omni.rpc.channel import make_channel
from omni.v1 import generate_pb2_grpc
from omnid.config import load_deploy, resolve
from omnid.daemon import Daemon
from omnid.services import cluster_service
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


async def test_a_stage_server_says_that_its_coordinator_is_away_and_joins_it_when_it_comes(tmp_path: Path) -> None:
    (tmp_path / "deploy.yaml").write_text(DEPLOY)
    pipelines = resolve(load_deploy(str(tmp_path / "deploy.yaml")))
    daemon = Daemon(pipelines, listen="127.0.0.1:0")
    target = (await daemon.start()).grpc
    await daemon.stop()
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stage_server.server", "--coordinator", target, "--model", "chain", "--stage", "a"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert server.stderr is not None
        async with asyncio.timeout(60):
            line = (await server.stderr.readline()).decode()
            assert "coordinator is away" in line
            assert target in line
            daemon = Daemon(pipelines, listen=target)
            await daemon.start()
            assert "ready" in (await server.stderr.readline()).decode(), "the same is not said again"
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.terminate()
        assert await server.wait() == 0
        await daemon.stop()


async def test_a_coordinator_that_stood_still_finds_the_reports_of_its_replicas(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_service, "REPORT_INTERVAL_S", 0.1)
    monkeypatch.setattr(cluster_service, "SILENCE_BOUND_S", 2.0)
    server = cluster.servers["a"]
    await cluster.start("a")
    async with asyncio.timeout(20):
        await server.wait()
    await cluster.ready()
    member = next(each for each in cluster.daemon.cluster.statuses() if each.stage == "a")
    time.sleep(2.5)  # noqa: ASYNC251 - nothing of the coordinator runs
    await asyncio.sleep(0.5)
    assert next(each for each in cluster.daemon.cluster.statuses() if each.stage == "a").joins == member.joins
    assert cluster.servers["a"].returncode is None


async def test_a_replica_that_was_given_up_as_silent_joins_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_service, "REPORT_INTERVAL_S", 0.1)
    monkeypatch.setattr(cluster_service, "SILENCE_BOUND_S", 2.0)
    monkeypatch.setattr(cluster_service, "SECOND_LOOK_S", 0.1)
    server = cluster.servers["b"]
    await cluster.start("b")
    async with asyncio.timeout(20):
        await server.wait()
    await cluster.ready()
    server = cluster.servers["b"]
    server.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(20):
        # It tells nobody that it has given a replica up.
        while any(each.stage == "b" and each.address.target for each in cluster.daemon.cluster.statuses()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    server.send_signal(signal.SIGCONT)
    await cluster.ready()
    async with asyncio.timeout(20):
        call = cluster.omni.Generate(request(a=script(tokens=3)))
        assert [event async for response in call for event in response.events][-1].HasField("finished")
    assert server.returncode is None
