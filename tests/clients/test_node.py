"""A Node.js client that has nothing but the contract's descriptor image."""

import pytest

from tests.clients.conftest import node
from tests.faults.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


def asked(**script: object) -> dict[str, object]:
    return {"model": "chain", "prompt": {"text": "go"}, "params": {"a": {"extra": script}}}


async def test_it_lists_the_models(cluster: Cluster):
    status, models = await node(cluster.target, "list")
    assert status == 0, models
    assert [(model["model"], model["ready"]) for model in models] == [("chain", True)]
    assert [output["modality"] for output in models[0]["outputs"]] == ["MODALITY_TEXT", "MODALITY_AUDIO"]


async def test_it_reads_a_whole_answer_in_order(cluster: Cluster):
    status, events = await node(cluster.target, "generate", asked(tokens=5))
    assert status == 0, events
    assert [int(event["index"]) for event in events] == list(range(len(events)))
    assert (events[0]["kind"], events[-1]["kind"]) == ("accepted", "finished")
    assert events[-1]["reason"] == "FINISH_REASON_STOP"
    assert len("".join(event.get("text", "") for event in events)) == 5 * 4
    # Stage c makes a piece for each input that it takes, and inputs that wait are merged.
    sound = sum(piece["bytes"] for event in events for piece in event.get("media", ()))
    assert sound in {pieces * 960 for pieces in range(1, 6)}


async def test_it_runs_many_requests_on_one_stream(cluster: Cluster):
    status, events = await node(cluster.target, "attach", *(asked(tokens=n) for n in (3, 40, 0)))
    assert status == 0, events
    for request, tokens in ((1, 3), (2, 40), (3, 0)):
        own = [event for event in events if event["request"] == str(request)]
        assert [int(event["index"]) for event in own] == list(range(len(own)))
        assert own[-1]["kind"] == "finished"
        assert len("".join(event.get("text", "") for event in own)) == tokens * 4


async def test_it_cancels_and_hears_that_every_stage_has_let_go(cluster: Cluster):
    endless = asked(tokens=1000000, rate=100)
    status, events = await node(cluster.target, "cancel", endless)
    assert status == 0, events
    finished = next(event for event in events if event["kind"] == "finished")
    assert finished["reason"] == "FINISH_REASON_CANCELLED"
    assert events[-1]["found"]
    assert all(run["acknowledged"] for run in events[-1]["runs"])
    await cluster.drained()


async def test_it_reads_what_is_wrong_with_a_request(cluster: Cluster):
    status, [error] = await node(cluster.target, "generate", {**asked(), "model": "nobody"})
    assert status == 1
    assert (error["code"], error["reason"], error["domain"]) == ("NOT_FOUND", "UNKNOWN_MODEL", "omnid")
    status, [error] = await node(cluster.target, "generate", {"model": "chain"})
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "BAD_REQUEST")
    assert [violation["field"] for violation in error["fields"]] == ["prompt"]


async def test_it_hears_which_stage_failed(cluster: Cluster):
    status, [*_, error] = await node(cluster.target, "generate", asked(fail_at=2))
    assert status == 1
    assert (error["code"], error["reason"]) == ("INTERNAL", "STAGE_FAILED")
    assert error["metadata"]["stage"] == "a"
    assert error["metadata"]["request_id"].startswith("req-")
