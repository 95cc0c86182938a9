"""Who belongs to the cluster, who is healthy, and who takes the next run."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from omni.rpc.errors import OmniError, Reason
from omni.v1 import cluster_pb2, config_pb2, stage_pb2
from omnid.cluster.health import Progress
from omnid.cluster.member import Member
from omnid.cluster.membership import Cluster
from omnid.cluster.routing import least_loaded


class FakeMember(Member):
    """A member with a given load; the rules that read it are the real ones' callers."""

    def __init__(self, runs: int, chosen: int = 0, *, able: bool = True) -> None:
        self._runs, self.chosen, self._able = runs, chosen, able

    @property
    def runs(self) -> int:
        return self._runs

    def takes_work(self, now: float) -> bool:
        return self._able


def served() -> config_pb2.ResolvedPipeline:
    spec = config_pb2.StageSpec(stage="thinker", model="m", max_running=2, stall=Duration(seconds=5))
    placement = config_pb2.Placement(stage="thinker", replicas=2)
    return config_pb2.ResolvedPipeline(model="m", stages=[spec], placements=[placement])


def hello(model: str = "m", stage: str = "thinker", index: int = 0) -> cluster_pb2.ReplicaHello:
    said = cluster_pb2.ReplicaHello(model=model, stage=stage, index=index)
    said.address.target = "127.0.0.1:1"
    said.address.replica = f"{model}/{stage}/{index}"
    return said


def test_a_replica_joins_under_its_own_name_only() -> None:
    said = hello()
    said.address.replica = "m/thinker/1"
    with pytest.raises(OmniError, match="must be 'm/thinker/0', got 'm/thinker/1'"):
        Cluster([served()], lambda: 0.0).enter(said)


def working(steps: int) -> stage_pb2.ReplicaLoad:
    return stage_pb2.ReplicaLoad(state=stage_pb2.REPLICA_STATE_READY, running=1, steps=steps)


def test_work_without_a_step_for_the_stall_bound_is_no_health() -> None:
    progress = Progress(stall=5, now=0)
    progress.observe(working(steps=1), 1)
    progress.observe(working(steps=1), 5)
    assert not progress.stalled(5)
    progress.observe(working(steps=1), 7)
    assert progress.stalled(7) == 6
    progress.observe(working(steps=2), 8)
    assert not progress.stalled(8)


def test_an_idle_replica_is_healthy_however_long_it_makes_no_step() -> None:
    progress = Progress(stall=5, now=0)
    progress.observe(stage_pb2.ReplicaLoad(steps=1), 100)
    assert not progress.stalled(104)


def test_the_least_loaded_that_can_takes_the_next_run_and_equals_take_turns() -> None:
    full, busy, first, second = FakeMember(0, able=False), FakeMember(3), FakeMember(1, 1), FakeMember(1, 2)
    assert least_loaded([full, busy, second, first], 0) is first
    assert least_loaded([full], 0) is None


def test_a_place_that_is_joined_anew_replaces_the_old_member() -> None:
    cluster = Cluster([served()], lambda: 0.0)
    old, new = cluster.enter(hello()), cluster.enter(hello())
    assert old.replaced.is_set()
    assert not new.replaced.is_set()
    cluster.leave(old)
    assert [status.joins for status in cluster.statuses()] == [2, 0]
    assert cluster.address("m/thinker/0") is new.hello.address


def test_an_unknown_model_or_stage_is_refused_with_the_nearest_name() -> None:
    cluster = Cluster([served()], lambda: 0.0)
    with pytest.raises(OmniError, match="did you mean 'thinker'") as raised:
        cluster.enter(hello(stage="thinkr"))
    assert raised.value.reason == Reason.NOT_FOUND
    with pytest.raises(OmniError) as raised:
        cluster.enter(hello(model="n"))
    assert raised.value.reason == Reason.UNKNOWN_MODEL


async def test_waiting_for_readiness_says_what_each_replica_said_last() -> None:
    cluster = Cluster([served()], lambda: 0.0)
    member = cluster.enter(hello())
    load = stage_pb2.ReplicaLoad(state=stage_pb2.REPLICA_STATE_LOADING, detail="reading weights")
    cluster.report(member, load)
    with pytest.raises(OmniError, match="m/thinker/0: loading: reading weights"):
        await cluster.wait_ready(0.01)
