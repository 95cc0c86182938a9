"""Prometheus metrics of the coordinator, by the names that serving systems share: TTFT, TPOT, TTFP, E2EL, RTF."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from omni.rpc import logs
from omni.v1 import content_pb2
from omnid.orchestrator.request import Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_HAND_OFF_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1, 5)
_RATIOS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 5, 10)

_log = logs.get(__name__)


class CoordinatorMetrics:
    """What happens in the orchestrator, as metrics, and of each request a span and a log line; the `Observer` of it.
    Nothing here is done once a token."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, labels: list[str], buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"omni_{name}", text, labels, registry=registry, buckets=buckets)

        self.requests = Counter("omni_requests", "Requests that have ended", ["model", "outcome"], registry=registry)
        self.ttft = histogram("ttft_seconds", "From a request to its first text", ["model"])
        self.ttfp = histogram("ttfp_seconds", "From a request to its first packet of sound", ["model"])
        self.tpot = histogram("tpot_seconds", "Between two tokens of a run", ["model", "stage"], _TOKEN_SECONDS)
        self.e2el = histogram("e2el_seconds", "From a request to its end", ["model"])
        self.rtf = histogram("rtf", "Seconds that making a second of sound took", ["model"], _RATIOS)
        self.queue_wait = histogram("queue_wait_seconds", "From a request to the start of its first run", ["model"])
        self.stage_time = histogram("stage_seconds", "From a run's start to its end", ["model", "stage"])
        self.hand_off = histogram(
            "hand_off_seconds", "From a chunk's arrival to its taking", ["edge"], _HAND_OFF_SECONDS
        )
        self.edge_bytes = Counter("omni_edge_bytes", "Bytes of tensors handed over", ["edge"], registry=registry)
        self.edge_chunks = Counter("omni_edge_chunks", "Chunks handed over", ["edge"], registry=registry)
        self.fenced_events = Counter(
            "omni_fenced_events", "Late events of runs that nobody awaited any more", registry=registry
        )
        self.replica_runs = Gauge("omni_replica_runs", "Runs at work on a replica", ["replica"], registry=registry)

    def fenced(self, events: int) -> None:
        self.fenced_events.inc(events)

    def taken(self, edge: str, seconds: float) -> None:
        self.hand_off.labels(edge).observe(seconds)

    def handed_over(self, edge: str, size: int) -> None:
        """A chunk with `size` bytes of tensors went to its consumer."""
        self.edge_chunks.labels(edge).inc()
        self.edge_bytes.labels(edge).inc(size)

    def ended(self, request: Request) -> None:
        model, times = request.plan.model, request.times
        outcome = "CANCELLED" if request.stopping else "OK"
        if request.failure is not None:
            outcome = request.failure.reason
        self.requests.labels(model, outcome).inc()
        told = {"request_id": request.id, "client_request_id": request.message.client_request_id, "model": model}
        attributes = {f"omni.{name}": value for name, value in (*told.items(), ("outcome", outcome))}
        request.trace.end(attributes)
        seconds = round(times.ended - times.created, 3)
        if failure := request.failure:
            _log.info("request_failed", **told, reason=outcome, why=failure.message, seconds=seconds)
        else:
            _log.debug("request_ended", **told, outcome=outcome, seconds=seconds)
        if times.first_start:
            self.queue_wait.labels(model).observe(times.first_start - times.created)
        if outcome != "OK":
            return
        self.e2el.labels(model).observe(times.ended - times.created)
        for run in request.runs:
            if run.end is None or run.role.role:
                continue
            stage, usage = run.stage, run.end.usage
            self.stage_time.labels(model, stage.name).observe(run.end.timings.total)
            if usage.completion_tokens > 1:
                gap = (run.last_output - run.first_output) / (usage.completion_tokens - 1)
                self.tpot.labels(model, stage.name).observe(gap)
            if not run.to_client or not run.first_output:
                continue
            waited = run.first_output - times.created
            if content_pb2.MODALITY_TEXT in stage.modalities:
                self.ttft.labels(model).observe(waited)
            if content_pb2.MODALITY_AUDIO in stage.modalities:
                self.ttfp.labels(model).observe(waited)
                if usage.sample_rate and usage.audio_samples:
                    sound = usage.audio_samples / usage.sample_rate
                    self.rtf.labels(model).observe((run.last_output - times.created) / sound)
