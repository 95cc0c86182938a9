"""Text-to-image pipelines of diffusers whose denoising can be run one step at a time, from a local folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni.v1 import config_pb2
    from stage_server.engines.base import Engine


def build(spec: config_pb2.StageSpec) -> Engine:
    """The engine of a diffusion stage, not yet started. Engine arguments: `max_side`, `max_pixels`.

    Raises:
        OmniError: UNKNOWN_PARAMETER or BAD_REQUEST for what is wrong with the spec.
    """
    from stage_server.engines.diffusion.engine import DiffusionEngine
    from stage_server.models.diffusers.pipeline import PipelineModel

    return DiffusionEngine(PipelineModel(spec), max_running=spec.max_running)
