"""Logs carry the request id, metrics can be read over HTTP, spans reach a collector."""

import asyncio
import contextlib
import io
import json
import logging

import grpc
import httpx
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from omni.rpc import context, logs, tracing
from omni.rpc.metrics import serve_metrics

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def logging_restored():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]
    structlog.reset_defaults()


@pytest.mark.usefixtures("logging_restored")
def test_json_logs_carry_the_request_id_and_no_variables():
    stream = io.StringIO()
    logs.configure("json", "info", stream, replica="m/thinker/0")
    prompt = "my secret question"
    with context.bound(request_id="req-1"):
        try:
            raise ValueError(len(prompt))
        except ValueError:
            logs.get("omni.test").exception("step_failed", step=3)
        logging.getLogger("somebody.else").warning("plain %s", "words")
    logging.getLogger("somebody.else").info("outside")
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert {**first, **{"event": "step_failed", "step": 3, "request_id": "req-1", "replica": "m/thinker/0"}} == first
    assert first["exception"][0]["exc_type"] == "ValueError"
    assert prompt not in stream.getvalue()
    assert (second["event"], second["request_id"], second["level"]) == ("plain words", "req-1", "warning")
    assert "request_id" not in third


@pytest.mark.usefixtures("logging_restored")
def test_console_logs_are_lines_for_people():
    stream = io.StringIO()
    logs.configure("console", "WARNING", stream)
    logs.get("omni.test").info("not_shown")
    logs.get("omni.test").warning("queue_full", waiting=64)
    assert "queue_full" in stream.getvalue()
    assert "waiting=64" in stream.getvalue()
    assert "not_shown" not in stream.getvalue()


async def test_metrics_can_be_read_and_nothing_else():
    registry = CollectorRegistry()
    Counter("omni_things", "Things", registry=registry).inc(3)
    async with await serve_metrics("127.0.0.1", 0, registry) as server, httpx.AsyncClient() as client:
        base = f"http://127.0.0.1:{server.port}"
        assert "omni_things_total 3.0" in (await client.get(f"{base}/metrics")).text
        assert (await client.head(f"{base}/metrics?x=1")).status_code == 200
        assert (await client.get(f"{base}/")).status_code == 404
        assert (await client.post(f"{base}/metrics")).status_code == 405


async def test_a_silent_reader_of_metrics_does_not_hold_up_the_end():
    server = await serve_metrics("127.0.0.1", 0, CollectorRegistry())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /metr")
    await writer.drain()
    async with httpx.AsyncClient() as client:  # by now the first connection has been taken too
        assert (await client.get(f"http://127.0.0.1:{server.port}/metrics")).status_code == 200
    await asyncio.wait_for(server.close(), 5)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


@pytest.mark.parametrize(
    "bad", ["", "00-0-0-01", TRACE.upper(), "01" + TRACE[2:], f"00-{'0' * 32}-b7ad6b7169203331-01"]
)
def test_only_a_w3c_trace_context_is_taken_over(bad: str):
    assert context.valid_traceparent(TRACE)
    assert not context.valid_traceparent(bad)


def test_without_an_exporter_spans_change_nothing(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert not tracing.configure("omnid")
    with context.bound(traceparent=TRACE), tracing.span("request"):
        assert context.traceparent() == TRACE


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    async def Export(self, request, _context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_a_collector_under_the_callers_trace(monkeypatch):
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    assert tracing.configure("omnid", replica="m/thinker/0")
    with context.bound(traceparent=TRACE), tracing.span("request"):
        outer = context.traceparent()
        with tracing.span("run thinker"):
            inner = context.traceparent()
    await asyncio.to_thread(tracing.shutdown)
    await server.stop(0)

    [resource] = [each for request in collector.requests for each in request.resource_spans]
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert {key.key: key.value.string_value for key in resource.resource.attributes}["service.name"] == "omnid"
    trace, caller = bytes.fromhex(TRACE.split("-")[1]), bytes.fromhex(TRACE.split("-")[2])
    assert (spans["request"].trace_id, spans["request"].parent_span_id) == (trace, caller)
    assert spans["run thinker"].parent_span_id == spans["request"].span_id == bytes.fromhex(outer.split("-")[2])
    assert spans["run thinker"].span_id == bytes.fromhex(inner.split("-")[2])
