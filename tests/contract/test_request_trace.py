"""A request is one span of its caller's trace, and what its stages do belongs to that span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from coordinator_cluster import BOUND_S, Stage, cluster, pipeline
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id

from omni.rpc import context, tracing
from omni.v1 import content_pb2, generate_pb2, stage_pb2

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def one_token(stage: Stage, command: stage_pb2.RunCommand) -> None:
    if command.HasField("start"):
        stage.output(command.run, 0, content_pb2.Payload(text="x"))
        stage.finish(command.run, 1)


async def started(metadata: tuple[tuple[str, str], ...], *, fails: bool = False) -> list[str]:
    """Trace contexts that two stages are started with for one request."""

    def broken(stage: Stage, command: stage_pb2.RunCommand) -> None:
        if command.HasField("start"):
            stage.fail(command.run, "no")

    stages = Stage("a", one_token), Stage("b", broken if fails else one_token)
    async with cluster(pipeline("a", "b"), *stages) as up:
        asked = generate_pb2.GenerateRequest(model="m", prompt=content_pb2.Prompt(text="hello"))
        asked.client_request_id = "mine"
        call = up.stub.Generate(asked, metadata=metadata)
        try:
            async with asyncio.timeout(BOUND_S):
                async for _ in call:
                    pass
        except grpc.aio.AioRpcError:
            assert fails
    return [command.start.traceparent for each in stages for command in each.commands if command.HasField("start")]


def named(exported: InMemorySpanExporter, name: str) -> ReadableSpan:
    [found] = [span for span in exported.get_finished_spans() if span.name == name]
    return found


@pytest.mark.parametrize("fails", [False, True])
async def test_stages_get_the_requests_own_span_in_the_callers_trace(
    exported: InMemorySpanExporter, fails: bool
) -> None:
    given = await started(((context.TRACEPARENT_KEY, CALLER),), fails=fails)
    request, call = named(exported, "request"), named(exported, "/omni.v1.OmniService/Generate")
    assert request.context is not None and request.parent is not None and call.context is not None
    assert format_trace_id(request.context.trace_id) == CALLER.split("-")[1]
    assert request.parent.span_id == call.context.span_id
    own = f"00-{CALLER.split('-')[1]}-{format_span_id(request.context.span_id)}-01"
    assert given == [own, own]
    assert request.attributes is not None
    assert request.attributes["omni.client_request_id"] == "mine"
    assert request.attributes["omni.outcome"] == ("STAGE_FAILED" if fails else "OK")


async def test_without_an_exporter_stages_get_the_callers_context_as_it_is() -> None:
    assert await started(((context.TRACEPARENT_KEY, CALLER),)) == [CALLER, CALLER]
