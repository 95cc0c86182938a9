"""Every family that the diffusion stage supports, next to its own pipeline of diffusers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2
from stage_server import models
from stage_server.checkpoint import located
from stage_server.engines.base import Run
from stage_server.models.diffusers.families import FAMILIES
from tests.parity.driver import Driver
from tests.parity.driver import run_of as driver_run
from tests.parity.pictures import pictures, psnr
from tools.tiny.diffusion import flux, qwen_image
from tools.tiny.folder import made

EQUAL = 60.0
"""Decibels from which on two pictures are the same; 40 would do for eyes."""
APART = 45.0
"""Decibels below which two pictures are of different requests."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A picture of a size that is no square, so that rows and columns cannot be taken for each other."""

    prompt: str
    steps: int
    scale: float
    seed: int
    negative: str = ""
    width: int = 64
    height: int = 96


CIRCLE = Asked("a red circle above a blue square", 6, 3.5, 1)
STAR = Asked("a small green star", 4, 1.5, 2)


@dataclass(frozen=True, slots=True)
class Case:
    """A family: where it is found, what its pipeline calls the scale, and what is asked of it."""

    name: str
    pipeline: str
    checkpoint: Callable[[], str]
    scale: str
    multiple: int
    """Of width and height, in pixels."""
    requests: tuple[Asked, ...]
    """The first two are also drawn in turns."""


CASES = (
    Case(
        "z-image",
        "ZImagePipeline",
        lambda: "asset:tiny_image",
        "guidance_scale",
        8,
        (CIRCLE, replace(STAR, negative="a red circle")),
    ),
    Case("flux", "FluxPipeline", lambda: str(made(flux)), "guidance_scale", 16, (CIRCLE, STAR)),
    Case(
        "qwen-image",
        "QwenImagePipeline",
        lambda: str(made(qwen_image)),
        "true_cfg_scale",
        16,
        (
            replace(CIRCLE, negative="a yellow triangle, and much text around it"),
            replace(STAR, negative=" "),
            CIRCLE,
            replace(CIRCLE, negative="a yellow triangle", scale=1.0),
            replace(CIRCLE, negative="a yellow triangle", scale=0.5),
        ),
    ),
)


def spec_of(checkpoint: str, **engine: int) -> config_pb2.StageSpec:
    spec = config_pb2.StageSpec(
        stage="dit",
        model="pictures",
        kind=config_pb2.STAGE_KIND_DIFFUSION,
        family="diffusers",
        checkpoint=checkpoint,
        dtype="float32",
        max_running=4,
    )
    spec.engine.update(engine)
    return located(spec)


class Pair:
    """A family's engine, and its own pipeline."""

    def __init__(self, case: Case) -> None:
        self.case = case
        spec = spec_of(case.checkpoint())
        self.driver = Driver(models.build(spec))
        self._pipe = diffusers.DiffusionPipeline.from_pretrained(spec.checkpoint, dtype=torch.float32)
        self._pipe.set_progress_bar_config(disable=True)

    def reference(self, asked: Asked) -> np.ndarray:
        more: dict[str, Any] = {self.case.scale: asked.scale}
        if asked.negative:
            more["negative_prompt"] = asked.negative
        picture: np.ndarray = self._pipe(
            asked.prompt,
            width=asked.width,
            height=asked.height,
            num_inference_steps=asked.steps,
            generator=torch.Generator().manual_seed(asked.seed),
            output_type="np",
            **more,
        ).images[0]
        return picture


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    torch.set_num_threads(1)
    pair = Pair(request.param)
    yield pair
    pair.driver.close()


def run_of(asked: Asked) -> Run:
    params = config_pb2.DiffusionParams(
        width=asked.width, height=asked.height, steps=asked.steps, guidance_scale=asked.scale, seed=asked.seed
    )
    if asked.negative:
        params.negative_prompt = asked.negative
    return replace(driver_run(asked.prompt), params=config_pb2.StageParams(diffusion=params))


def test_no_family_is_left_out() -> None:
    assert {case.pipeline for case in CASES} == FAMILIES.keys()


def test_one_picture_equals_the_pipelines(pair: Pair) -> None:
    for asked in pair.case.requests:
        (picture,) = pictures(pair.driver.result(pair.driver.submit(run_of(asked))))
        assert picture.shape == (asked.height, asked.width, 3)
        assert psnr(picture, pair.reference(asked)) > EQUAL, asked


