"""Which pipelines of diffusers run step by step here, and how each of them is guided."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stage_server.checkpoint import WEIGHTS, readable, refused, require

INDEX = "model_index.json"
"""Names a pipeline's class, and those of its parts."""


class Guidance(Enum):
    """How a family's own pipeline reads `guidance_scale`."""

    ADDED = "prediction + scale * (prediction - negative); 0 switches it off"
    BLENDED = "negative + scale * (prediction - negative), where a negative prompt is given; 1 and less switch it off"
    EMBEDDED = "the transformer itself takes the scale"


@dataclass(frozen=True, slots=True)
class Family:
    """One pipeline class."""

    blocks: str
    """Its modular form in diffusers."""
    guidance: Guidance
    steps: int
    guidance_scale: float
    negative_prompt: bool
    tokens: int
    """Longest prompt, in tokens of its tokenizer."""


FAMILIES = {
    "ZImagePipeline": Family("ZImageAutoBlocks", Guidance.ADDED, 50, 5.0, True, 512),
    "QwenImagePipeline": Family("QwenImageAutoBlocks", Guidance.BLENDED, 50, 4.0, True, 1024),
    "FluxPipeline": Family("FluxAutoBlocks", Guidance.EMBEDDED, 28, 3.5, False, 512),
}


def family_of(folder: Path) -> Family:
    """The family of a pipeline folder.

    Raises:
        OmniError: BAD_REQUEST, when it is none, lacks a part, or is of a class that does not run step by step here.
    """
    require(folder, INDEX)
    path = folder / INDEX
    with readable(path):
        index = json.loads(path.read_text(encoding="utf-8"))
    name = index.get("_class_name") if isinstance(index, dict) else None
    if not isinstance(name, str):
        raise refused(f"{path} names no _class_name of a diffusers pipeline")
    if name not in FAMILIES:
        raise refused(f"{folder} holds a {name}; those that run step by step here: {', '.join(FAMILIES)}")
    for part, kind in index.items():
        if isinstance(kind, list) and None not in kind:
            require(folder, part)
            if (folder / part / "config.json").is_file():  # Of a model; schedulers and tokenizers have no weights.
                require(folder / part, WEIGHTS)
    return FAMILIES[name]
