"""What the orchestrator promises for a request, one promise a test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import WAITS, FakeLink, Untraced, World, chain

from omnid.orchestrator.ports import CANCELLED, Failure
from omnid.orchestrator.timers import Timed, Timers


def test_outputs_reach_the_client_in_order_and_are_credited() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    run = world.run(request, "a")
    for number in range(4):
        world.output(run, number)
        request.credit()
    world.finish(run, 4)
    assert client.outputs() == [f"a:{number}" for number in range(4)]
    assert world.link("a").credits == [run.number] * 4
    assert client.events[-2:] == [("stage_finished", "a"), ("finished", 1)]
    assert world.idle()


def test_a_client_without_credit_holds_up_its_own_run_only() -> None:
    world = World(chain("a"))
    slow, slow_client = world.ask()
    quick, quick_client = world.ask()
    slow_run, quick_run = world.run(slow, "a"), world.run(quick, "a")
    for number in range(4):
        world.output(slow_run, number)
        world.output(quick_run, number)
        quick.credit()
    assert len(slow_client.outputs()) == 2
    assert len(quick_client.outputs()) == 4
    assert world.link("a").credits.count(slow_run.number) == 2
    slow.credit()
    assert len(slow_client.outputs()) == 3
    assert world.link("a").credits.count(slow_run.number) == 3


def test_the_end_waits_until_the_client_has_taken_every_output() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    run = world.run(request, "a")
    for number in range(3):
        world.output(run, number)
    world.finish(run, 3)
    assert client.events[-1][0] == "output"
    request.credit()
    assert client.events[-1] == ("finished", 1)
    assert world.idle()


def test_a_consumer_starts_with_the_first_chunk_while_its_producer_still_runs() -> None:
    world = World(chain("a", "b"))
    request, _ = world.ask()
    assert world.link("b").told == []
    world.output(world.run(request, "a"), 0)
    run = world.run(request, "b")
    assert world.link("b").told == [("start", run.number, ""), ("input", run.number, "a", 0, 1)]


def test_a_consumer_gets_two_chunks_without_credit_and_its_producer_waits_for_the_rest() -> None:
    world = World(chain("a", "b"))
    request, _ = world.ask()
    producer, consumer = world.run(request, "a"), world.run(request, "b")
    for number in range(4):
        world.output(producer, number)
    assert world.link("b").kinds() == ["start", "input", "input"]
    assert len(world.link("a").credits) == 2
    request.taken(consumer)
    assert world.link("b").kinds() == ["start", "input", "input", "input"]
    assert len(world.link("a").credits) == 3


def test_the_end_of_a_source_follows_its_last_chunk_with_the_count() -> None:
    world = World(chain("a", "b"))
    request, _ = world.ask()
    producer, consumer = world.run(request, "a"), world.run(request, "b")
    for number in range(3):
        world.output(producer, number)
    world.finish(producer, 3)
    assert "end" not in world.link("b").kinds()
    request.taken(consumer)
    assert world.link("b").told[-2:] == [("input", consumer.number, "a", 2, 1), ("end", consumer.number, "a", 3)]


def test_a_source_without_output_still_starts_its_consumer() -> None:
    world = World(chain("a", "b"))
    request, _ = world.ask()
    world.finish(world.run(request, "a"), 0)
    assert world.link("b").kinds() == ["start", "end"]


def test_a_gap_is_an_error_that_names_the_edge() -> None:
    world = World(chain("a", "b"))
    request, client = world.ask()
    producer = world.run(request, "a")
    world.output(producer, 0)
    world.output(producer, 2)
    world.let_go(request)
    assert client.failure.reason == "SEQUENCE_BROKEN"
    assert "a->b: a gap" in client.failure.message
    assert world.idle()


def test_a_doubled_chunk_is_an_error_that_names_the_edge() -> None:
    world = World(chain("a", "b"))
    request, client = world.ask()
    producer = world.run(request, "a")
    world.output(producer, 0)
    world.output(producer, 0)
    world.let_go(request)
    assert client.failure.reason == "SEQUENCE_BROKEN"
    assert "a->b: an overlap" in client.failure.message


@pytest.mark.parametrize("first", [0, 2], ids=["doubled", "after a gap"])
def test_tensors_of_an_output_out_of_order_go_back_when_every_run_has_let_go(first: int) -> None:
    world = World(chain("a", "b"))
    request, _ = world.ask()
    producer = world.run(request, "a")
    world.output(producer, 0, leases=(7,))
    world.output(producer, first, leases=(7 if first == 0 else 8,))
    assert world.released == []
    world.let_go(request)
    assert sorted(world.released) == [("m/a/0", 7)] + [("m/a/0", 8)] * bool(first)
    assert world.idle()


def test_a_short_count_is_an_error_and_never_a_shorter_answer() -> None:
    world = World(chain("a", "b"))
    request, client = world.ask()
    producer = world.run(request, "a")
    world.output(producer, 0)
    world.finish(producer, 2)
    world.let_go(request)
    assert client.failure.reason == "COUNT_MISMATCH"
    assert "a->b" in client.failure.message


def test_a_merged_message_counts_for_all_that_it_holds() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    run = world.run(request, "a")
    world.output(run, 0, count=5)
    world.output(run, 5, count=1)
    world.finish(run, 6)
    assert client.events[-1] == ("finished", 1)


def test_a_consumer_of_end_edges_starts_when_every_role_has_delivered() -> None:
    world = World(chain("a", "b", at_end=True, roles=("cfg",)))
    request, _ = world.ask()
    main, companion = world.run(request, "a"), world.run(request, "a", "cfg")
    world.output(main, 0)
    world.output(companion, 0)
    assert world.link("a").credits == [main.number, companion.number]
    world.finish(main, 1)
    assert world.link("b").told == []
    world.finish(companion, 1)
    assert world.link("b").kinds()[0] == "start"
    assert {each[2] for each in world.link("b").told if each[0] == "input"} == {"a", "a[cfg]"}


def test_a_companion_that_dies_ends_its_parent() -> None:
    world = World(chain("a", "b", at_end=True, roles=("cfg",)))
    request, client = world.ask()
    request.failed(world.run(request, "a", "cfg"), Failure("STAGE_FAILED", "boom", "a"))
    assert world.link("a").kinds().count("cancel") == 1
    world.let_go(request)
    assert client.failure.stage == "a"
    assert world.idle()


def test_failure_of_one_stage_cancels_every_other_and_then_fails_the_request() -> None:
    world = World(chain("a", "b", "c"))
    request, client = world.ask()
    world.output(world.run(request, "a"), 0)
    world.output(world.run(request, "b"), 0)
    request.failed(world.run(request, "b"), Failure("STAGE_FAILED", "boom", "b"))
    assert world.link("a").kinds()[-1] == world.link("c").kinds()[-1] == "cancel"
    assert client.events[-1][0] != "failed"
    world.let_go(request)
    assert client.failure.stage == "b"


def test_a_cancel_ends_when_every_run_has_let_go_and_says_so() -> None:
    world = World(chain("a", "b"))
    request, client = world.ask()
    world.output(world.run(request, "a"), 0)
    reports: list[object] = []
    assert world.core.cancel(request.id, "client cancelled", reports.extend)
    world.finish(world.run(request, "a"), 0, reason=CANCELLED)
    assert not reports
    world.finish(world.run(request, "b"), 0, reason=CANCELLED)
    assert [report.acknowledged for report in reports] == [True, True]  # type: ignore[attr-defined]
    assert client.events[-1] == ("finished", CANCELLED)
    assert not world.core.cancel(request.id, "again", reports.extend)


def test_a_run_that_never_lets_go_is_given_up_at_its_bound_and_reported() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    request.cancel("client cancelled")
    world.advance(1.1)
    assert [report.acknowledged for report in request.reports()] == [False]
    assert client.events[-1] == ("finished", CANCELLED)
    assert world.idle()


def test_late_output_of_a_cancelled_run_reaches_nobody() -> None:
    world = World(chain("a", "b"))
    request, client = world.ask()
    producer = world.run(request, "a")
    request.cancel("client cancelled")
    world.output(producer, 0, leases=(7,))
    assert world.link("b").told == []
    assert len(client.events) == 1
    assert len(world.core.leases) == 0
    assert world.released == [("m/a/0", 7)]


def test_first_output_is_bounded_and_the_stage_named() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    world.advance(10.1)
    world.let_go(request)
    assert (client.failure.reason, client.failure.stage) == ("STAGE_TIMEOUT", "a")
    assert "bound first_output" in client.failure.message


def test_a_gap_between_outputs_is_bounded_and_the_stage_named() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    world.output(world.run(request, "a"), 0)
    request.credit()
    world.advance(2.9)
    world.output(world.run(request, "a"), 1)
    world.advance(2.9)
    assert not request.stopping
    world.advance(0.2)
    world.let_go(request)
    assert "bound gap" in client.failure.message


def test_a_run_that_waits_for_its_slow_client_is_not_blamed() -> None:
    world = World(chain("a"))
    request, _ = world.ask()
    for number in range(4):
        world.output(world.run(request, "a"), number)
    world.advance(50)
    assert not request.stopping


def test_a_consumer_that_waits_for_its_producer_is_not_blamed() -> None:
    world = World(chain("a", "b", shown=("a", "b")))
    request, client = world.ask()
    producer, consumer = world.run(request, "a"), world.run(request, "b")
    world.output(producer, 0)
    world.output(consumer, 0)
    request.taken(consumer)
    world.advance(3.1)
    assert client.events[-1][0] != "failed"
    assert request.failure is not None
    assert request.failure.stage == "a"


def test_the_whole_request_is_bounded() -> None:
    world = World(chain("a"))
    request, client = world.ask(timeout=2)
    world.advance(2.1)
    world.let_go(request)
    assert client.failure.reason == "DEADLINE"


def test_without_a_replica_the_request_fails_at_its_bound_with_what_is_missing() -> None:
    world = World(chain("a"))
    world.link("a").up = False
    _, client = world.ask()
    world.advance(5.1)
    assert (client.failure.reason, client.failure.stage) == ("NO_REPLICA", "a")
    assert "m/a/0 has not joined" in client.failure.message
    assert world.idle()


def test_a_waiting_run_starts_as_soon_as_a_replica_is_there() -> None:
    world = World(chain("a"))
    world.link("a").up = False
    world.ask()
    world.link("a").up = True
    world.core.room_on(("m", "a"))
    assert world.link("a").kinds() == ["start"]


def test_a_run_that_had_not_begun_moves_at_once_under_a_new_number() -> None:
    world = World(chain("a", "b"))
    request, _ = world.ask()
    world.output(world.run(request, "a"), 0)
    run = world.run(request, "b")
    before, first = run.number, world.link("b")
    world.links["b"].append(type(first)("m/b/1"))
    world.lose(first)
    assert run.number != before
    assert world.link("b").told == [("start", run.number, ""), ("input", run.number, "a", 0, 1)]
    assert run.replica == "m/b/1"


def test_a_lost_replica_that_had_begun_fails_the_request_with_its_name() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    world.output(world.run(request, "a"), 0)
    world.lose(world.link("a"))
    assert (client.failure.reason, client.failure.stage, client.failure.replica) == ("REPLICA_LOST", "a", "m/a/0")
    assert world.idle()


def test_a_tensor_goes_back_when_its_reader_is_done_and_the_rest_at_the_end() -> None:
    world = World(chain("a", "b"))
    request, _ = world.ask()
    producer, consumer = world.run(request, "a"), world.run(request, "b")
    world.output(producer, 0, leases=(1,))
    world.output(producer, 1, leases=(2,))
    world.core.released([1])
    assert world.released == [("m/a/0", 1)]
    world.core.released([1])
    assert world.observer.fenced_events == 1
    world.finish(producer, 2)
    world.finish(consumer, 0)
    assert world.released == [("m/a/0", 1), ("m/a/0", 2)]
    assert world.idle()


def test_a_consumer_that_ends_early_lets_its_producer_run_on() -> None:
    world = World(chain("a", "b", shown=("a", "b")))
    request, client = world.ask()
    producer, consumer = world.run(request, "a"), world.run(request, "b")
    for number in range(4):
        world.output(producer, number, leases=(number,))
        request.credit()
    world.finish(consumer, 0)
    assert len(world.link("a").credits) == 4
    assert ("m/a/0", 3) in world.released
    world.output(producer, 4, leases=(4,))
    assert ("m/a/0", 4) in world.released
    request.credit()
    world.finish(producer, 5)
    assert client.events[-1][0] == "finished"


def test_requests_beyond_the_limits_wait_their_turn_and_then_are_refused() -> None:
    world = World(chain("a"))
    first, _ = world.ask()
    world.ask()
    third, client = world.ask()
    refused = world.core.submit(world.plan, "req-4", None, client, trace=Untraced())
    assert isinstance(refused, Failure)
    assert refused.reason == "QUEUE_FULL"
    assert not third.begun
    world.finish(world.run(first, "a"), 0)
    assert third.begun


@given(
    st.lists(
        st.sampled_from(
            ["out_a", "out_b", "take", "credit", "tick", "cancel", "fail_b", "lose_b", "refuse_b", "report_b"]
        ),
        max_size=60,
    )
)
def test_whatever_the_order_of_events_a_request_ends_once_and_leaves_nothing(steps: list[str]) -> None:
    world = World(chain("a", "b", shown=("a", "b")))
    request, client = world.ask()
    a, b = world.run(request, "a"), world.run(request, "b")
    for step in steps:
        if request.ended:
            break
        if step == "out_a" and a.link is not None and a.held < 2:
            world.output(a, a.next, leases=(1000 + a.next,))
        elif step == "out_b" and b.link is not None and b.held < 2:
            world.output(b, b.next)
        elif step == "take" and b.link is not None:
            request.taken(b)
        elif step == "credit":
            request.credit()
        elif step == "tick":
            world.advance(1)
        elif step == "cancel":
            request.cancel("client cancelled")
        elif step == "fail_b" and b.link is not None:
            request.failed(b, Failure("STAGE_FAILED", "boom", "b"))
        elif step == "refuse_b" and b.link is not None and not b.next:
            request.failed(b, Failure("QUEUE_FULL", "full", "b"))
        elif step == "report_b":
            world.report(world.link("b"))
        elif step == "lose_b" and world.link("b").up:
            world.lose(world.link("b"))
        assert a.held <= 2
        assert len(b.handed) <= 2
    for _ in range(200):
        if request.ended:
            break
        world.report(world.link("b"))
        if request.stopping:
            world.let_go(request)
            continue
        request.credit()
        for run in (a, b):
            if run.link is not None:
                request.taken(run)
                if not run.inputs and run.open_sources == 0:
                    world.finish(run, run.next)
        world.advance(1)
    assert request.ended
    assert client.events[-1][0] in ("finished", "failed")
    assert sum(event[0] in ("finished", "failed") for event in client.events) == 1
    assert world.idle()


def test_a_run_that_takes_its_replica_with_it_is_begun_anew_once() -> None:
    world = World(chain("a"))
    world.links["a"] += [FakeLink("m/a/1"), FakeLink("m/a/2")]
    _, client = world.ask()
    for _ in range(2):
        [link] = [link for link in world.links["a"] if link.runs]
        world.lose(link)
    assert client.failure.reason == "REPLICA_LOST"
    assert [link.kinds() for link in world.links["a"]].count([]) == 1
    assert world.idle()


def test_an_output_of_nothing_breaks_the_sequence() -> None:
    world = World(chain("a"))
    request, client = world.ask()
    world.output(world.run(request, "a"), 0, count=0)
    world.let_go(request)
    assert client.failure.reason == "SEQUENCE_BROKEN"


def test_a_client_cannot_ask_for_more_time_than_the_deployment_gives() -> None:
    world = World(chain("a"))
    request, _ = world.ask(timeout=1e9)
    assert request.remaining == 100


def test_a_cancel_that_is_due_with_the_deadline_still_has_its_own_time() -> None:
    world = World(chain("a"))
    request, client = world.ask(timeout=WAITS.first_output)
    world.advance(WAITS.first_output)
    assert world.link("a").kinds() == ["start", "cancel"]
    assert not client.events[1:]
    world.let_go(request)
    assert client.failure.reason in ("DEADLINE", "STAGE_TIMEOUT")
    assert [report.acknowledged for report in request.reports()] == [True]
    assert world.idle()


def test_one_target_that_raises_leaves_the_deadlines_of_the_others() -> None:
    timers = Timers()
    first, second = Timed(), Timed()
    timers.set(first, 1.0)
    timers.set(second, 1.0)
    assert timers.due(2.0) is first
    assert timers.first() == 1.0
    assert timers.due(2.0) is second
    assert timers.due(2.0) is None
