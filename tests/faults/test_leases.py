"""Published tensors: whoever dies with them unread, they go back to their arena long before their leases end; and no
reader waits for room behind requests that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from omni.rpc.channel import make_channel
from omni.rpc.errors import OmniError, Reason
from omni.v1 import cluster_pb2, cluster_pb2_grpc, content_pb2, generate_pb2, generate_pb2_grpc, stage_pb2
from omni.v1.stage_pb2_grpc import StageServiceStub
from tests.faults.cluster import DEPLOY, Cluster, request, running, script

LONG_LEASES = DEPLOY.replace("lease: 3", "lease: 600")
ENDLESS = script(tokens=100000, rate=50)
AUDIO = (content_pb2.MODALITY_AUDIO,)


async def load_of(target: str, until: Callable[[stage_pb2.ReplicaLoad], bool]) -> stage_pb2.ReplicaLoad:
    """What the stage server at `target` says of its load, once that is as wanted."""
    async with make_channel(target) as channel, asyncio.timeout(20):
        while True:
            described = await StageServiceStub(channel).Describe(stage_pb2.DescribeRequest())
            if until(described.load):
                return described.load
            await asyncio.sleep(0.02)  # A stage tells nobody what its arena holds: it has to be asked.


def holds(load: stage_pb2.ReplicaLoad) -> bool:
    return load.arena.leases > 0


def holds_nothing(load: stage_pb2.ReplicaLoad) -> bool:
    return not (load.arena.leases or load.arena.used_bytes or load.running or load.waiting)


async def targets(coordinator: cluster_pb2_grpc.ClusterServiceStub) -> dict[str, str]:
    listed = await coordinator.ListReplicas(cluster_pb2.ListReplicasRequest())
    return {each.stage: each.address.target for each in listed.replicas}


async def until_heard(call: grpc.aio.UnaryStreamCall) -> None:
    """Reads until a request's last stage has output."""
    while not any(event.output.stage == "c" for event in (await call.read()).events):
        pass


async def until_made_after(call: grpc.aio.UnaryStreamCall, moment: int) -> None:
    """Reads until there is an output of the first stage whose stamp is later, by the monotonic clock in ns."""
    while not any(int(event.output.payload.text[-20:] or 0) > moment for event in (await call.read()).events):
        pass


async def test_what_a_killed_consumer_has_not_read_goes_back_with_its_request(tmp_path: Path) -> None:
    async with running(tmp_path, LONG_LEASES) as cluster, asyncio.timeout(60):
        at = await targets(cluster.membership)
        call = cluster.omni.Generate(request(a=ENDLESS))
        await until_heard(call)
        consumer = cluster.servers["c"]
        consumer.send_signal(signal.SIGSTOP)
        await load_of(at["b"], holds)
        consumer.kill()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert OmniError.from_rpc_error(failed.value).reason is Reason.REPLICA_LOST
        for stage in ("a", "b"):
            arena = (await load_of(at[stage], holds_nothing)).arena
            assert (arena.dropped_leases, arena.expired_leases) == (0, 0)
            assert arena.released_leases > 0


