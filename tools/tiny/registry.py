"""What a tiny model is, and where it is kept."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MARK = "tiny_recipe.json"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model made from random weights with a fixed seed, in seconds."""

    name: str
    version: int
    """Raised with every change of what `build` writes, so that kept copies are made anew."""
    build: str
    """Function that writes the checkpoint into an empty folder, "module:function"; imported only when it must run."""


def models_folder() -> Path:
    """Where models are kept: $OMNID_CACHE/models, else ~/.cache/omnid/models."""
    return Path(os.environ.get("OMNID_CACHE") or Path.home() / ".cache" / "omnid").expanduser() / "models"


def ensure(recipe: Recipe, into: Path | None = None) -> Path:
    """The model's folder, made first when it is not there or is of another version.

    Several processes may do so at once: each builds beside the others, and the first to finish provides the folder.
    """
    target = (into or models_folder()) / recipe.name
    if _version(target) == recipe.version:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{recipe.name}-", dir=target.parent) as scratch:
        fresh, stale = Path(scratch) / "fresh", Path(scratch) / "stale"
        fresh.mkdir()
        module, function = recipe.build.split(":")
        getattr(importlib.import_module(module), function)(fresh)
        (fresh / _MARK).write_text(json.dumps({"name": recipe.name, "version": recipe.version}) + "\n")
        if target.exists() and _version(target) != recipe.version:
            shutil.move(target, stale)
        try:
            fresh.rename(target)
        except OSError:
            if _version(target) != recipe.version:
                raise
    return target


def _version(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / _MARK).read_text())["version"])
    except (OSError, ValueError, KeyError):
        return None
