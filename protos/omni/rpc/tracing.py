"""OpenTelemetry spans, off unless ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or its traces variant) is set.

Off, nothing of OpenTelemetry is imported and a span costs one comparison; trace context is passed on all the same.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni.rpc import context

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attribute = str | int | float | bool

_provider: "TracerProvider | None" = None
_tracer: "Tracer | None" = None


def configure(service: str, **resource: Attribute) -> bool:
    """Starts exporting spans of this process when an exporter is configured; says whether it did.

    Args:
        service: ``service.name`` of the process: "omnid", "stage-server", "omni-gateway".
        resource: further attributes of the process, for instance ``replica="tiny-omni/thinker/0"``.
    """
    global _provider, _tracer  # noqa: PLW0603 - a process has one exporter
    if not (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return False
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    _provider = TracerProvider(resource=Resource.create({"service.name": service, **resource}))
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = _provider.get_tracer("omni")
    return True


def shutdown() -> None:
    """Sends what is not sent yet (blocks, at most the exporter's own bound) and stops exporting."""
    global _provider, _tracer  # noqa: PLW0603
    if _provider is not None:
        _provider.shutdown()
    _provider = _tracer = None


@contextmanager
def span(method: str) -> Iterator[None]:
    """A span around a call that is served, child of the running task's trace context and its context in the block."""
    if _tracer is None:
        yield
        return
    from opentelemetry.trace import SpanKind

    with (
        _tracer.start_as_current_span(method, context=_parent(context.traceparent()), kind=SpanKind.SERVER) as current,
        context.bound(traceparent=_traceparent(current)),
    ):
        yield


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span of work that no block of code surrounds; made by `begin`.

    Attributes:
        traceparent: W3C trace context for what belongs to the span; without an exporter, that of its parent.
    """

    traceparent: str
    _span: "Span | None" = None

    def end(self, attributes: Mapping[str, Attribute]) -> None:
        """The work is done."""
        if self._span is not None:
            self._span.set_attributes(attributes)
            self._span.end()


def begin(name: str, traceparent: str) -> OpenSpan:
    """A span that begins now, of the span that `traceparent` (W3C trace context, or "") names."""
    if _tracer is None:
        return OpenSpan(traceparent)
    begun = _tracer.start_span(name, context=_parent(traceparent))
    return OpenSpan(_traceparent(begun), begun)


def record(
    name: str, traceparent: str, began: float, ended: float, attributes: Mapping[str, Attribute] | None = None
) -> None:
    """A span of what is over, for work that no block of code surrounds.

    Args:
        name: what was done: "run thinker".
        traceparent: W3C trace context of the span that it belongs to, or "".
        began: by `time.monotonic`, in seconds.
        ended: the same.
        attributes: of the span.
    """
    if _tracer is None:
        return
    offset = time.time() - time.monotonic()
    recorded = _tracer.start_span(
        name,
        context=_parent(traceparent),
        start_time=round((began + offset) * 1e9),
        attributes=dict(attributes or {}),
    )
    recorded.end(round((ended + offset) * 1e9))


def _propagator() -> "TraceContextTextMapPropagator":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _traceparent(span: "Span") -> str:
    from opentelemetry.trace import set_span_in_context

    carrier: dict[str, str] = {}
    _propagator().inject(carrier, set_span_in_context(span))
    return carrier.get(context.TRACEPARENT_KEY, "")


def _parent(traceparent: str) -> "Context | None":
    return _propagator().extract({context.TRACEPARENT_KEY: traceparent}) if traceparent else None
