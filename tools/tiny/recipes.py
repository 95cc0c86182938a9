"""All tiny models, by name."""

from __future__ import annotations

from pathlib import Path

from tools.tiny.registry import Recipe, ensure

_ALL = (
    Recipe("tiny-flux", 1, "tools.tiny.diffusion:flux"),
    Recipe("tiny-omni", 2, "tools.tiny.qwen3_omni:build"),
    Recipe("tiny-qwen-image", 1, "tools.tiny.diffusion:qwen_image"),
    Recipe("tiny-text", 1, "tools.tiny.text:qwen3"),
    Recipe("tiny-text-window", 1, "tools.tiny.text:mistral"),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}


def model(name: str) -> Path:
    """The folder of a tiny model, made when it is not there."""
    return ensure(RECIPES[name])
