"""Encoding jobs keep their order in a lane, run side by side across lanes, and hold a fast producer back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from stage_server.output.pool import EncodePool

WAIT = 10.0
"""Seconds that no wait here comes near unless the pool is broken."""


@pytest.fixture
def pool() -> Iterator[EncodePool]:
    pool = EncodePool(workers=2, pending=4)
    yield pool
    pool.stop()


def test_jobs_of_a_lane_run_in_order(pool: EncodePool) -> None:
    lane, seen, done = pool.lane(), [], threading.Event()
    for number in range(100):
        lane.submit(lambda number=number: seen.append(number))
    lane.submit(done.set)
    assert done.wait(WAIT)
    assert seen == list(range(100))


def test_a_blocked_lane_does_not_hold_up_another(pool: EncodePool) -> None:
    gate, done = threading.Event(), threading.Event()
    pool.lane().submit(lambda: gate.wait(WAIT) and None)
    pool.lane().submit(done.set)
    assert done.wait(WAIT)
    gate.set()


def test_a_full_pool_holds_its_producer_back(pool: EncodePool) -> None:
    gate, through = threading.Event(), threading.Event()
    lane = pool.lane()
    for _ in range(4):
        lane.submit(lambda: gate.wait(WAIT) and None)

    def one_more() -> None:
        lane.submit(lambda: None)
        through.set()

    producer = threading.Thread(target=one_more)
    producer.start()
    assert not through.wait(0.05)
    gate.set()
    assert through.wait(WAIT)
    producer.join(WAIT)


def test_a_job_that_fails_does_not_stop_its_lane(pool: EncodePool, caplog: pytest.LogCaptureFixture) -> None:
    lane, done = pool.lane(), threading.Event()
    lane.submit(lambda: 1 // 0 and None)
    lane.submit(done.set)
    assert done.wait(WAIT)
    assert "an encoding job failed" in caplog.text


def test_a_stopped_pool_takes_nothing_more() -> None:
    pool = EncodePool()
    pool.stop()
    with pytest.raises(RuntimeError):
        pool.lane().submit(lambda: None)
