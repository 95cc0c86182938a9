"""The diffusion engine next to diffusers' own pipeline: the same pictures, alone and interleaved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline

from omni.rpc.errors import OmniError
from omni.v1 import config_pb2, content_pb2
from stage_server import models
from stage_server.checkpoint import located
from stage_server.engines.base import Run
from tests.parity.driver import Driver
from tests.parity.driver import run_of as driver_run
from tests.parity.pictures import pictures, psnr

SPEC = config_pb2.StageSpec(
    stage="dit",
    model="tiny-image",
    kind=config_pb2.STAGE_KIND_DIFFUSION,
    family="diffusers",
    checkpoint="asset:tiny_image",
    dtype="float32",
    max_running=4,
)
REQUESTS = {
    "a red circle above a blue square on a white background": (12, 1.0, 1, ""),
    "a small green star": (7, 1.0, 2, ""),
    "a yellow triangle on a gray background": (5, 0.0, 3, ""),
    "a large cyan ring": (6, 1.5, 4, "a red circle"),
}
"""Steps, guidance, seed, negative prompt."""


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver(models.build(located(SPEC)))
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    pipe = ZImagePipeline.from_pretrained(located(SPEC).checkpoint, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return {
        prompt: pipe(
            prompt,
            negative_prompt=negative or None,
            height=128,
            width=128,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images[0]
        for prompt, (steps, guidance, seed, negative) in REQUESTS.items()
    }


def run_of(prompt: str, **more: int) -> Run:
    steps, guidance, seed, negative = REQUESTS[prompt]
    params = config_pb2.DiffusionParams(width=128, height=128, steps=steps, guidance_scale=guidance, seed=seed, **more)
    if negative:
        params.negative_prompt = negative
    return replace(driver_run(prompt), params=config_pb2.StageParams(diffusion=params))


def test_one_picture_equals_the_pipelines(driver: Driver, reference: dict[str, np.ndarray]) -> None:
    prompt = next(iter(REQUESTS))
    (picture,) = pictures(driver.result(driver.submit(run_of(prompt))))
    assert psnr(picture, reference[prompt]) > 60


def test_interleaved_pictures_of_different_step_counts_equal_the_pipelines(
    driver: Driver, reference: dict[str, np.ndarray]
) -> None:
    runs = {prompt: driver.submit(run_of(prompt)) for prompt in REQUESTS}
    for prompt, run in runs.items():
        (picture,) = pictures(driver.result(run))
        assert psnr(picture, reference[prompt]) > 60, prompt


def test_progress_counts_every_step_and_usage_sums_them(driver: Driver) -> None:
    prompt = "a small green star"
    result = driver.result(driver.submit(run_of(prompt, outputs=2)))
    steps = [output.progress.step for output in result.outputs if output.progress is not None]
    assert steps == list(range(15))
    assert (result.finished.usage.steps, result.finished.usage.images) == (14, 2)
    first, second = pictures(result)
    assert psnr(first, second) < 40


def test_a_cancel_takes_effect_at_the_next_step(driver: Driver) -> None:
    run = run_of("a small green star")
    run.params.diffusion.steps = 1000
    number = driver.submit(run)
    driver.engine.cancel(number)
    finished = driver.result(number).finished
    assert finished.reason == content_pb2.FINISH_REASON_CANCELLED
    assert finished.usage.steps < 1000


@pytest.mark.parametrize(
    ("field", "value"), [("width", 130), ("height", 100000), ("frames", 3)], ids=["multiple", "limit", "frames"]
)
def test_what_the_model_cannot_draw_is_refused_with_the_field(driver: Driver, field: str, value: int) -> None:
    run = run_of("a small green star")
    setattr(run.params.diffusion, field, value)
    with pytest.raises(OmniError, match=field):
        driver.submit(run)
