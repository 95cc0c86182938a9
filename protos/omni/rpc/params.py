"""A request's parameters: laid over defaults, and checked where several processes know what is allowed."""

from collections.abc import Sequence

from google.protobuf import struct_pb2
from google.protobuf.message import Message

from omni.rpc.errors import FieldViolation, invalid
from omni.rpc.text import shown
from omni.v1 import config_pb2


def overlay(defaults: config_pb2.StageParams, own: config_pb2.StageParams) -> config_pb2.StageParams:
    """`defaults` with each field that `own` sets taken from `own`; neither is changed.

    Messages are laid over field by field and ``extra`` key by key (at its top level); a list that is not empty
    replaces the default's list.
    """
    result = config_pb2.StageParams()
    result.CopyFrom(defaults)
    _lay(result, own)
    return result


def check_voice(params: config_pb2.StageParams, voices: Sequence[str], field: str) -> None:
    """Refuses a voice that is none of `voices`, in any case of its letters.

    Raises:
        OmniError: BAD_REQUEST, about `field`.
    """
    if params.HasField("voice") and params.voice.lower() not in map(str.lower, voices):
        told = f"must be one of {', '.join(voices)}, got {shown(params.voice)}"
        raise invalid(FieldViolation(field, told))


def _lay(base: Message, top: Message) -> None:
    for field, value in top.ListFields():
        below = getattr(base, field.name)
        if isinstance(value, struct_pb2.Struct):
            for key, entry in value.fields.items():
                below.fields[key].CopyFrom(entry)
            below.SetInParent()
        elif isinstance(value, Message):
            below.SetInParent()
            _lay(below, value)
        elif field.is_repeated:
            base.ClearField(field.name)
            getattr(base, field.name).extend(value)
        else:
            setattr(base, field.name, value)
