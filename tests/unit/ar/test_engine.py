"""The engine's loop, over a decoder whose results show every mistake in slots and positions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2
from stage_server.engines.ar.cache import SlotCache
from stage_server.engines.ar.decoder import Geometry
from stage_server.engines.ar.engine import ArEngine
from stage_server.engines.base import Feed, Output, Run
from tests.parity.driver import Driver, run_of
from tests.unit.ar.counting import CountingDecoder, expected


@pytest.fixture
def decoder() -> CountingDecoder:
    return CountingDecoder()


@pytest.fixture
def driver(decoder: CountingDecoder) -> Iterator[Driver]:
    driver = Driver(ArEngine(decoder, max_running=4, step_tokens=8))
    yield driver
    driver.close()


def settle(driver: Driver) -> None:
    """Returns when all runs submitted before have been prepared, and admitted if there is room: a run that cannot be
    prepared has ended behind them."""
    driver.result(driver.submit(run_of([13])))


def submit_in_one_step(driver: Driver, decoder: CountingDecoder, first: Run, *others: Run) -> list[int]:
    """Holds the first run's first step until the others are prepared, so that they join in its second."""
    decoder.step_gate = threading.Event()
    runs = [driver.submit(first)]
    assert decoder.stepping.wait(30)
    runs += [driver.submit(run) for run in others]
    driver.submit(run_of([13]))  # its preparation begins when the last of them is through
    for _ in range(len(others) + 2):
        assert decoder.preparing.acquire(timeout=30)
    decoder.step_gate.set()
    return runs


def drawn(decoder: CountingDecoder, run: int, prompt: int) -> list[int]:
    return decoder.inputs[run][prompt:]


def test_runs_that_join_and_leave_keep_their_own_slots(driver: Driver, decoder: CountingDecoder) -> None:
    wanted = [([20 + at, *range(1 + at % 5)], 2 + (5 * at) % 11) for at in range(30)]
    runs = [driver.submit(run_of(ids, max_tokens=n)) for ids, n in wanted]
    for run, (ids, n), seen in zip(runs, wanted, driver.results(runs), strict=True):
        assert drawn(decoder, run, len(ids)) == expected(ids, n)[: n - 1]
        assert seen.finished.usage.completion_tokens == n
        assert int(seen.tensor("last")) == n


def test_a_long_prompt_never_holds_up_a_decoding_run(driver: Driver, decoder: CountingDecoder) -> None:
    first, second = submit_in_one_step(driver, decoder, run_of([1], max_tokens=40), run_of([2] * 50, max_tokens=3))
    driver.results([first, second])
    mixed = [step for step in decoder.forwards if any(run == second and stop - start > 1 for run, start, stop in step)]
    assert len(mixed) >= 7
    assert all(sum(stop - start for _, start, stop in step) <= 8 for step in mixed)
    assert all(any(run == first for run, _, _ in step) for step in mixed)


def test_one_delivery_a_step_holds_all_runs_of_it(driver: Driver, decoder: CountingDecoder) -> None:
    runs = submit_in_one_step(driver, decoder, *(run_of([at], max_tokens=20) for at in range(1, 4)))
    driver.results(runs)
    made = [[event.run for event in step if isinstance(event, Output)] for step in driver.steps]
    assert made[1:20] == [runs] * 19


def test_a_run_waits_for_its_input_and_others_go_on(driver: Driver, decoder: CountingDecoder) -> None:
    released = []

    def feed(*ids: int, end: bool = False) -> Feed:
        return Feed("a", "", token_ids=ids, end=end, release=lambda: released.append(ids))

    waiting = driver.submit(run_of(None, max_tokens=50))
    other = driver.submit(run_of([3], max_tokens=20))
    driver.result(other)
    assert not driver.runs[waiting].outputs
    driver.engine.feed(waiting, feed(5, 6))
    driver.wait(lambda: len(driver.runs[waiting].outputs) == 1)
    driver.engine.feed(waiting, feed(7))
    driver.wait(lambda: len(driver.runs[waiting].outputs) == 2)
    driver.engine.feed(waiting, feed(end=True))
    driver.engine.feed(waiting, feed(8))
    seen = driver.result(waiting)
    assert seen.finished.reason == content_pb2.FINISH_REASON_STOP
    assert [float(total) for total in seen.tensor("totals")] == [11, 18, 26]
    driver.engine.feed(waiting, feed(9))
    late = driver.submit(run_of([1], max_tokens=1))
    driver.result(late)
    assert released == [(5, 6), (7,), (), (8,), (9,)]


def test_a_run_whose_source_ends_without_input_ends_with_what_was_held_back(driver: Driver) -> None:
    run = driver.submit(run_of(None))
    driver.engine.feed(run, Feed("a", "", end=True))
    seen = driver.result(run)
    assert seen.finished.reason == content_pb2.FINISH_REASON_STOP
    assert int(seen.tensor("last")) == 0


