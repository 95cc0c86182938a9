"""A cancel, whatever its cause, reaches every stage, is acknowledged, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2, generate_pb2, stage_pb2
from tests.faults.cluster import Cluster, request, script

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = script(tokens=100000, rate=50)


async def until_all_stages_work(call: grpc.aio.UnaryStreamCall) -> str:
    """Reads until the last stage has output; returns the request's id."""
    request_id = ""
    async for response in call:
        for event in response.events:
            request_id = request_id or event.accepted.request_id
            if event.output.stage == "c":
                return request_id
    raise AssertionError("the request ended")


async def cancelled_runs(cluster: Cluster) -> dict[str, int]:
    return {stage: load.cancelled_runs for stage, load in (await cluster.drained()).items()}


async def test_a_cancel_is_acknowledged_by_every_stage(cluster: Cluster) -> None:
    before = await cancelled_runs(cluster)
    call = cluster.omni.Generate(request(a=LONG))
    request_id = await until_all_stages_work(call)
    answer = await cluster.omni.Cancel(generate_pb2.CancelRequest(request_id=request_id))
    assert answer.found
    assert {run.stage: run.acknowledged for run in answer.runs} == {"a": True, "b": True, "c": True}
    last = [event async for response in call for event in response.events][-1]
    assert last.finished.reason == content_pb2.FINISH_REASON_CANCELLED
    assert await cancelled_runs(cluster) == {stage: count + 1 for stage, count in before.items()}
    again = await cluster.omni.Cancel(generate_pb2.CancelRequest(request_id=request_id))
    assert not again.found


async def test_a_client_that_goes_away_cancels_its_request_on_every_stage(cluster: Cluster) -> None:
    before = await cancelled_runs(cluster)
    call = cluster.omni.Generate(request(a=LONG))
    await until_all_stages_work(call)
    call.cancel()
    assert await cancelled_runs(cluster) == {stage: count + 1 for stage, count in before.items()}


async def test_the_end_of_a_shared_stream_cancels_all_of_its_requests(cluster: Cluster) -> None:
    before = await cancelled_runs(cluster)
    call = cluster.omni.Attach()
    commands = [generate_pb2.RequestCommand(request=number, start=request(a=LONG)) for number in (1, 2)]
    await call.write(generate_pb2.OmniServiceAttachRequest(commands=commands))
    working: set[int] = set()
    async for response in call:
        working |= {event.request for event in response.events if event.output.stage == "c"}
        taken = [event.request for event in response.events if event.HasField("output")]
        await call.write(generate_pb2.OmniServiceAttachRequest(credits=taken))
        if working == {1, 2}:
            break
    call.cancel()
    assert await cancelled_runs(cluster) == {stage: count + 2 for stage, count in before.items()}


async def test_a_deadline_ends_the_request_on_every_stage(cluster: Cluster) -> None:
    await cluster.drained()
    call = cluster.omni.Generate(request(a=LONG), timeout=1.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.drained()


async def test_a_timeout_of_the_request_itself_fails_it(cluster: Cluster) -> None:
    asked = request(a=LONG)
    asked.timeout.FromMilliseconds(700)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in cluster.omni.Generate(asked):
            pass
    assert OmniError.from_rpc_error(caught.value).reason is Reason.DEADLINE
    await cluster.drained()


async def test_the_failure_of_one_stage_cancels_the_others(cluster: Cluster) -> None:
    before = await cancelled_runs(cluster)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in cluster.omni.Generate(request(a=LONG, c=script(fail_at=1))):
            pass
    after = await cancelled_runs(cluster)
    assert (after["a"], after["b"], after["c"]) == (before["a"] + 1, before["b"] + 1, before["c"])


@pytest.mark.parametrize("tokens", [100000, 3], ids=["of endless requests", "that cross the end of a request"])
async def test_a_thousand_cancels_at_random_moments_leave_nothing(cluster: Cluster, tokens: int) -> None:
    chance = random.Random(1)
    call = cluster.omni.Attach()
    writing = asyncio.Lock()
    ended: set[int] = set()
    total, batch = 1000, 50
    reasons = {content_pb2.FINISH_REASON_CANCELLED}
    if tokens < total:
        reasons.add(content_pb2.FINISH_REASON_STOP)

    async def write(message: generate_pb2.OmniServiceAttachRequest) -> None:
        async with writing:  # A call takes one write at a time.
            await call.write(message)

    async def drive() -> None:
        for first in range(1, total + 1, batch):
            numbers = range(first, first + batch)
            starts = [
                generate_pb2.RequestCommand(request=number, start=request(a=script(tokens=tokens, rate=500)))
                for number in numbers
            ]
            await write(generate_pb2.OmniServiceAttachRequest(commands=starts))
            for number in sorted(numbers, key=lambda _: chance.random()):
                # A random number of loop turns, and of events in between: cancels fall into every phase of a request.
                for _ in range(chance.randrange(12)):
                    await asyncio.sleep(0)
                cancel = generate_pb2.RequestCommand(request=number, cancel=generate_pb2.CancelReason(reason="test"))
                await write(generate_pb2.OmniServiceAttachRequest(commands=[cancel]))

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(drive())
        while len(ended) < total:
            response = await call.read()
            taken = []
            for event in response.events:
                if event.HasField("output"):
                    taken.append(event.request)
                elif event.HasField("finished") or event.HasField("failed"):
                    assert event.finished.reason in reasons, event
                    ended.add(event.request)
            if taken:
                await write(generate_pb2.OmniServiceAttachRequest(credits=taken))
    call.cancel()
    for load in (await cluster.drained()).values():
        assert load.state == stage_pb2.REPLICA_STATE_READY
        assert (load.arena.leases, load.running, load.waiting) == (0, 0, 0)
    assert cluster.daemon.orchestrator.idle
