"""What a gateway measures: what its HTTP clients feel."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from omni.v1 import content_pb2

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_RTF = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 5, 10)


class GatewayMetrics:
    """Metrics by model, and requests by route and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def times(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"omni_gateway_{name}", text, ["model"], registry=registry, buckets=buckets)

        self.ttft = times("ttft_seconds", "From a request's arrival to its first text token")
        self.ttfp = times("ttfp_seconds", "From a request's arrival to its first media packet")
        self.tpot = times("tpot_seconds", "Time per output token after the first")
        self.e2el = times("e2el_seconds", "From a request's arrival to its last output")
        self.rtf = times("rtf", "Processing time over the duration of the sound", _RTF)
        self.underrun = times("underrun_seconds", "Silence that a listener hears who plays the sound as it comes")
        self.requests = Counter(
            "omni_gateway_requests", "HTTP requests answered", ["route", "status"], registry=registry
        )


class Stopwatch:
    """One request as its client feels it."""

    def __init__(self, metrics: GatewayMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._begun = time.monotonic()
        self._first_text = self._last_text = self._first_media = 0.0
        self._tokens = 0
        self._samples = 0
        self._rate = 0
        self._played_until = 0.0
        self._underrun = 0.0

    def output(self, payload: content_pb2.Payload) -> None:
        """An output has come."""
        now = time.monotonic() - self._begun
        if payload.token_ids:
            self._first_text = self._first_text or now
            self._last_text = now
            self._tokens += len(payload.token_ids)
        for piece in payload.media:
            self._first_media = self._first_media or now
            if piece.modality == content_pb2.MODALITY_AUDIO:
                self._rate = piece.sample_rate or self._rate
                if self._played_until and now > self._played_until:
                    self._underrun += now - self._played_until
                begin = max(now, self._played_until)
                self._played_until = begin + piece.samples / (self._rate or 1)
                self._samples += piece.samples

    def finished(self) -> None:
        """The request has ended well, and its last output was given to the client."""
        total = time.monotonic() - self._begun
        metrics, model = self._metrics, self._model
        metrics.e2el.labels(model).observe(total)
        if self._first_text:
            metrics.ttft.labels(model).observe(self._first_text)
        if self._tokens > 1:
            metrics.tpot.labels(model).observe((self._last_text - self._first_text) / (self._tokens - 1))
        if self._first_media:
            metrics.ttfp.labels(model).observe(self._first_media)
        if self._samples and self._rate:
            metrics.rtf.labels(model).observe(total * self._rate / self._samples)
            metrics.underrun.labels(model).observe(self._underrun)
