"""A diffusers pipeline as the diffusion engine drives it: prompt, noise, one step, picture.

The steps are those of the pipeline's own modular blocks, so a picture is the one that the whole pipeline draws.
Scheduler and guider hold state of a picture; each picture has copies of its own, which are put in place for its turn.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stage_server.checkpoint import DTYPES, readable
from stage_server.device import device
from stage_server.engines.arguments import Arguments
from stage_server.engines.diffusion.model import Limits, PictureRequest
from stage_server.models.diffusers.families import Family, Guidance, family_of
from stage_server.models.length import check_length, too_long

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from omni.v1 import config_pb2

_TEXT_ENCODER = "text_encoder"
_SIDE = 1024
"""Width and height of a picture that a request does not size, as far as the model's positions allow."""


@dataclass(slots=True)
class Conditioning:
    """An encoded prompt: the state of the blocks after the text encoder, and the guider it was made for."""

    state: Any
    guider: Any


@dataclass(slots=True)
class Picture:
    """A picture on its way; implements `engines.diffusion.model.Sample`."""

    scheduler: Any
    guider: Any
    state: Any
    block_state: Any
    steps: int
    step: int = 0


class PipelineModel:
    """Implements `engines.diffusion.model.DiffusionModel`."""

    def __init__(self, spec: config_pb2.StageSpec) -> None:
        given = Arguments(spec.engine, "engine")
        self._max_side = given.integer("max_side", 2048, 64, 16384)
        self._max_pixels = given.integer("max_pixels", 2048 * 2048, 64 * 64, 1 << 28)
        given.done()
        self._stage = spec.stage
        self._folder = Path(spec.checkpoint)
        self._family: Family = family_of(self._folder)
        self._dtype = DTYPES.get(spec.dtype)

    def load(self) -> Limits:
        import diffusers
        from diffusers.modular_pipelines import LoopSequentialPipelineBlocks

        where = device()
        dtype = self._dtype or (torch.float32 if where.type == "cpu" else torch.bfloat16)
        with readable(self._folder):
            classic = diffusers.DiffusionPipeline.from_pretrained(
                self._folder, dtype=dtype, local_files_only=True, use_safetensors=True
            )
        classic.to(where)
        pipe = getattr(diffusers, self._family.blocks)().init_pipeline()
        known = {name: part for name, part in classic.components.items() if part is not None}
        pipe.update_components(**{name: part for name, part in known.items() if name in pipe.component_names})
        pipe.set_progress_bar_config(disable=True)
        self._pipe = pipe
        self._device = where
        self._blocks = pipe.blocks.get_execution_blocks(prompt=True)
        names = list(self._blocks.sub_blocks)
        at = next(
            index
            for index, block in enumerate(self._blocks.sub_blocks.values())
            if isinstance(block, LoopSequentialPipelineBlocks)
        )
        self._loop = self._blocks.sub_blocks[names[at]]
        self._before, self._after = names[names.index(_TEXT_ENCODER) + 1 : at], names[at + 1 :]
        self._scheduler = pipe.scheduler
        self._guider = getattr(pipe, "guider", None)
        multiple = int(pipe.vae_scale_factor) * 2
        max_side = min(self._max_side, _longest_side(pipe.transformer, multiple))
        side = min(_SIDE, max_side)
        return Limits(
            multiple=multiple,
            max_side=max_side,
            max_pixels=min(self._max_pixels, max_side * max_side),
            width=side,
            height=side,
            steps=self._family.steps,
            guidance_scale=self._family.guidance_scale,
            negative_prompt=self._family.negative_prompt,
        )

    def unload(self) -> None:
        del self._pipe

    def encode(self, request: PictureRequest) -> Conditioning:
        from diffusers.modular_pipelines import PipelineState

        self._check_length("prompt", request.prompt)
        if request.negative_prompt:
            self._check_length(f'params["{self._stage}"].diffusion.negative_prompt', request.negative_prompt)
        wanted: dict[str, Any] = {
            "prompt": request.prompt,
            "width": request.width,
            "height": request.height,
            "num_inference_steps": request.steps,
            "output_type": "np",
        }
        if request.negative_prompt:
            wanted["negative_prompt"] = request.negative_prompt
        if self._family.guidance is Guidance.EMBEDDED:
            wanted["guidance_scale"] = request.guidance_scale
        state = PipelineState()
        for parameter in self._blocks.inputs:
            value = wanted.get(parameter.name, parameter.default)
            if parameter.name in wanted or parameter.default is not None:
                state.set(parameter.name, value, parameter.kwargs_type)
        guider = self._guider_for(request)
        self._put_in_place(self._scheduler, guider)
        return Conditioning(self._run(state, [_TEXT_ENCODER]), guider)

    def begin(self, conditioning: Conditioning, request: PictureRequest, index: int) -> Picture:
        scheduler, guider = copy.deepcopy(self._scheduler), copy.deepcopy(conditioning.guider)
        self._put_in_place(scheduler, guider)
        state = copy.copy(conditioning.state)
        state.values = dict(conditioning.state.values)
        state.set("generator", torch.Generator(self._device).manual_seed(request.picture_seed(index)))
        state = self._run(state, self._before)
        block_state = self._loop.get_block_state(state)
        block_state.additional_cond_kwargs = {}
        return Picture(scheduler, guider, state, block_state, len(block_state.timesteps))

    def advance(self, sample: Picture) -> None:
        self._put_in_place(sample.scheduler, sample.guider)
        block_state = sample.block_state
        self._loop.loop_step(self._pipe, block_state, i=sample.step, t=block_state.timesteps[sample.step])
        sample.step += 1

    def decode(self, sample: Picture) -> NDArray[np.float32]:
        self._put_in_place(sample.scheduler, sample.guider)
        self._loop.set_block_state(sample.state, sample.block_state)
        picture: NDArray[np.float32] = self._run(sample.state, self._after).get("images")[0]
        return picture

    def _run(self, state: Any, names: list[str]) -> Any:
        for name in names:
            _, state = self._blocks.sub_blocks[name](self._pipe, state)
        return state

    def _put_in_place(self, scheduler: Any, guider: Any) -> None:
        self._pipe.scheduler = scheduler
        if guider is not None:
            self._pipe.guider = guider

    def _guider_for(self, request: PictureRequest) -> Any:
        """The guider that does what the family's own pipeline does with the scale."""
        kind = self._family.guidance
        if self._guider is None or kind is Guidance.EMBEDDED:
            return self._guider
        from diffusers.guiders import ClassifierFreeGuidance

        scale = request.guidance_scale
        if kind is Guidance.BLENDED:
            scale = max(scale, 1.0) if request.negative_prompt else 1.0
        return ClassifierFreeGuidance(guidance_scale=scale, use_original_formulation=kind is Guidance.ADDED)

    def _check_length(self, field: str, text: str) -> None:
        tokenizer = getattr(self._pipe, "tokenizer_2", None) or self._pipe.tokenizer
        check_length(field, text, tokenizer, self._family.tokens)
        tokens = len(tokenizer(text, truncation=False).input_ids)
        if tokens > self._family.tokens:
            raise too_long(field, f"has {tokens} tokens; at most {self._family.tokens} are taken")


def _longest_side(transformer: Any, multiple: int) -> int:
    """Pixels, as far as the transformer's table of positions reaches; where it computes them, without an end."""
    lengths = transformer.config.get("axes_lens")
    return min(lengths[1:]) * multiple if lengths else 1 << 16
