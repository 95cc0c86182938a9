"""The drawing model through the whole cluster: over HTTP the same pictures as its own pipeline of diffusers draws."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline
from PIL import Image

from stage_server.checkpoint import ASSETS
from tests.parity.pictures import psnr

EQUAL = 60.0
"""Decibels from which on two pictures are the same; 40 would do for eyes."""
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "a red circle above a blue square on a white background", "size": "128x128", "seed": 1, "n": 2},
    {"prompt": "a small green star", "size": "64x96", "seed": 2, "num_inference_steps": 7, "guidance_scale": 1.5},
    {
        "prompt": "a large cyan ring",
        "size": "96x64",
        "seed": 3,
        "num_inference_steps": 5,
        "guidance_scale": 2.0,
        "negative_prompt": "a red circle",
    },
)
DEFAULTS = {"num_inference_steps": 20, "guidance_scale": 1.0}
"""Of the demo deployment."""


@pytest.fixture(scope="module")
def pipeline() -> ZImagePipeline:
    torch.set_num_threads(1)
    pipe = ZImagePipeline.from_pretrained(ASSETS / "tiny_image", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe: ZImagePipeline, body: dict[str, Any]) -> list[np.ndarray]:
    width, height = map(int, body["size"].split("x"))
    asked = DEFAULTS | body
    return [
        pipe(
            asked["prompt"],
            negative_prompt=asked.get("negative_prompt"),
            width=width,
            height=height,
            num_inference_steps=asked["num_inference_steps"],
            guidance_scale=asked["guidance_scale"],
            generator=torch.Generator().manual_seed(asked["seed"] + index),
            output_type="np",
        ).images[0]
        for index in range(asked.get("n", 1))
    ]


async def test_pictures_asked_for_at_once_are_those_that_the_pipeline_draws(demo, pipeline: ZImagePipeline) -> None:
    async with httpx.AsyncClient(base_url=demo.http, timeout=60) as client, asyncio.TaskGroup() as tasks:
        posts = [
            tasks.create_task(client.post("/v1/images/generations", json={"model": "tiny-image"} | body))
            for body in BODIES
        ]
        answers = await asyncio.gather(*posts)
    for body, answer in zip(BODIES, answers, strict=True):
        assert answer.status_code == 200, answer.text
        expected = drawn(pipeline, body)
        data = answer.json()["data"]
        assert len(data) == len(expected)
        for each, reference in zip(data, expected, strict=True):
            picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(each["b64_json"])))) / 255
            assert picture.shape == reference.shape
            assert psnr(picture, reference) > EQUAL, body


async def test_a_size_that_the_model_cannot_draw_is_refused_with_those_that_it_can(demo) -> None:
    async with httpx.AsyncClient(base_url=demo.http, timeout=60) as client:
        answer = await client.post("/v1/images/generations", json=BODIES[0] | {"model": "tiny-image", "size": "60x64"})
    assert answer.status_code == 400
    assert "must be a multiple of 8 from 8 to" in answer.json()["error"]["message"]
