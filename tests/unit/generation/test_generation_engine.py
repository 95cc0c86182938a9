"""The generation engine's order and ends, on a decoder that repeats what it is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, content_pb2
from stage_server.engines.base import Feed, Finished, Run
from stage_server.engines.generation.decoder import ChunkDecoder
from stage_server.engines.generation.engine import GenerationEngine, GenerationOptions
from tests.parity.driver import PATIENCE, Driver, run_of

BROKEN = 99.0


class Echo(ChunkDecoder[int]):
    """Frames [n] float are samples; counts the frames of a run. Steps wait while `gate` is shut."""

    input = "codes"
    sample_rate = 100

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches: list[list[int]] = []
        self.full = False
        """Whether nothing can be remembered of one more run."""

    def load(self) -> None: ...

    def open(self) -> int:
        if self.full:
            raise MemoryError
        return 0

    def take(self, frames: torch.Tensor) -> torch.Tensor:
        return frames.clone()

    def decode(self, rows: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, NDArray[np.float32]]]:
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        if any((frames == BROKEN).any() for _, frames in rows):
            raise ValueError("a broken frame")
        self.batches.append([len(frames) for _, frames in rows])
        return [(state + len(frames), frames.numpy()) for state, frames in rows]

    def unload(self) -> None: ...


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def driver(echo: Echo) -> Iterator[Driver]:
    driver = Driver(GenerationEngine(echo, GenerationOptions(chunk_frames=4, batch=3), max_running=4))
    yield driver
    echo.gate.set()
    driver.close()


def new_run(*, output: bool = True) -> Run:
    return replace(run_of(None), sources=(("talker", ""),), output=output)


def frames(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def give(driver: Driver, run: int, *chunks: torch.Tensor, end: bool = True) -> None:
    for chunk in chunks:
        driver.engine.feed(run, Feed("talker", "", tensors={"codes": [chunk]}))
    if end:
        driver.engine.feed(run, Feed("talker", "", end=True))


def samples(driver: Driver, run: int) -> int:
    return sum(piece.samples for output in driver.runs[run].outputs for piece in output.media)


def test_a_step_takes_at_most_a_chunk_of_each_run_and_a_batch_of_runs(echo: Echo, driver: Driver) -> None:
    echo.gate.clear()
    first = driver.submit(new_run())
    give(driver, first, frames(0.5))
    assert echo.entered.wait(PATIENCE)
    runs = [driver.submit(new_run()) for _ in range(4)]
    for run in runs:
        give(driver, run, torch.zeros(6))
    echo.gate.set()
    driver.results([first, *runs])
    assert echo.batches[0] == [1]
    assert max(len(batch) for batch in echo.batches) == 3
    assert max(size for batch in echo.batches for size in batch) == 4
    assert echo.batches[2][0] == 4, "a run without any sound yet goes before one that has some"


def test_a_step_is_delivered_once(driver: Driver, echo: Echo) -> None:
    echo.gate.clear()
    runs = [driver.submit(new_run()) for _ in range(3)]
    give(driver, runs[0], torch.zeros(1), end=False)
    assert echo.entered.wait(PATIENCE)
    for run in runs:
        give(driver, run, torch.zeros(2))
    echo.gate.set()
    driver.results(runs)
    assert len(driver.steps) == len(echo.batches) == 2


def test_a_held_run_waits_and_goes_on_where_it_was(driver: Driver) -> None:
    held, other = driver.submit(new_run()), driver.submit(new_run())
    driver.engine.hold(held, True)
    give(driver, held, frames(0.1, 0.2))
    give(driver, other, frames(0.3))
    driver.result(other)
    assert not driver.runs[held].outputs
    driver.engine.hold(held, False)
    assert driver.result(held).finished.usage.audio_samples == 2


def test_cancel_in_a_step_drops_what_it_made(driver: Driver, echo: Echo) -> None:
    echo.gate.clear()
    run = driver.submit(new_run())
    give(driver, run, torch.zeros(40), end=False)
    assert echo.entered.wait(PATIENCE)
    driver.engine.cancel(run)
    driver.engine.cancel(run)
    echo.gate.set()
    seen = driver.result(run)
    assert seen.finished.reason == content_pb2.FINISH_REASON_CANCELLED
    assert samples(driver, run) <= 4
    assert (driver.engine.load().running, driver.engine.load().waiting) == (0, 0)


def test_input_of_a_run_that_has_ended_is_released(driver: Driver) -> None:
    run = driver.submit(new_run())
    driver.engine.cancel(run)
    driver.result(run)
    released = threading.Event()
    driver.engine.feed(run, Feed("talker", "", tensors={"codes": [torch.zeros(3)]}, release=released.set))
    assert released.wait(PATIENCE)


def test_a_broken_run_fails_alone(driver: Driver, echo: Echo) -> None:
    echo.gate.clear()
    good, bad = driver.submit(new_run()), driver.submit(new_run())
    give(driver, good, frames(0.1), end=False)
    assert echo.entered.wait(PATIENCE)
    give(driver, good, frames(0.2))
    give(driver, bad, frames(BROKEN))
    echo.gate.set()
    assert driver.result(bad).failed.error.reason == Reason.STAGE_FAILED
    assert driver.result(good).finished.usage.audio_samples == 2


def test_a_run_that_cannot_be_let_in_fails_alone(driver: Driver, echo: Echo) -> None:
    echo.gate.clear()
    good = driver.submit(new_run())
    give(driver, good, frames(0.1), end=False)
    assert echo.entered.wait(PATIENCE)
    echo.full = True
    bad = driver.submit(new_run())
    give(driver, good, frames(0.2))
    echo.gate.set()
    assert driver.result(bad).failed.error.reason == Reason.STAGE_FAILED
    assert driver.result(good).finished.usage.audio_samples == 2


def test_a_lost_input_fails_its_run_with_the_readers_error(driver: Driver) -> None:
    def lost() -> None:
        raise OmniError(Reason.TENSOR_LOST, "taken back")

    run = driver.submit(new_run())
    driver.engine.feed(run, Feed("talker", "", tensors={"codes": [torch.zeros(3)]}, release=lost))
    assert driver.result(run).failed.error.reason == Reason.TENSOR_LOST


def test_a_run_without_frames_still_ends_its_artifact(driver: Driver) -> None:
    run = driver.submit(new_run())
    give(driver, run)
    seen = driver.result(run)
    [piece] = [piece for output in seen.outputs for piece in output.media]
    assert (piece.mime_type, piece.sample_rate, piece.data, piece.last) == ("audio/pcm", 100, b"", True)


def test_nothing_is_decoded_when_no_client_listens(driver: Driver, echo: Echo) -> None:
    run = driver.submit(new_run(output=False))
    give(driver, run, torch.zeros(9))
    seen = driver.result(run)
    assert isinstance(seen.end, Finished)
    assert not seen.outputs
    assert not echo.batches


def test_a_picture_format_is_refused(driver: Driver) -> None:
    run = new_run()
    run.params.format = config_pb2.MEDIA_FORMAT_PNG
    with pytest.raises(OmniError, match=r"MEDIA_FORMAT_PNG is no format of sound; known: .*MEDIA_FORMAT_WAV"):
        driver.submit(run)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chunk_frame": 3}, "did you mean chunk_frames"),
        ({"batch": 0}, "engine.batch: must be from 1 to 1024, got 0"),
        ({"batch": 1.5}, "engine.batch: must be a whole number"),
        ({"chunk_frames": "many"}, "engine.chunk_frames: must be a number"),
    ],
)
def test_engine_arguments_are_checked(given: dict[str, object], said: str) -> None:
    spec = config_pb2.StageSpec()
    spec.engine.update(given)
    with pytest.raises(OmniError, match=said):
        GenerationOptions.read(spec)
