"""Checks messages against the constraints that stand in the contract."""

import json

from google.protobuf.message import Message
from protovalidate import FieldPathPb, Validator

from omni.rpc.errors import FieldViolation, invalid

_VALIDATOR = Validator()


def validate(message: Message) -> None:
    """Checks `message` and all that it holds.

    Raises:
        OmniError: BAD_REQUEST, with one field violation for each broken constraint.
    """
    violations = _VALIDATOR.collect_violations(message)
    if not violations:
        return
    name = message.DESCRIPTOR.name
    raise invalid(*(FieldViolation(_path(each.proto.field) or name, each.proto.message) for each in violations))


def _path(path: FieldPathPb | None) -> str:
    """A field's path as people write it: ``params["thinker"].sampling.stop[2]``; "" for the message itself."""
    text = ""
    for element in path.elements if path else ():
        text += f".{element.field_name}" if text else element.field_name
        if element.subscript is not None:
            text += f"[{json.dumps(element.subscript.value)}]"
    return text
