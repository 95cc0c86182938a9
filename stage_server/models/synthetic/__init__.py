"""Scripted stages: a cluster without a model, for load and fault tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni.v1 import config_pb2
    from stage_server.engines.base import Engine


def build(spec: config_pb2.StageSpec) -> Engine:
    """The engine of a synthetic stage. Engine arguments: `start_seconds`, `fail_start`.

    Raises:
        OmniError: for what is wrong with the spec.
    """
    from stage_server.engines.synthetic import SyntheticEngine

    return SyntheticEngine(spec)
