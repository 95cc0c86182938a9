"""What is left of a request: one span of its caller's trace, that the spans of its stages belong to, and a log line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import structlog
from coordinator_cluster import BOUND_S, Stage, cluster, handle, pipeline
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id

import omnid.metrics
from omni.rpc import context, tracing
from omni.rpc.errors import OmniError
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


def asked(**changes: Any) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(model="m", prompt=content_pb2.Prompt(text="hello"), **changes)


async def ended(call: Any) -> OmniError | None:
    """Reads a call to its end; its error, if it ended with one."""
    try:
        async with asyncio.timeout(BOUND_S):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return OmniError.from_rpc_error(error)
    return None


async def started(metadata: tuple[tuple[str, str], ...], *, fails: bool = False) -> list[str]:
    """Trace contexts that two stages are started with for one request."""

    def broken(stage: Stage, command: stage_pb2.RunCommand) -> None:
        if command.HasField("start"):
            stage.fail(command.run, "no")

    stages = Stage("a", one_token), Stage("b", broken if fails else one_token)
    async with cluster(pipeline("a", "b"), *stages) as up:
        error = await ended(up.stub.Generate(asked(client_request_id="mine"), metadata=metadata))
    assert (error is not None) is fails
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


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []

    def keep(_logger: Any, level: str, event: Any) -> Any:
        lines.append({**event, "level": level})
        raise structlog.DropEvent

    monkeypatch.setattr(omnid.metrics, "_log", structlog.wrap_logger(None, processors=[keep]))
    return lines


async def test_a_failed_request_is_logged_under_the_callers_own_id(logged: list[dict[str, Any]]) -> None:
    async with cluster(pipeline("a", first_output=0.1), Stage("a", lambda _stage, _command: None)) as up:
        error = await ended(up.stub.Generate(asked(client_request_id="mine")))
    assert error is not None
    ids = {"request_id": error.request_id, "client_request_id": "mine"}
    assert [line["event"] for line in logged if ids.items() <= line.items()] == ["request_failed"]


async def test_what_a_stage_says_of_a_run_that_is_over_is_counted_and_said_nowhere(
    logged: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage("a", one_token)
    async with cluster(pipeline("a"), stage) as up:
        assert await ended(up.stub.Generate(asked())) is None
        [over] = [command.run for command in stage.commands if command.HasField("start")]
        capsys.readouterr()
        stage.output(over, 1, handle(stage.replica, 77))
        stage.took(over, stage.replica, [78])
        stage.finish(over, 2)
        stage.fail(over, "too late")
        await stage.until(lambda: 77 in stage.released)
        assert await ended(up.stub.Generate(asked())) is None
        said = capsys.readouterr()
        registry = up.daemon.registry
        assert registry.get_sample_value("omni_fenced_events_total") == 4
        assert registry.get_sample_value("omni_requests_total", {"model": "m", "outcome": "OK"}) == 2
        assert up.daemon.orchestrator.idle
    assert {line["level"] for line in logged} == {"debug"}
    assert said.out + said.err == ""
