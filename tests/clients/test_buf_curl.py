"""``buf curl``, which learns the contract from the server: reflection, health, calls, errors."""

import pytest

from tests.clients.conftest import buf_curl
from tests.faults.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_health_of_the_server_and_of_its_service(cluster: Cluster):
    for service in ("", "omni.v1.OmniService"):
        status, answers, errors = await buf_curl(cluster.target, "grpc.health.v1.Health/Check", {"service": service})
        assert (status, answers) == (0, [{"status": "SERVING"}]), errors


async def test_a_person_can_ask_for_an_answer(cluster: Cluster):
    message = {"model": "chain", "prompt": {"text": "go"}, "params": {"a": {"extra": {"tokens": 3}}}}
    status, answers, errors = await buf_curl(cluster.target, "omni.v1.OmniService/Generate", message)
    assert status == 0, errors
    events = [event for answer in answers for event in answer["events"]]
    assert "accepted" in events[0]
    assert "finished" in events[-1]


async def test_a_stage_server_can_be_asked_itself(cluster: Cluster):
    status, [listed], errors = await buf_curl(cluster.target, "omni.v1.ClusterService/ListReplicas", {})
    assert status == 0, errors
    for replica in listed["replicas"]:
        target = replica["address"]["target"]
        status, [described], errors = await buf_curl(target, "omni.v1.StageService/Describe", {})
        assert status == 0, errors
        assert described["spec"]["stage"] == replica["stage"]
        assert described["load"]["state"] == "REPLICA_STATE_READY"
        run = {"commands": [{"start": {"request_id": "by-hand", "prompt": {"text": "go"}, "output": True}}]}
        if replica["stage"] == "a":
            status, answers, errors = await buf_curl(target, "omni.v1.StageService/Execute", run)
            assert status == 0, errors
            assert "finished" in answers[-1]["events"][-1]


async def test_a_wrong_request_is_refused_by_field(cluster: Cluster):
    status, _, errors = await buf_curl(cluster.target, "omni.v1.OmniService/Generate", {"model": "chain"})
    assert status != 0
    assert "invalid_argument" in errors
    assert "prompt" in errors