@contextlib.asynccontextmanager
async def own_coordinator(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A coordinator that can be killed, and its address."""
    (folder / "deploy.yaml").write_text(LONG_LEASES)
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omnid.cli", "serve", str(folder / "deploy.yaml"), "--grpc", "127.0.0.1:0"),
        *("--ready-fd", str(writing), "--log-level", "ERROR"),
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            yield process, json.loads(await asyncio.to_thread(ready.readline))["grpc"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_what_was_published_for_a_killed_coordinator_goes_back_with_its_streams(tmp_path: Path) -> None:
    servers: dict[str, asyncio.subprocess.Process] = {}
    async with asyncio.timeout(60), own_coordinator(tmp_path) as (coordinator, target), make_channel(target) as channel:
        try:
            for stage in "abc":
                servers[stage] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "stage_server.server", "--coordinator", target, "--model", "chain"),
                    *("--stage", stage, "--log-level", "ERROR"),
                )
            call = generate_pb2_grpc.OmniServiceStub(channel).Generate(request(a=ENDLESS), wait_for_ready=True)
            await until_heard(call)
            at = await targets(cluster_pb2_grpc.ClusterServiceStub(channel))
            servers["c"].send_signal(signal.SIGSTOP)
            await load_of(at["b"], holds)
            coordinator.kill()
            arena = (await load_of(at["b"], holds_nothing)).arena
            assert arena.dropped_leases > 0
            servers["c"].send_signal(signal.SIGCONT)
            for stage in "abc":
                assert (await load_of(at[stage], holds_nothing)).arena.expired_leases == 0
        finally:
            for server in servers.values():
                server.kill()
                await server.wait()


async def test_a_request_goes_on_though_those_that_wait_for_its_stage_fill_the_arena(tmp_path: Path) -> None:
    deploy = LONG_LEASES.replace("arena: 4MiB", "arena: 1MiB").replace("queue: 5, first_output: 4, gap: 2", "queue: 60")
    deploy += "    stages: {b: {max_running: 1, max_waiting: 0}}\n"
    async with running(tmp_path, deploy) as cluster, asyncio.timeout(60):
        at = await targets(cluster.membership)
        begun = cluster.omni.Generate(request(a=script(tokens=100000, rate=50, stamp=True)))
        await until_heard(begun)
        waiting = cluster.omni.Attach()
        # Large ones first, then what fits beside the tensor of the request that has begun, then some for its place.
        sizes = [*[256] * 20, *(128 >> n for n in range(8)), *[1] * 10]
        starts = [
            generate_pb2.RequestCommand(request=number, start=request(AUDIO, a=script(tokens=1, rows=rows)))
            for number, rows in enumerate(sizes, 1)
        ]
        await waiting.write(generate_pb2.OmniServiceAttachRequest(commands=starts))
        await load_of(at["a"], lambda load: load.arena.used_bytes >= 1 << 20)
        for _ in range(3):
            await until_made_after(begun, time.monotonic_ns())
        waiting.cancel()
        begun.cancel()
        loads = await cluster.drained()
        assert loads["a"].failed_runs == 0


@pytest.mark.parametrize("checksum", ["true", "false"])
async def test_a_deployment_says_whether_handles_carry_checksums(tmp_path: Path, checksum: str) -> None:
    async with running(tmp_path, DEPLOY + f"    checksum: {checksum}\n") as cluster, asyncio.timeout(30):
        async for _ in cluster.omni.Generate(request(a=script(tokens=3))):
            pass
        async with make_channel((await targets(cluster.membership))["a"]) as channel:
            start = stage_pb2.StartRun(request_id="r", tensors=["rows"], params=script(tokens=1))
            call = StageServiceStub(channel).Execute()
            await call.write(stage_pb2.ExecuteRequest(commands=[stage_pb2.RunCommand(start=start)]))
            handles = [
                named.handle
                for response in [await call.read() for _ in range(2)]
                for event in response.events
                for named in event.output.payload.tensors
            ]
            call.cancel()
        assert [handle.HasField("checksum") for handle in handles] == [checksum == "true"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_command_line_shows_what_replicas_hold_and_read(cluster: Cluster) -> None:
    call = cluster.omni.Generate(request(a=script(tokens=5, rate=1000)))
    async for _ in call:
        pass
    await cluster.drained()

    async def ps(*options: str) -> str:
        command = (sys.executable, "-m", "omnid.cli", "ps", "--target", cluster.target, *options)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert process.returncode == 0
        return said.decode()

    async with asyncio.timeout(30):
        while True:
            listed = {each["stage"]: each["load"] for each in json.loads(await ps("--json"))["replicas"]}
            if int(listed["b"]["arena"]["released_leases"]) and "host" in listed["c"]["fetched_bytes"]:
                break  # What a replica reports once a second has come.
    assert int(listed["c"]["fetched_bytes"]["host"]) >= 256
    assert listed["b"]["arena"]["used_bytes"] == "0"
    assert "chain/c/0" in (table := await ps("--data"))
    assert "host " in table
    assert "4.5 MiB" in table
