"""Model families: a package each, with `build(spec) -> Engine`. A package is imported when a stage asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from omni.rpc.errors import FieldViolation, invalid
from omni.v1 import config_pb2
from stage_server.libraries import take_over

if TYPE_CHECKING:
    from stage_server.engines.base import Engine

FAMILIES: dict[str, tuple[str, ...]] = {
    "diffusers": ("diffusers", "transformers"),
    "qwen3_omni": ("transformers",),
    "synthetic": (),
    "text": ("transformers",),
}
"""Packages, and the libraries that load their models."""


def build(spec: config_pb2.StageSpec) -> Engine:
    """The engine of a stage, not yet started.

    Raises:
        OmniError: for what is wrong with the spec.
    """
    if spec.family not in FAMILIES:
        text = f"there is no model family {spec.family!r}; there are {', '.join(FAMILIES)}"
        raise invalid(FieldViolation("family", text))
    take_over(*FAMILIES[spec.family])
    engine: Engine = importlib.import_module(f"stage_server.models.{spec.family}").build(spec)
    return engine
