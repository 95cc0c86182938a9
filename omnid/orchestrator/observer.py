"""What the orchestrator measures, by the names that the field uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from omni.v1 import content_pb2

if TYPE_CHECKING:
    from omnid.orchestrator.request import Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_RTF = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 5, 10)


class Observer:
    """Counts requests and times their milestones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def times(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"omni_{name}", text, ["model"], registry=registry, buckets=buckets)

        self._ttft = times("ttft_seconds", "From a request's begin to its first text token")
        self._ttfp = times("ttfp_seconds", "From a request's begin to its first media packet")
        self._tpot = times("tpot_seconds", "Time per output token after the first", _TOKEN_SECONDS)
        self._e2el = times("e2el_seconds", "From a request's begin to its last output")
        self._rtf = times("rtf", "Processing time over the duration of the sound that was made", _RTF)
        self._queue = times("queue_seconds", "From a request's admission to its start")
        self._requests = Counter("omni_requests", "Requests ended", ["model", "outcome"], registry=registry)
        self._active = Gauge("omni_requests_active", "Requests admitted and not ended", ["model"], registry=registry)
        self._fenced = Counter("omni_fenced_events", "Late events of ended runs, dropped", registry=registry)

    def begun(self, request: Request) -> None:
        self._active.labels(request.model).inc()

    def fenced(self) -> None:
        self._fenced.inc()

    def ended(self, request: Request) -> None:
        """Counts the request by how it ended, and when it ended well, its times."""
        model = request.model
        self._active.labels(model).dec()
        self._requests.labels(model, request.outcome).inc()
        if request.outcome != "finished":
            return
        total = request.now() - request.begun
        self._e2el.labels(model).observe(total)
        self._queue.labels(model).observe(request.queued)
        for run in request.runs:
            first = request.first_outputs.get(run.stage.name)
            if first is None or run.finished is None:
                continue
            usage = run.finished.usage
            if content_pb2.MODALITY_TEXT in run.stage.spec.outputs:
                self._ttft.labels(model).observe(first)
                if usage.completion_tokens > 1:
                    spent = max(0.0, request.last_outputs[run.stage.name] - first)
                    self._tpot.labels(model).observe(spent / (usage.completion_tokens - 1))
            else:
                self._ttfp.labels(model).observe(first)
            if usage.audio_samples and usage.sample_rate:
                self._rtf.labels(model).observe(total * usage.sample_rate / usage.audio_samples)
