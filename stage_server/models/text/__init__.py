"""Any causal language model that transformers loads, from a local checkpoint: text in, text out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni.v1 import config_pb2
    from stage_server.engines.base import Engine


def build(spec: config_pb2.StageSpec) -> Engine:
    """The engine of a text stage, not yet started. Engine arguments: those of `settings.sizes`.

    Raises:
        OmniError: UNKNOWN_PARAMETER or BAD_REQUEST for what is wrong with the spec.
    """
    from stage_server.device import device
    from stage_server.engines.ar import settings
    from stage_server.engines.ar.engine import ArEngine
    from stage_server.models.text.decoder import TextDecoder

    sizes = settings.sizes(spec)
    decoder = TextDecoder(spec, device(), max_length=sizes.max_length)
    return ArEngine(decoder, max_running=spec.max_running, step_tokens=sizes.step_tokens)
