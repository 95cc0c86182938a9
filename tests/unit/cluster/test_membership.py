"""Who belongs to the cluster, who is healthy, and who takes the next run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest
from google.protobuf.duration_pb2 import Duration

from omni.rpc.errors import OmniError, Reason
from omni.v1 import cluster_pb2, config_pb2, stage_pb2
from omnid.cluster.door import Door
from omnid.cluster.link import ReplicaLink
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

    def takes_work(self) -> bool:
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
        Cluster([served()]).enter(said)


def report(
    running: int, state: stage_pb2.ReplicaState.ValueType = stage_pb2.REPLICA_STATE_READY
) -> stage_pb2.ReplicaLoad:
    return stage_pb2.ReplicaLoad(state=state, running=running)


@dataclass
class Attached:
    """What a member reads of its link."""

    runs: dict[int, str] = field(default_factory=dict)
    attached: bool = True
    refusing: bool = False


def attached_member() -> tuple[Member, Attached]:
    member, link = Member(hello(), served().stages[0], 1), Attached()
    member.link = cast("ReplicaLink", link)
    member.observe(report(0))
    return member, link


def test_a_replica_that_says_it_is_stuck_takes_no_work() -> None:
    member, _ = attached_member()
    assert member.takes_work()
    stuck = report(1, stage_pb2.REPLICA_STATE_UNHEALTHY)
    stuck.detail = "has work and made no step for 5 s"
    member.observe(stuck)
    assert not member.takes_work()
    assert member.condition() == "unhealthy: has work and made no step for 5 s"


def test_a_run_that_ended_while_a_report_of_it_was_on_its_way_is_nobody_elses() -> None:
    member, link = attached_member()
    member.choose(1)
    link.runs[1] = "ours"
    member.observe(report(1))
    assert member.runs == 1
    del link.runs[1]
    member.observe(report(1))
    assert member.runs == 0
    member.choose(2)
    link.runs[2] = "ours, begun and ended between two reports"
    del link.runs[2]
    member.observe(report(1))
    assert member.runs == 0
    member.observe(report(1))
    assert member.runs == 1, "a run that this coordinator does not have"


def test_the_least_loaded_that_can_takes_the_next_run_and_equals_take_turns() -> None:
    full, busy, first, second = FakeMember(0, able=False), FakeMember(3), FakeMember(1, 1), FakeMember(1, 2)
    assert least_loaded([full, busy, second, first]) is first
    assert least_loaded([full]) is None


def test_a_place_that_is_joined_anew_replaces_the_old_member() -> None:
    cluster = Cluster([served()])
    old, new = cluster.enter(hello()), cluster.enter(hello())
    assert old.replaced.is_set()
    assert not new.replaced.is_set()
    cluster.leave(old)
    assert [status.joins for status in cluster.statuses()] == [2, 0]
    assert cluster.address("m/thinker/0") is new.hello.address


def test_an_unknown_model_or_stage_is_refused_with_the_nearest_name() -> None:
    cluster = Cluster([served()])
    with pytest.raises(OmniError, match="did you mean 'thinker'") as raised:
        cluster.enter(hello(stage="thinkr"))
    assert raised.value.reason == Reason.NOT_FOUND
    with pytest.raises(OmniError) as raised:
        cluster.enter(hello(model="n"))
    assert raised.value.reason == Reason.UNKNOWN_MODEL


async def test_waiting_for_readiness_says_what_each_replica_said_last() -> None:
    cluster = Cluster([served()])
    member = cluster.enter(hello())
    load = stage_pb2.ReplicaLoad(state=stage_pb2.REPLICA_STATE_LOADING, detail="reading weights")
    cluster.report(member, load)
    with pytest.raises(OmniError, match="m/thinker/0: loading: reading weights"):
        await cluster.wait_ready(0.01)


async def test_a_stage_that_nobody_started_is_told_with_the_command_that_joins_it() -> None:
    pipeline = served()
    cluster = Cluster([pipeline])
    cluster.door = Door("0.0.0.0:7171", ("--tls-ca", "/my certs/ca.pem"), host="head")
    command = (
        "stage-server --coordinator 127.0.0.1:7171 --model m --stage thinker --index 0 --tls-ca '/my certs/ca.pem'"
    )
    assert cluster.missing_replicas() == f"m/thinker/0 has not joined (start it with: {command})"
    pipeline.placements[0].hosts.append("far.example")
    there = "--coordinator head:7171 --listen 0.0.0.0:0 --advertise far.example --model m --stage thinker --index 0"
    assert f"(start it with: stage-server {there} " in cluster.missing_replicas()
