"""Sections made from messages of the contract, so that a parameter and its bounds are written down once."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import Field, create_model

from buf.validate import validate_pb2
from omni.v1 import config_pb2
from omnid.config.section import Section

_UNSIGNED = {FieldDescriptor.TYPE_UINT32: (1 << 32) - 1, FieldDescriptor.TYPE_UINT64: (1 << 64) - 1}
_FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
_NUMBER_BOUNDS = {"gte": "ge", "gt": "gt", "lte": "le", "lt": "lt"}
_TEXT_BOUNDS = {"min_len": "min_length", "max_len": "max_length", "pattern": "pattern"}


@cache
def section_of(descriptor: Descriptor) -> type[Section]:
    """The section with the message's fields as optional keys, bounded as the contract bounds them."""
    fields: dict[str, Any] = {}
    for field in descriptor.fields:
        rules = field.GetOptions().Extensions[validate_pb2.field]
        kind: Any
        if field.is_repeated:
            item = _scalar(field, rules.repeated.items)
            kind = Annotated[list[item], Field(**_bounds(rules.repeated, {"max_items": "max_length"}))]  # type: ignore[valid-type]
        else:
            kind = _scalar(field, rules)
        fields[field.name] = (kind | None, None)
    return cast("type[Section]", create_model(descriptor.name, __base__=Section, **fields))


def _scalar(field: FieldDescriptor, rules: validate_pb2.FieldRules) -> Any:
    which = rules.WhichOneof("type")
    own = getattr(rules, which) if which else None
    if field.type in _UNSIGNED:
        bounds = {"ge": 0, "le": _UNSIGNED[field.type]} | _bounds(own, _NUMBER_BOUNDS)
        return Annotated[int, Field(**bounds)]
    if field.type in _FLOATS:
        return Annotated[float, Field(allow_inf_nan=False, **_bounds(own, _NUMBER_BOUNDS))]
    if field.type == FieldDescriptor.TYPE_BOOL:
        return bool
    if field.type == FieldDescriptor.TYPE_STRING:
        return Annotated[str, Field(**_bounds(own, _TEXT_BOUNDS))]
    raise TypeError(f"{field.full_name}: a file has no way to write this type")


def _bounds(rules: Any, names: dict[str, str]) -> dict[str, Any]:
    """Those of `names` that the rules set, under pydantic's names."""
    if rules is None:
        return {}
    return {ours: getattr(rules, theirs) for theirs, ours in names.items() if rules.HasField(theirs)}


SamplingSection = section_of(config_pb2.SamplingParams.DESCRIPTOR)
DiffusionSection = section_of(config_pb2.DiffusionParams.DESCRIPTOR)

FormatName = Literal["pcm16", "wav", "mp3", "flac", "opus", "png", "jpeg", "webp", "mp4"]


def format_number(name: FormatName) -> config_pb2.MediaFormat.ValueType:
    return config_pb2.MediaFormat.Value(f"MEDIA_FORMAT_{name.upper()}")
