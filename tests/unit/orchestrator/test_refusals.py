"""A replica that does not take a run in has failed nothing: the run goes elsewhere or waits, within the queue bound."""

from __future__ import annotations

import pytest
from recording import WAITS, FakeLink, World, chain

from omnid.orchestrator.ports import Failure

REFUSALS = ("DRAINING", "QUEUE_FULL", "NO_REPLICA")


def refusal(reason: str, stage: str) -> Failure:
    return Failure(reason, "takes no more", stage, f"m/{stage}/0")


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_run_that_is_turned_away_goes_to_another_replica_with_all_its_input(reason: str) -> None:
    world = World(chain("a", "b"))
    first = world.link("b")
    world.links["b"].append(FakeLink("m/b/1"))
    request, client = world.ask()
    producer, consumer = world.run(request, "a"), world.run(request, "b")
    world.output(producer, 0, leases=(7,))
    world.finish(producer, 1)
    assert first.kinds() == ["start", "input", "end"]
    refused = consumer.number
    request.failed(consumer, refusal(reason, "b"))
    second = world.link("b")
    assert first.runs == {}
    assert consumer.number != refused
    assert second.told == [
        ("start", consumer.number, ""),
        ("input", consumer.number, "a", 0, 1),
        ("end", consumer.number, "a", 1),
    ]
    assert world.released == []
    request.taken(consumer)
    world.output(consumer, 0)
    request.credit()
    world.finish(consumer, 1)
    assert client.events[-1][0] == "finished"
    assert world.idle()


def test_a_run_that_the_only_replica_turned_away_waits_for_its_next_report_before_those_that_came_later() -> None:
    world = World(chain("a"))
    request, _ = world.ask()
    run = world.run(request, "a")
    request.failed(run, refusal("QUEUE_FULL", "a"))
    later, _ = world.ask()
    assert world.link("a").kinds() == ["start"]
    world.report(world.link("a"))
    assert [told[1] for told in world.link("a").told[1:]] == [run.number, world.run(later, "a").number]


def test_a_run_that_is_turned_away_again_and_again_fails_at_the_queue_bound() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    run = world.run(request, "a")
    for _ in range(int(WAITS.queue)):
        request.failed(run, refusal("QUEUE_FULL", "a"))
        world.advance(1)
        world.report(world.link("a"))
        if request.ended:
            break
    if not request.ended:
        request.failed(run, refusal("QUEUE_FULL", "a"))
    assert client.failure.reason in ("QUEUE_FULL", "STAGE_TIMEOUT")
    assert world.core.now <= WAITS.queue
    assert world.idle()


@pytest.mark.parametrize("begun", ["output", "taken"])
def test_a_run_that_has_begun_is_not_started_anew(begun: str) -> None:
    world = World(chain("a", "b"))
    request, client = world.ask()
    producer, consumer = world.run(request, "a"), world.run(request, "b")
    world.output(producer, 0)
    if begun == "output":
        world.output(consumer, 0)
    else:
        request.taken(consumer)
    request.failed(consumer, refusal("DRAINING", "b"))
    world.let_go(request)
    assert client.failure.reason == "DRAINING"


def test_a_cancelled_run_that_is_turned_away_has_let_go() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    run = world.run(request, "a")
    request.cancel("client cancelled")
    request.failed(run, refusal("DRAINING", "a"))
    assert client.events[-1][0] == "finished"
    assert request.reports()[0].acknowledged
    assert world.idle()
