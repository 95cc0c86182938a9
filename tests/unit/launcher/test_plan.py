"""Which processes a deployment has, where, and by which address they find their coordinator."""

from __future__ import annotations

import pytest

from omni.v1 import config_pb2
from omnid.cluster.door import Door
from omnid.launcher.launcher import _how
from omnid.launcher.plan import plan_stages


def two_hosts() -> config_pb2.ResolvedPipeline:
    placement = config_pb2.Placement(stage="a", replicas=2, devices=["cpu", "cpu"], hosts=["localhost", "other"])
    spec = config_pb2.StageSpec(stage="a", model="m", family="synthetic")
    return config_pb2.ResolvedPipeline(model="m", stages=[spec], placements=[placement])


@pytest.mark.parametrize(
    ("listens", "here", "there"),
    [
        ("0.0.0.0:7070", "127.0.0.1:7070", "head:7070"),
        ("[::]:7070", "127.0.0.1:7070", "head:7070"),
        ("10.0.0.5:7070", "10.0.0.5:7070", "10.0.0.5:7070"),
    ],
)
def test_replicas_are_told_an_address_that_they_can_connect_to(listens: str, here: str, there: str) -> None:
    plan = plan_stages([two_hosts()], Door(listens, host="head"))
    [process], [command] = plan.here, plan.elsewhere
    assert process.arguments[:2] == ("--coordinator", here)
    assert f"--coordinator {there} --listen 0.0.0.0:0 --advertise other --model m --stage a --index 1" in command


@pytest.mark.parametrize(("device", "seen"), [("cpu", ""), ("cuda:1", "1"), ("cuda:0,3", "0,3")])
def test_a_replica_sees_its_own_devices_and_keeps_to_one_thread_on_the_cpu_whichever_they_are(
    device: str, seen: str
) -> None:
    pipeline = two_hosts()
    pipeline.placements[0].devices[0] = device
    [process] = plan_stages([pipeline], Door("127.0.0.1:7070")).here
    assert dict(process.env) == {"CUDA_VISIBLE_DEVICES": seen, "OMP_NUM_THREADS": "1"}


def test_threads_that_the_deployment_asks_for_go_before() -> None:
    pipeline = two_hosts()
    pipeline.placements[0].env["OMP_NUM_THREADS"] = "4"
    [process] = plan_stages([pipeline], Door("127.0.0.1:7070")).here
    assert process.env["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("status", "said"), [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-40, "signal 40")]
)
def test_every_end_of_a_process_has_words(status: int, said: str) -> None:
    assert said in _how(status)
