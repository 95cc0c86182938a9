"""What the sections of both kinds of file share: strict reading, units, and errors that say where."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from omni.rpc.text import shown
from omnid.config.document import Document
from omnid.config.errors import ConfigError, Path, Problem, nearest

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Section(BaseModel):
    """A mapping with known keys only; values are taken as they are, never guessed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


SectionT = TypeVar("SectionT", bound=Section)


def _byte_count(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise PydanticCustomError("bytes", f"must be a number of bytes or one with a unit ({units})")
    return int(float(match[1]) * _UNITS[match[2]])


Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]
"""Of a stage or a pipeline."""
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
ModalityName = Literal["text", "image", "audio", "video", "action"]
Seconds = Annotated[float, Field(ge=0.001, le=31_536_000, allow_inf_nan=False)]
"""At least a millisecond: no clock here is finer, and what rounds to 0 would be no bound at all."""
ByteCount = Annotated[int, BeforeValidator(_byte_count), Field(ge=0, le=1 << 40)]
Count = Annotated[int, Field(ge=1, le=65_536)]


def _json_like(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("finite", "must be made of finite numbers")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_json_like(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json_like(item) for key, item in value.items()}
    raise PydanticCustomError("json", "must be made of text, numbers, booleans, lists and mappings")


Arguments = Annotated[dict[str, Any], BeforeValidator(_json_like)]
"""Keys that only their reader knows; it refuses those that it does not."""


def check(section: type[SectionT], document: Document) -> SectionT:
    """Reads a document as a section.

    Raises:
        ConfigError: with every mistake: file, line, path, value, what is allowed and the nearest name.
    """
    data = document.data if document.data is not None else {}
    try:
        return section.model_validate(data)
    except ValidationError as error:
        problems = [_problem(section, document, details) for details in error.errors(include_url=False)]
        raise ConfigError(problems) from None


def _problem(section: type[Section], document: Document, details: ErrorDetails) -> Problem:
    path = _written_path(details["loc"], document.data)
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        return document.problem(path, f"unknown key {path[-1]!r}; {nearest(path[-1], _keys_at(section, path[:-1]))}")
    if kind == "missing":
        return document.problem(path, "must be given")
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", details.get("ctx", {}).get("expected", ""))
        return document.problem(path, f"got {shown(value)}; {nearest(value, allowed)}")
    if kind == "value_error":  # One of our own checks, which says what it got.
        return document.problem(path, details["msg"].removeprefix("Value error, "))
    message = re.sub(r"^\w+ should ", "must ", details["msg"]).replace(" after validation", "")
    if kind == "model_type" or kind.startswith("dict_"):
        message = "must be a mapping"
    return document.problem(path, f"got {shown(value)}; {message}")


def _written_path(location: tuple[int | str, ...], data: object) -> Path:
    """The steps of pydantic's location that exist in the file (it adds steps of its own for unions and keys)."""
    path: list[str | int] = []
    for position, step in enumerate(location):
        inside = (isinstance(data, Mapping) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if inside:
            data = data[step]  # type: ignore[index]
            path.append(step)
        elif position == len(location) - 1 and step != "[key]":
            path.append(step)
    return tuple(path)


def _keys_at(section: type[Section], path: Path) -> list[str]:
    """Keys that a mapping at `path` may have."""
    kind: object = section
    for step in path:
        kind = _inner(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            fields = {info.alias or name: info.annotation for name, info in kind.model_fields.items()}
            kind = fields.get(str(step))
        elif get_origin(kind) is list:
            kind = get_args(kind)[0]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
    kind = _inner(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [info.alias or name for name, info in kind.model_fields.items()]
    return []


def _inner(kind: object) -> object:
    """What stands inside Annotated and Optional."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
        else:
            return kind
