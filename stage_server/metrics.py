"""What a stage server measures, by the names that the field uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from stage_server.service.host import StageHost

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class StageMetrics:
    """Counters and times of a replica's runs; gauges are read from the engine and the arena when they are asked for."""

    def __init__(self, registry: CollectorRegistry, model: str, stage: str) -> None:
        self._registry = registry
        self._labels = (model, stage)
        names = ("model", "stage")
        self._runs = Counter("omni_stage_runs", "Runs ended", [*names, "outcome"], registry=registry)
        self._time = Histogram(
            "omni_stage_run_seconds", "From a run's start to its end", names, registry=registry, buckets=_SECONDS
        )
        self._first = Histogram(
            "omni_stage_first_output_seconds",
            "From a run's start to its first output",
            names,
            registry=registry,
            buckets=_SECONDS,
        )

    def run_ended(self, outcome: str, seconds: float, first_output: float) -> None:
        """A run has ended: "finished", "failed" or "cancelled"; `first_output` is 0 when it had none."""
        self._runs.labels(*self._labels, outcome).inc()
        if outcome == "finished":
            self._time.labels(*self._labels).observe(seconds)
        if first_output:
            self._first.labels(*self._labels).observe(first_output)

    def watch(self, host: StageHost) -> None:
        """Shows the host's gauges."""
        self._registry.register(_Gauges(host, self._labels))


class _Gauges:
    def __init__(self, host: StageHost, labels: tuple[str, str]) -> None:
        self._host = host
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        load = self._host.load()
        names = ("model", "stage")
        gauges = {
            "omni_stage_running": ("Runs that share the engine's steps", load.running),
            "omni_stage_waiting": ("Runs that wait in the engine", load.waiting),
            "omni_arena_used_bytes": ("Published bytes that are not released", load.arena.used_bytes),
            "omni_arena_capacity_bytes": ("Size of the arena", load.arena.capacity_bytes),
            "omni_arena_leases": ("Published tensors that are not released", load.arena.leases),
            "omni_arena_oldest_lease_seconds": ("Age of the oldest of them", load.arena.oldest_lease_seconds),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("omni_stage_steps", "Steps of the engine", load.steps),
            ("omni_stage_units", "Tokens, frames or denoising steps", load.units),
        ):
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(self._labels, value)
            yield counter
        ended = CounterMetricFamily("omni_arena_leases_ended", "Leases ended, by cause", labels=(*names, "cause"))
        for cause, count in (
            ("released", load.arena.released_leases),
            ("stream_ended", load.arena.dropped_leases),
            ("expired", load.arena.expired_leases),
        ):
            ended.add_metric((*self._labels, cause), count)
        yield ended
