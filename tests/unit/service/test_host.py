"""The replica's own judgement: ready, stuck, draining."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry
from scripted import ScriptedEngine

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, stage_pb2, tensor_pb2
from stage_server.engines.base import Load
from stage_server.metrics import StageMetrics
from stage_server.service import host
from stage_server.service.host import StageHost
from stage_server.transport.arena import Arena
from stage_server.transport.reader import Reader

READY, UNHEALTHY = stage_pb2.REPLICA_STATE_READY, stage_pb2.REPLICA_STATE_UNHEALTHY
STALL = 5.0


class Clock:
    """Stands still between two moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: self.now))


def made(engine: ScriptedEngine) -> StageHost:
    spec = config_pb2.StageSpec(stage="b", max_running=4, lease=Duration(seconds=60), stall=Duration(seconds=5))
    arena = Arena("m/b/0", 1, 1 << 20, 60.0)
    return StageHost(
        spec,
        tensor_pb2.ReplicaAddress(replica="m/b/0", epoch=1),
        engine,
        arena=arena,
        reader=Reader(arena, CollectorRegistry()),
        metrics=StageMetrics(CollectorRegistry(), "m", "b"),
    )


async def test_work_without_a_step_for_the_stall_bound_is_no_health_until_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, engine = Clock(monkeypatch), ScriptedEngine()
    replica = made(engine)
    replica.ready()
    engine.now = Load(running=1, steps=1, busy=True)
    assert replica.load().state == READY
    clock.now += STALL
    assert replica.load().state == READY
    clock.now += 0.1
    stuck = replica.load()
    assert (stuck.state, stuck.detail) == (UNHEALTHY, "has work and made no step for 5 s")
    with pytest.raises(OmniError, match="made no step") as refused:
        replica.admit()
    assert refused.value.reason is Reason.NO_REPLICA
    engine.now = Load(running=1, steps=2, busy=True)
    assert replica.load().state == READY
    replica.close()


@pytest.mark.parametrize("runs", [0, 3], ids=["no run", "runs that wait for input or a reader"])
async def test_who_has_nothing_to_do_is_well_however_long_it_makes_no_step(
    monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    clock, engine = Clock(monkeypatch), ScriptedEngine()
    replica = made(engine)
    replica.ready()
    engine.now = Load(running=runs, steps=1)
    for _ in range(3):
        clock.now += 10 * STALL
        assert replica.load().state == READY
    replica.close()


async def test_a_replica_that_was_told_to_drain_while_it_loaded_stays_so() -> None:
    replica = made(ScriptedEngine())
    await replica.drain()
    replica.ready()
    assert replica.load().state == stage_pb2.REPLICA_STATE_DRAINING
    replica.close()
