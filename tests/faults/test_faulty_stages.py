"""A chunk lost, doubled or late, a short count, a stall, a failure, a kill: the request ends with the right status and
the stage's name, within its bound, and the next request succeeds.
"""

from __future__ import annotations

import asyncio

import grpc
import pytest

from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2, generate_pb2
from tests.faults.cluster import Cluster, request, script

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = script(tokens=1000, rate=50)


async def events(cluster: Cluster, asked: generate_pb2.GenerateRequest) -> list[generate_pb2.RequestEvent]:
    found: list[generate_pb2.RequestEvent] = []
    async with asyncio.timeout(20):
        async for response in cluster.omni.Generate(asked):
            found.extend(response.events)
    return found


async def failure(cluster: Cluster, asked: generate_pb2.GenerateRequest) -> OmniError:
    """How the request fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events(cluster, asked)
    return OmniError.from_rpc_error(caught.value)


async def check_health(cluster: Cluster) -> None:
    """The next request succeeds, and nothing of the one before is left."""
    await cluster.ready()
    found = await events(cluster, request(a=script(tokens=8, rate=200)))
    assert found[-1].finished.reason == content_pb2.FINISH_REASON_STOP
    await cluster.drained()


async def test_events_are_in_one_total_order_without_a_gap(cluster: Cluster) -> None:
    found = await events(cluster, request(a=script(tokens=20, rate=200)))
    assert [event.index for event in found] == list(range(len(found)))
    assert found[0].HasField("accepted")
    assert found[-1].HasField("finished")
    text = "".join(event.output.payload.text for event in found if event.output.stage == "a")
    assert len(text) == 20 * 4
    sound = [piece for event in found if event.output.stage == "c" for piece in event.output.payload.media]
    assert sound
    assert sum(piece.samples for piece in sound) == found[-1].finished.stages[-1].usage.audio_samples


@pytest.mark.parametrize(
    ("stage", "edge", "faults", "reason"),
    [
        ("a", "a->b", {"lose_at": 3}, Reason.SEQUENCE_BROKEN),
        ("a", "a->b", {"double_at": 3}, Reason.SEQUENCE_BROKEN),
        ("b", "b->c", {"lose_at": 1}, Reason.SEQUENCE_BROKEN),
        ("b", "b->c", {"double_at": 1}, Reason.SEQUENCE_BROKEN),
        ("a", "a->b", {"short_by": 1}, Reason.COUNT_MISMATCH),
        ("c", "c->client", {"lose_at": 1}, Reason.SEQUENCE_BROKEN),
    ],
)
async def test_a_chunk_lost_doubled_or_uncounted_fails_the_request_and_names_the_edge(
    cluster: Cluster, stage: str, edge: str, faults: dict[str, float], reason: Reason
) -> None:
    scripts = {"a": {"tokens": 10, "rate": 100}, "b": {}, "c": {}}
    scripts[stage] |= faults
    error = await failure(cluster, request(**{name: script(**values) for name, values in scripts.items()}))
    assert error.reason is reason
    assert error.stage == stage
    assert edge in error.message
    await check_health(cluster)


async def test_a_late_chunk_within_the_gap_bound_is_no_failure(cluster: Cluster) -> None:
    found = await events(cluster, request(a=script(tokens=6, rate=100, delay_at=3, delay=0.5)))
    assert found[-1].HasField("finished")


async def test_a_chunk_later_than_the_gap_bound_fails_the_request_with_stage_and_bound(cluster: Cluster) -> None:
    error = await failure(cluster, request(a=script(tokens=6, rate=100, delay_at=3, delay=30)))
    assert error.reason is Reason.STAGE_TIMEOUT
    assert (error.stage, "gap" in error.message) == ("a", True)
    await check_health(cluster)


@pytest.mark.parametrize(("at", "bound"), [(0, "first_output"), (4, "gap")])
async def test_a_stalled_stage_fails_the_request_within_its_bound(cluster: Cluster, at: int, bound: str) -> None:
    error = await failure(cluster, request(a=script(tokens=10, rate=100, stall_at=at)))
    assert error.reason is Reason.STAGE_TIMEOUT
    assert (error.stage, bound in error.message) == ("a", True)
    await check_health(cluster)


async def test_a_stage_that_fails_ends_the_request_and_names_itself(cluster: Cluster) -> None:
    error = await failure(cluster, request(a=LONG, b=script(fail_at=2)))
    assert error.reason is Reason.STAGE_FAILED
    assert (error.stage, error.replica) == ("b", "chain/b/0")
    assert error.request_id
    await check_health(cluster)


@pytest.mark.parametrize("stage", ["a", "b", "c"])
async def test_a_killed_stage_fails_its_requests_and_serves_again_when_it_is_back(cluster: Cluster, stage: str) -> None:
    async def kill_when_it_runs() -> OmniError:
        call = cluster.omni.Generate(request(a=LONG))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in call:
                if any(event.output.stage == "c" for event in response.events):
                    cluster.kill(stage)
        return OmniError.from_rpc_error(caught.value)

    async with asyncio.timeout(20):
        error = await kill_when_it_runs()
    assert error.reason is Reason.REPLICA_LOST
    assert error.stage == stage
    assert await cluster.servers[stage].wait() == -9
    await cluster.start(stage)
    await check_health(cluster)


async def test_a_stage_that_kills_itself_in_a_step_takes_only_its_own_requests_with_it(cluster: Cluster) -> None:
    text = (content_pb2.MODALITY_TEXT,)
    other = asyncio.create_task(events(cluster, request(text, a=script(tokens=60, rate=30))))
    error = await failure(cluster, request(a=LONG, c=script(crash_at=1)))
    assert (error.reason, error.stage) == (Reason.REPLICA_LOST, "c")
    assert (await other)[-1].HasField("finished")
    assert await cluster.servers["c"].wait() == -9
    await cluster.start("c")
    await check_health(cluster)


async def test_a_request_waits_for_a_replica_and_fails_with_the_queue_bound_when_none_comes(cluster: Cluster) -> None:
    cluster.kill("b")
    await cluster.servers["b"].wait()
    error = await failure(cluster, request(a=script(tokens=3, rate=100)))
    assert error.reason in (Reason.NO_REPLICA, Reason.REPLICA_LOST)
    assert error.stage == "b"
    waiting = asyncio.create_task(events(cluster, request(a=script(tokens=3, rate=100))))
    await cluster.start("b")
    assert (await waiting)[-1].HasField("finished")
    await check_health(cluster)
