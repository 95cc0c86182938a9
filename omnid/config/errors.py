"""What is wrong with a configuration, in words that name what its author can change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""Keys and list positions from the top of a file to a value."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written."""

    file: str
    """Path of the file, or "--set" for a value of the command line."""
    line: int = 0
    """From 1; 0 when there are no lines."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake."""

    place: Place
    path: Path
    message: str

    def __str__(self) -> str:
        where = f"{self.place}: {show_path(self.path)}" if self.path else str(self.place)
        return f"{where}: {self.message}"


class ConfigError(Exception):
    """A configuration that cannot be used, with every mistake that was found in it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


def show_path(path: Path) -> str:
    """("models", 0, "name") as "models[0].name"."""
    shown = ""
    for step in path:
        if isinstance(step, int):
            shown += f"[{step}]"
        else:
            shown += f".{step}" if shown else step
    return shown


def nearest(name: object, known: Iterable[str]) -> str:
    """The hint after a name that is not one of `known`: the closest one, and all that are allowed."""
    names = sorted(known)
    if not names:
        return "none is allowed here"
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(names)}"
