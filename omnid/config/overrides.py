"""Values of the command line laid over a deploy file, as if they had been written there."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from omni.rpc.text import shown
from omnid.config.deploy import DeployConfig
from omnid.config.document import Document, scalar
from omnid.config.errors import ConfigError, Path, Place, Problem, nearest
from omnid.config.section import check

_COMMAND_LINE = Place("--set")


def override(deploy: DeployConfig, overrides: Iterable[str]) -> DeployConfig:
    """A deployment with some values replaced: "models.tiny-omni.stages.thinker.max_running=4". Models are named, not
    counted.

    Raises:
        ConfigError: a path leads nowhere, or its value is not allowed there.
    """
    pairs = dict(map(_split, overrides))
    if not pairs:
        return deploy
    base = deploy.document
    document = Document(base.file, copy.deepcopy(base.data), dict(base.places))
    for dotted, value in pairs.items():
        _set(document, dotted, value)
    changed = check(DeployConfig, document)
    changed._document = document
    return changed


def _split(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not path or path.endswith("."):
        raise ConfigError([Problem(_COMMAND_LINE, (), f"got {shown(text)}; must be PATH=VALUE")])
    try:
        return path, scalar(value)
    except ConfigError as error:
        problems = [Problem(_COMMAND_LINE, (path, *each.path), each.message) for each in error.problems]
        raise ConfigError(problems) from None


def _set(document: Document, dotted: str, value: object) -> None:
    """Puts `value` in its place; mappings on the way are made where they are missing."""
    at: Any = document.data
    path: Path = ()
    rest = dotted
    while True:
        step, rest = _step(at, rest, dotted)
        path = (*path, step)
        if not rest:
            break
        if isinstance(at, dict) and at.get(step) is None:
            at[step] = {}
            document.places[path] = _COMMAND_LINE
        at = at[step]
        if not isinstance(at, dict | list):
            raise _nowhere(dotted, f"{'.'.join(map(str, path))} is a value and has no keys")
    at[step] = value
    document.places = {known: place for known, place in document.places.items() if known[: len(path)] != path}
    document.places[path] = _COMMAND_LINE


def _step(at: Any, rest: str, dotted: str) -> tuple[str | int, str]:
    """The next step of a path and what is left of it. Names of models may have dots of their own."""
    if isinstance(at, list):
        names = {item["name"]: index for index, item in enumerate(at) if isinstance(item, dict) and "name" in item}
        for name in sorted(names, key=len, reverse=True):
            if rest == name or rest.startswith(f"{name}."):
                return names[name], rest[len(name) + 1 :]
        raise _nowhere(
            dotted, f"no entry is named {rest.partition('.')[0]!r}; {nearest(rest.partition('.')[0], names)}"
        )
    head, _, tail = rest.partition(".")
    if not head:
        raise _nowhere(dotted, "a name between two dots is missing")
    return head, tail


def _nowhere(dotted: str, message: str) -> ConfigError:
    return ConfigError([Problem(_COMMAND_LINE, (dotted,), message)])