def test_a_run_that_cannot_give_what_it_held_back_fails_alone(driver: Driver, decoder: CountingDecoder) -> None:
    bad = run_of(None)
    decoder.fail_ended.add(bad.id)
    good = driver.submit(run_of([2], max_tokens=40))
    driver.submit(bad)
    driver.engine.feed(bad.id, Feed("a", "", end=True))
    assert driver.result(bad.id).failed.error.reason == Reason.STAGE_FAILED
    driver.result(good)
    assert drawn(decoder, good, 1) == expected([2], 39)


def test_input_that_comes_before_the_state_is_kept(driver: Driver, decoder: CountingDecoder) -> None:
    decoder.gate = threading.Event()
    run = driver.submit(run_of(None, max_tokens=1))
    driver.engine.feed(run, Feed("a", "", token_ids=[4, 4]))
    decoder.gate.set()
    assert float(driver.result(run).tensor("totals")) == 8


def test_a_run_that_cannot_be_prepared_fails_alone(driver: Driver, decoder: CountingDecoder) -> None:
    good = driver.submit(run_of([2], max_tokens=30))
    refused, broken = driver.submit(run_of([13])), driver.submit(run_of([14]))
    assert driver.result(refused).failed.error.reason == Reason.BAD_REQUEST
    error = driver.result(broken).failed.error
    assert error.reason == Reason.STAGE_FAILED
    assert error.request_id.startswith("req-")
    driver.result(good)
    assert drawn(decoder, good, 1) == expected([2], 29)


def test_a_run_that_breaks_a_step_fails_alone(driver: Driver, decoder: CountingDecoder) -> None:
    bad = run_of([2], max_tokens=30)
    decoder.fail_forward.add(bad.id)
    runs = submit_in_one_step(driver, decoder, run_of([1], max_tokens=30), bad, run_of([3], max_tokens=30))
    assert driver.result(runs[1]).failed.error.reason == Reason.STAGE_FAILED
    for run, first in ((runs[0], 1), (runs[2], 3)):
        driver.result(run)
        assert drawn(decoder, run, 1) == expected([first], 29)


def test_no_token_is_drawn_twice_when_a_step_breaks_after_its_draw(driver: Driver, decoder: CountingDecoder) -> None:
    bad, late = run_of([2], max_tokens=30), run_of(None, max_tokens=30)
    decoder.fail_sampled.add(bad.id)
    runs = submit_in_one_step(driver, decoder, run_of([1], max_tokens=30), bad, late)
    for run in runs[:2]:
        assert driver.result(run).failed.error.reason == Reason.STAGE_FAILED
    assert drawn(decoder, runs[0], 1) == expected([1], len(drawn(decoder, runs[0], 1)))
    driver.engine.feed(late.id, Feed("a", "", token_ids=[5, 6]))
    driver.wait(lambda: len(driver.runs[late.id].outputs) == 1)
    driver.engine.cancel(late.id)
    assert float(driver.result(late.id).tensor("totals")) == 11


def test_input_that_came_before_a_prompt_that_is_too_long_is_given_back(
    driver: Driver, decoder: CountingDecoder
) -> None:
    decoder.gate = threading.Event()
    released = threading.Event()
    run = driver.submit(run_of([1] * 65))
    driver.engine.feed(run, Feed("a", "", token_ids=[1], release=released.set))
    decoder.gate.set()
    assert driver.result(run).failed.error.reason == Reason.PROMPT_TOO_LONG
    assert released.wait(30)


def test_a_stop_token_that_the_model_does_not_have_is_never_drawn(driver: Driver, decoder: CountingDecoder) -> None:
    run = run_of([1], max_tokens=4, min_tokens=3, stop_token_ids=[1 << 31])
    driver.result(driver.submit(run))
    assert drawn(decoder, run.id, 1) == expected([1], 3)