def test_two_pictures_drawn_in_turns_equal_the_pipelines(pair: Pair) -> None:
    """Their steps, scales, seeds and negative prompts differ."""
    asked = pair.case.requests[:2]
    runs = pair.driver.submit_together([run_of(each) for each in asked])
    for each, seen in zip(asked, pair.driver.results(runs), strict=True):
        (picture,) = pictures(seen)
        assert psnr(picture, pair.reference(each)) > EQUAL, each
    turns = [event.run for step in pair.driver.steps for event in step if event.run in runs]
    assert turns.index(runs[1]) < len(turns) - 1 - turns[::-1].index(runs[0]), "they did not take turns"


def test_everything_that_is_asked_for_shows_in_the_picture(pair: Pair) -> None:
    """Else an equal picture would say little."""
    asked = pair.case.requests[0]
    changed = [
        replace(asked, prompt=STAR.prompt),
        replace(asked, steps=asked.steps - 3),
        replace(asked, seed=asked.seed + 1),
    ]
    if FAMILIES[pair.case.pipeline].negative_prompt:
        changed.append(replace(asked, negative="a large cyan ring"))
    changed.append(replace(asked, scale=asked.scale - 2.0))
    picture = pair.reference(asked)
    for each in changed:
        assert psnr(np.round(picture * 255) / 255, pair.reference(each)) < APART, each


@pytest.mark.parametrize(("field", "multiples"), [("width", 4.5), ("height", 0.5), ("width", 0), ("height", 1 << 14)])
def test_a_side_that_cannot_be_drawn_is_refused_with_what_can(pair: Pair, field: str, multiples: float) -> None:
    run, value = run_of(pair.case.requests[0]), int(multiples * pair.case.multiple)
    setattr(run.params.diffusion, field, value)
    allowed = rf"must be a multiple of {pair.case.multiple} from {pair.case.multiple} to \d+ pixels, got {value}"
    with pytest.raises(OmniError, match=rf"params\.diffusion\.{field}: {allowed}") as caught:
        pair.driver.submit(run)
    assert caught.value.reason is Reason.BAD_REQUEST


def test_a_negative_prompt_is_taken_just_where_the_family_has_one(pair: Pair) -> None:
    run = run_of(replace(STAR, negative="a red circle"))
    if FAMILIES[pair.case.pipeline].negative_prompt:
        assert pictures(pair.driver.result(pair.driver.submit(run)))
    else:
        with pytest.raises(OmniError, match=r"negative_prompt.*takes none"):
            pair.driver.submit(run)


def test_a_prompt_longer_than_the_family_reads_fails_its_run_alone(pair: Pair) -> None:
    most = FAMILIES[pair.case.pipeline].tokens
    long = pair.driver.submit(run_of(replace(STAR, prompt="star " * most)))
    short = pair.driver.submit(run_of(STAR))
    error = pair.driver.result(long).failed.error
    assert error.reason is Reason.PROMPT_TOO_LONG
    assert f"at most {most} are taken" in error.message
    assert pictures(pair.driver.result(short))


@pytest.fixture(scope="module")
def unsupported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that diffusers itself draws with."""
    folder = tmp_path_factory.mktemp("ddpm")
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(folder)
    return folder


def test_a_pipeline_of_another_family_is_refused_with_those_that_are_supported(unsupported: Path) -> None:
    with pytest.raises(OmniError) as caught:
        models.build(spec_of(str(unsupported)))
    assert caught.value.reason is Reason.BAD_REQUEST
    (field,) = caught.value.fields
    assert field.field == "checkpoint"
    assert str(unsupported) in field.description
    assert "holds a DDPMPipeline" in field.description
    for name in FAMILIES:
        assert name in field.description


@pytest.mark.parametrize("index", [None, "{", "[]", "{}", json.dumps({"_class_name": 3})])
def test_a_folder_that_holds_no_pipeline_is_refused(tmp_path: Path, index: str | None) -> None:
    if index is not None:
        (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(OmniError, match=f"{tmp_path}.* model_index.json|{tmp_path}/model_index.json") as caught:
        models.build(spec_of(str(tmp_path)))
    assert caught.value.fields[0].field == "checkpoint"


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("transformer", "tiny-flux .* lacks transformer$"),
        ("vae/*.safetensors", "tiny-flux/vae .* lacks \\*.safetensors$"),
    ],
)
def test_a_pipeline_that_lacks_a_part_is_refused_with_its_name(tmp_path: Path, gone: str, named: str) -> None:
    folder = tmp_path / "tiny-flux"
    shutil.copytree(made(flux), folder)
    for path in folder.glob(gone):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    with pytest.raises(OmniError, match=named):
        models.build(spec_of(str(folder)))


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_checkpoint_with_broken_weights_is_refused_by_name(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(made(flux), folder)
    (weights,) = (folder / part).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(OmniError, match=f"{folder} cannot be loaded") as caught:
        models.build(spec_of(str(folder))).start(lambda events: None)
    assert caught.value.reason is Reason.BAD_REQUEST
