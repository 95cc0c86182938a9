"""What ``/metrics`` of a stage server shows of its arena, with the stage's labels."""

from __future__ import annotations

import torch
from prometheus_client import CollectorRegistry
from scripted import ARENA, stand

from stage_server.metrics import StageMetrics
from stage_server.transport.arena import Holder

LABELS = {"model": "m", "stage": "b"}


async def test_the_arena_is_shown_as_it_is_and_the_ends_of_leases_by_their_cause() -> None:
    registry = CollectorRegistry()
    async with stand() as at:
        StageMetrics(registry, "m", "b").watch(at.host)

        def shown(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {**LABELS, **labels})

        def ended() -> list[float | None]:
            causes = ("released", "stream_ended", "expired")
            return [shown("omni_arena_leases_ended_total", cause=cause) for cause in causes]

        assert shown("omni_arena_used_bytes") == shown("omni_arena_leases") == 0
        assert shown("omni_arena_oldest_lease_seconds") == 0
        assert ended() == [0, 0, 0]
        stream = Holder()
        handles = [at.arena.publish(torch.ones(1024), stream) for _ in range(3)]
        assert shown("omni_arena_used_bytes") == 3 * 4096
        assert shown("omni_arena_leases") == 3
        assert (shown("omni_arena_oldest_lease_seconds") or 0) > 0
        assert (shown("omni_arena_capacity_bytes") or 0) >= ARENA
        assert handles[0] is not None
        at.arena.release(handles[0].lease)
        at.arena.release_all(stream)
        assert shown("omni_arena_leases") == 0
        assert ended() == [1, 2, 0]
