"""Where models with random weights lie: each is made once by a process that asks for it, and is gone with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_folders: list[TemporaryDirectory[str]] = []
"""A folder is removed when nothing refers to it, at the latest when the process ends."""


@cache
def made(build: Callable[[Path], None]) -> Path:
    """The folder of the model that `build` writes, in under a second."""
    _folders.append(TemporaryDirectory(prefix=f"{build.__name__}-"))
    folder = Path(_folders[-1].name)
    build(folder)
    return folder
