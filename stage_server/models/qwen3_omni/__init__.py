"""Qwen3-Omni: thinker, talker and code2wav, from a checkpoint in transformers' standard layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni.rpc.errors import FieldViolation, invalid

if TYPE_CHECKING:
    from omni.v1 import config_pb2
    from stage_server.engines.base import Engine

COMPONENTS = ("thinker", "talker", "code2wav")


def build(spec: config_pb2.StageSpec) -> Engine:
    """The engine of one component, not yet started.

    Raises:
        OmniError: UNKNOWN_PARAMETER or BAD_REQUEST for what is wrong with the spec.
    """
    if spec.component == "thinker":
        from stage_server.models.qwen3_omni import thinker

        return thinker.build(spec)
    if spec.component == "talker":
        from stage_server.models.qwen3_omni import talker

        return talker.build(spec)
    if spec.component == "code2wav":
        from stage_server.models.qwen3_omni import code2wav

        return code2wav.build(spec)
    text = f"qwen3_omni has no component {spec.component!r}; it has {', '.join(COMPONENTS)}"
    raise invalid(FieldViolation("component", text))
