"""Edges of mode `end` and companions on a real cluster: who runs, who waits, and what is read in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, content_pb2, generate_pb2
from tests.faults.cluster import Cluster, running, script

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIPELINE = """
name: guided
inputs: [text]
default_outputs: [text, audio]
stages:
  writer:
    kind: synthetic
    family: synthetic
    outputs: [text]
    companions: [{role: twin}, {role: unwanted, negative_prompt: true}]
  sketcher:
    kind: synthetic
    family: synthetic
  painter:
    kind: synthetic
    family: synthetic
    outputs: [audio]
edges:
  - {from: writer, to: painter, mode: end, tensors: [rows]}
  - {from: sketcher, to: painter, mode: end, tensors: [rows]}
"""
DEPLOY = """
models:
  - name: guided
    pipeline: ./guided.yaml
    arena: 4MiB
    bounds: {gap: 6}
"""
WRITTEN, SKETCHED = 100, 30
"""Outputs of the two producers, far more than may be on their way at once."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("guided")
    (folder / "guided.yaml").write_text(PIPELINE)
    async with running(folder, DEPLOY) as started:
        yield started


def request(
    writer: config_pb2.StageParams,
    sketcher: config_pb2.StageParams,
    *,
    negative: str = "",
    outputs: tuple[int, ...] = (),
) -> generate_pb2.GenerateRequest:
    if negative:
        writer.diffusion.negative_prompt = negative
    params = {"writer": writer, "sketcher": sketcher}
    return generate_pb2.GenerateRequest(
        model="guided", prompt=content_pb2.Prompt(text="go"), outputs=outputs, params=params
    )


async def events(cluster: Cluster, asked: generate_pb2.GenerateRequest) -> list[generate_pb2.RequestEvent]:
    async with asyncio.timeout(30):
        return [event async for response in cluster.omni.Generate(asked) for event in response.events]


def stages(finished: generate_pb2.RequestFinished) -> dict[str, generate_pb2.StageFinished]:
    return {stage.stage: stage for stage in finished.stages}


async def until(call: grpc.aio.UnaryStreamCall, kind: str) -> str:
    """Reads until the writer has shown an "output", or its end, "stage_finished"; returns the request's id."""
    request_id = ""
    async for response in call:
        for event in response.events:
            request_id = request_id or event.accepted.request_id
        if any(event.WhichOneof("event") == kind for event in response.events):
            return request_id
    raise AssertionError("the request ended")


async def at_work(cluster: Cluster) -> dict[str, int]:
    """Runs by stage, as each stage itself counts them."""
    return {stage: load.running + load.waiting for stage, load in (await cluster.loads()).items()}


@pytest.mark.parametrize(("negative", "writers"), [("", 2), ("a red circle", 3)], ids=["plain", "negative prompt"])
async def test_a_consumer_reads_every_row_of_all_its_producers_and_of_their_companions(
    cluster: Cluster, negative: str, writers: int
) -> None:
    found = await events(cluster, request(script(tokens=WRITTEN), script(tokens=SKETCHED, rate=300), negative=negative))
    ended = stages(found[-1].finished)
    assert ended["writer"].usage.completion_tokens == WRITTEN
    assert ended["sketcher"].usage.completion_tokens == SKETCHED
    assert ended["painter"].usage.prompt_tokens == writers * WRITTEN + SKETCHED
    loads = await cluster.drained()
    assert {stage: load.arena.used_bytes for stage, load in loads.items()} == dict.fromkeys(loads, 0)


async def test_the_client_sees_the_main_run_alone_then_what_was_made_of_all(cluster: Cluster) -> None:
    found = await events(
        cluster, request(script(tokens=WRITTEN), script(tokens=SKETCHED, rate=300), negative="a red circle")
    )
    assert [event.index for event in found] == list(range(len(found)))
    text = "".join(event.output.payload.text for event in found if event.output.stage == "writer")
    assert len(text) == WRITTEN * 4
    order = [event.output.stage or event.stage_finished.stage for event in found[1:-1]]
    assert set(order) == {"writer", "painter"}
    assert order == sorted(order, reverse=True), "the painter painted before the writer had ended"
    ended = stages(found[-1].finished)
    before = max(ended["writer"].timings.total, ended["sketcher"].timings.total)
    assert found[-1].finished.timings.total >= before + ended["painter"].timings.total


async def test_a_consumer_does_not_start_while_one_of_its_producers_is_at_work_and_a_cancel_reaches_every_role(
    cluster: Cluster,
) -> None:
    call = cluster.omni.Generate(
        request(script(tokens=WRITTEN), script(tokens=SKETCHED, stall_at=5), negative="a red circle")
    )
    request_id = await until(call, "stage_finished")
    running_now = await at_work(cluster)
    assert (running_now["sketcher"], running_now["painter"]) == (1, 0)
    answer = await cluster.omni.Cancel(generate_pb2.CancelRequest(request_id=request_id))
    assert all(run.acknowledged for run in answer.runs)
    assert {(run.stage, run.role) for run in answer.runs} == {
        ("writer", ""),
        ("writer", "twin"),
        ("writer", "unwanted"),
        ("sketcher", ""),
    }
    last = [event async for response in call for event in response.events][-1]
    assert last.finished.reason == content_pb2.FINISH_REASON_CANCELLED
    await cluster.drained()


async def test_companions_run_beside_the_main_run_and_end_with_it(cluster: Cluster) -> None:
    before = {stage: load.cancelled_runs for stage, load in (await cluster.drained()).items()}
    call = cluster.omni.Generate(
        request(script(tokens=100000, rate=50), script(tokens=SKETCHED, stall_at=5), negative="a red circle")
    )
    await until(call, "output")
    assert await at_work(cluster) == {"writer": 3, "sketcher": 1, "painter": 0}
    call.cancel()
    after = {stage: load.cancelled_runs for stage, load in (await cluster.drained()).items()}
    assert {stage: after[stage] - before[stage] for stage in after} == {"writer": 3, "sketcher": 1, "painter": 0}


async def test_a_producer_that_fails_ends_the_request_before_its_consumer_has_begun(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events(cluster, request(script(tokens=100000, rate=50), script(tokens=SKETCHED, fail_at=3)))
    error = OmniError.from_rpc_error(caught.value)
    assert (error.reason, error.stage) == (Reason.STAGE_FAILED, "sketcher")
    loads = await cluster.drained()
    assert loads["painter"].failed_runs == loads["painter"].cancelled_runs == 0


async def test_without_the_consumers_output_its_other_producers_do_not_run(cluster: Cluster) -> None:
    found = await events(
        cluster,
        request(script(tokens=8), script(), negative="a red circle", outputs=(content_pb2.MODALITY_TEXT,)),
    )
    assert stages(found[-1].finished).keys() == {"writer"}


async def test_rows_that_fill_the_arena_before_their_reader_starts_end_the_request_with_what_to_raise(
    cluster: Cluster,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events(cluster, request(script(tokens=WRITTEN, rows=1024), script(tokens=SKETCHED)))
    error = OmniError.from_rpc_error(caught.value)
    assert (error.reason, error.stage) == (Reason.ARENA_FULL, "writer")
    assert f"the arena's {4 << 20} bytes" in error.message
    assert "raise `arena` of stage writer" in error.message
    await cluster.drained()
    found = await events(cluster, request(script(tokens=WRITTEN), script(tokens=SKETCHED)))
    assert found[-1].HasField("finished")
