"""A YAML file as plain data that remembers on which line each value stands."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from omni.rpc.text import shown
from omnid.config.errors import ConfigError, Path, Place, Problem, nearest

DEEPEST = 64
"""Lists and mappings inside each other."""
MOST_VALUES = 100_000
"""Of one file, with each alias counted as what it stands for."""

_UNNAMEABLE = re.compile(r"[\0\ud800-\udfff]")
"""Of no file, host or environment variable, and of no text of the contract: NUL, and halves of characters."""
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


@dataclass(slots=True)
class Document:
    """Data as YAML gave it: dictionaries with string keys, lists and scalars."""

    file: str
    data: Any
    places: dict[Path, Place] = field(default_factory=dict)

    @property
    def folder(self) -> FilePath:
        """What relative names in the file are relative to."""
        return FilePath(self.file).parent

    def place(self, path: Path) -> Place:
        """Where the value at `path`, or the closest one around it, was written."""
        for end in range(len(path), -1, -1):
            if (found := self.places.get(path[:end])) is not None:
                return found
        return Place(self.file)

    def problem(self, path: Path, message: str) -> Problem:
        return Problem(self.place(path), path, message)


def locate(folder: FilePath, name: str) -> FilePath:
    """Where a file or folder lies that is named in a file of `folder`; "~" and "~user" are homes."""
    with contextlib.suppress(RuntimeError):  # There is no such user: then there is no such file either.
        return folder / FilePath(name).expanduser()
    return folder / name


def read(file: FilePath) -> Document:
    """Reads a file.

    Raises:
        ConfigError: it cannot be read, is not YAML, or uses what YAML has and a configuration has not: keys that are
            not strings, keys given twice, tags, characters that no name can hold, variables that are not set, aliases
            of what they stand in, more than `DEEPEST` levels or `MOST_VALUES` values.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError([Problem(Place(str(file)), (), f"cannot be read: {reason}")]) from None
    return parse(text, str(file))


def parse(text: str, file: str, environment: Mapping[str, str] | None = None) -> Document:
    """Turns the text of `file` into data; raises as `read` does."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError([Problem(Place(file, line), (), f"not YAML: {error.problem or error.context}")]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem(Place(file, line), (), f"not YAML: {error.reason}")]) from None
    reader = _Reader(file, os.environ if environment is None else environment)
    data = reader.value(node, ()) if node is not None else None
    if reader.problems:
        raise ConfigError(reader.problems)
    return Document(file, data, reader.places)


def scalar(text: str) -> Any:
    """A value of the command line, read as YAML reads it: "4" is a number, "[a, b]" a list.

    Raises:
        ConfigError: it is not YAML.
    """
    return parse(text, "--set", {}).data


class _Loader(yaml.SafeLoader):
    """Composes nodes of bounded depth: PyYAML itself goes as deep as the file does, until Python's stack ends."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {DEEPEST} levels", problem_mark=mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, file: str, environment: Mapping[str, str]) -> None:
        self.places: dict[Path, Place] = {}
        self.problems: list[Problem] = []
        self._file = file
        self._environment = environment
        self._loader = yaml.SafeLoader("")
        self._open: set[int] = set()
        """Lists and mappings that are being read: an alias of one of them would never end."""
        self._values = 0

    def value(self, node: yaml.Node, path: Path) -> Any:
        place = self.places.setdefault(path, Place(self._file, node.start_mark.line + 1))
        self._values += 1
        if self._values > MOST_VALUES:
            raise ConfigError([Problem(place, path, f"holds more than {MOST_VALUES} values, aliases counted out")])
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self.problems.append(Problem(place, path, "is an alias of what it stands in, and so would never end"))
            return None
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            read: Any = self._mapping(node, path)
        else:
            read = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        self._open.discard(id(node))
        return read

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = Place(self._file, key_node.start_mark.line + 1)
            key = key_node.value
            if not isinstance(key, str) or key_node.tag == "tag:yaml.org,2002:merge" or _UNNAMEABLE.search(key):
                self.problems.append(Problem(place, path, "keys must be plain names"))
                continue
            if key in found:
                first = self.places[(*path, key)]
                self.problems.append(Problem(place, (*path, key), f"given twice; first on line {first.line}"))
                continue
            self.places[(*path, key)] = place
            found[key] = self.value(value_node, (*path, key))
        return found

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        place = self.places[path]
        text: str = node.value
        expanded = _VARIABLE.sub(lambda match: self._variable(match, place, path), text)
        if expanded != text:
            # What stood without quotes has its type by what it became: ${REPLICAS:-2} is a number.
            tag = self._loader.resolve(yaml.ScalarNode, expanded, (node.style is None, False))  # type: ignore[no-untyped-call]
            node = yaml.ScalarNode(tag, expanded, node.start_mark, node.end_mark)
        try:
            value = self._loader.construct_object(node, deep=True)
            if isinstance(value, int) and value.bit_length() > 64:
                raise ValueError("a number that nothing here can hold, and that Python would not even print")
        except (yaml.YAMLError, ValueError, LookupError, AttributeError):  # Tags that do not fit raise any of them.
            tag = node.tag.rpartition(":")[2]
            self.problems.append(Problem(place, path, f"cannot be read as {tag}: {shown(expanded)}"))
            return None
        if isinstance(value, str) and _UNNAMEABLE.search(value):
            self.problems.append(Problem(place, path, f"got {shown(value)}; holds a character that no name can hold"))
            return None
        return value

    def _variable(self, match: re.Match[str], place: Place, path: Path) -> str:
        name, default = match["name"], match["default"]
        value = self._environment.get(name) or default
        if value is None:
            close = nearest(name, [known for known in self._environment if known.startswith(name[:3])])
            hint = close.partition("allowed:")[0] if "did you mean" in close else ""
            message = f"environment variable {name} is not set; {hint}give it a value or a default: ${{{name}:-...}}"
            self.problems.append(Problem(place, path, message))
            return ""
        return value