class Watched(queue.SimpleQueue[Any]):
    """A mailbox that says when somebody waits at it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_at = threading.Event()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        if self.empty():
            self.waited_at.set()
        return super().get(*args, **kwargs)


def test_an_engine_is_busy_while_it_prepares_or_steps_and_not_while_runs_wait_for_input(
    decoder: CountingDecoder,
) -> None:
    engine = ArEngine(decoder, max_running=4, step_tokens=8)
    mailbox = engine._thread._mailbox = Watched()
    driver = Driver(engine)
    assert mailbox.waited_at.wait(30)
    assert not engine.load().busy
    mailbox.waited_at.clear()
    decoder.gate = threading.Event()
    waiting = driver.submit(run_of(None, max_tokens=5))
    assert decoder.preparing.acquire(timeout=30)
    assert mailbox.waited_at.wait(30)
    assert driver.engine.load().busy
    decoder.step_gate = threading.Event()
    decoder.gate.set()
    stepping = driver.submit(run_of([1], max_tokens=1))
    assert decoder.stepping.wait(30)
    assert driver.engine.load().busy
    mailbox.waited_at.clear()
    decoder.step_gate.set()
    driver.result(stepping)
    assert mailbox.waited_at.wait(30)
    assert (engine.load().running, engine.load().busy) == (1, False)
    engine.cancel(waiting)
    driver.result(waiting)
    driver.close()


def test_nan_fails_its_run_and_leaves_nothing_in_the_slot(driver: Driver, decoder: CountingDecoder) -> None:
    spoilt = run_of([7, 8], max_tokens=30)
    decoder.spoil.add(spoilt.id)
    assert driver.result(driver.submit(spoilt)).failed.error.reason == Reason.STAGE_FAILED
    assert not driver.runs[spoilt.id].outputs
    cache = driver.engine._cache  # type: ignore[attr-defined]
    assert not torch.any(cache._keys[0])


@pytest.mark.parametrize("moment", ["preparing", "queued to be prepared", "waiting", "running"])
def test_a_cancelled_run_ends_once_and_frees_its_place(driver: Driver, decoder: CountingDecoder, moment: str) -> None:
    others: list[int] = []
    if moment == "waiting":
        others = [driver.submit(run_of(None, max_tokens=5)) for _ in range(4)]
        settle(driver)
        assert driver.engine.load().running == 4
    if moment in ("preparing", "queued to be prepared"):
        decoder.gate = threading.Event()
    if moment == "queued to be prepared":
        others = [driver.submit(run_of([1], max_tokens=1))]
        assert decoder.preparing.acquire(timeout=30)
    if moment == "running":
        decoder.step_gate = threading.Event()
    run = driver.submit(run_of([1], max_tokens=60))
    if moment == "preparing":
        assert decoder.preparing.acquire(timeout=30)
    if moment == "running":
        assert decoder.stepping.wait(30)
    driver.engine.cancel(run)
    driver.engine.cancel(run)
    if decoder.step_gate is not None:
        decoder.step_gate.set()
    if moment == "queued to be prepared":
        driver.result(run)
    if decoder.gate is not None:
        decoder.gate.set()
    seen = driver.result(run)
    assert seen.finished.reason == content_pb2.FINISH_REASON_CANCELLED
    for other in others:
        driver.engine.cancel(other)
    driver.results(others)
    load = driver.engine.load()
    assert (load.running, load.waiting) == (0, 0)


def test_cancelling_a_run_gives_its_unread_input_back(driver: Driver, decoder: CountingDecoder) -> None:
    decoder.gate = threading.Event()
    released = threading.Event()
    run = driver.submit(run_of(None))
    driver.engine.feed(run, Feed("a", "", token_ids=[1], release=released.set))
    driver.engine.cancel(run)
    assert released.wait(30)
    decoder.gate.set()
    driver.result(run)


def test_a_held_run_makes_nothing_until_it_is_let_in_again(driver: Driver, decoder: CountingDecoder) -> None:
    decoder.step_gate = threading.Event()
    run = driver.submit(run_of([1], max_tokens=60))
    assert decoder.stepping.wait(30)
    driver.engine.hold(run, True)
    decoder.step_gate.set()
    driver.result(driver.submit(run_of([3], max_tokens=20)))
    assert len(driver.runs[run].outputs) == 1
    driver.engine.hold(run, False)
    assert driver.result(run).finished.usage.completion_tokens == 60


def test_load_counts_steps_and_tokens(driver: Driver) -> None:
    runs = [driver.submit(run_of([at], max_tokens=6)) for at in (1, 2)]
    driver.results(runs)
    load = driver.engine.load()
    assert load.units == 12
    assert 6 <= load.steps <= 12


def test_stop_drops_what_is_at_work(decoder: CountingDecoder) -> None:
    driver = Driver(ArEngine(decoder, max_running=1, step_tokens=8))
    waiting = [driver.submit(run_of(None)) for _ in range(3)]
    settle(driver)
    assert driver.engine.load().running == 1
    driver.engine.stop()
    assert all(driver.runs[run].end is None for run in waiting)
    assert (driver.engine.load().running, driver.engine.load().waiting) == (0, 0)


def test_a_run_carries_the_time_that_it_waited(driver: Driver) -> None:
    run: Run = run_of([1], max_tokens=1)
    assert 0 < driver.result(driver.submit(run)).finished.queued < 30


def test_a_cache_that_no_memory_holds_is_refused_with_what_to_lower() -> None:
    geometry = Geometry(2, 4, 64, 1 << 38, torch.float32, torch.device("cpu"))
    with pytest.raises(OmniError, match=r"32 runs \(`max_running`\) of 274877906944 positions .* lower one") as refused:
        SlotCache(geometry, 32)
    assert refused.value.reason is Reason.STAGE_FAILED
