"""Reads free-form settings (`StageSpec.engine`, `StageParams.extra`) and refuses what nobody asked for."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid

if TYPE_CHECKING:
    from google.protobuf import struct_pb2

    from omni.v1 import config_pb2

_KINDS = {
    "null_value": "null",
    "number_value": "a number",
    "string_value": "a string",
    "bool_value": "true or false",
    "struct_value": "a map",
    "list_value": "a list",
}


def refuse_unused(params: config_pb2.StageParams, *names: str) -> None:
    """Refuses parameters that a stage has no use for: `names` of the fields of StageParams.

    Raises:
        OmniError: UNKNOWN_PARAMETER, naming each that is set.
    """
    wrong = [
        FieldViolation(f"params.{name}", "this stage has no use for it") for name in names if params.HasField(name)
    ]
    if wrong:
        raise invalid(*wrong, reason=Reason.UNKNOWN_PARAMETER)


class Arguments:
    """Values of a Struct, each asked for once by name; then `done` refuses the keys that are left.

    Args:
        values: what was given.
        path: where it stands in the request or deployment, "engine" or "params.extra": errors name it.
    """

    def __init__(self, values: struct_pb2.Struct, path: str) -> None:
        self._values = values.fields
        self._path = path
        self._known: list[str] = []

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number between `low` and `high`, both allowed.

        Raises:
            OmniError: BAD_REQUEST, it is something else.
        """
        value = self._take(name, "number_value", f"a number from {low:g} to {high:g}")
        if value is None:
            return default
        number = value.number_value
        if not low <= number <= high:
            raise self._bad(name, f"must be from {low:g} to {high:g}, got {number:g}")
        return number

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number between `low` and `high`, both allowed.

        Raises:
            OmniError: BAD_REQUEST, it is something else.
        """
        number = self.number(name, default, low, high)
        if number != int(number):
            raise self._bad(name, f"must be a whole number, got {number:g}")
        return int(number)

    def flag(self, name: str, default: bool) -> bool:
        """True or false.

        Raises:
            OmniError: BAD_REQUEST, it is something else.
        """
        value = self._take(name, "bool_value", "true or false")
        return default if value is None else value.bool_value

    def done(self) -> None:
        """Refuses keys that were not asked for.

        Raises:
            OmniError: UNKNOWN_PARAMETER, naming the key and the nearest known one.
        """
        unknown = sorted(set(self._values) - set(self._known))
        if not unknown:
            return
        fields = []
        for name in unknown:
            near = difflib.get_close_matches(name, self._known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(self._known)) or 'none'}"
            fields.append(FieldViolation(f"{self._path}.{name}", f"unknown key; {hint}"))
        raise invalid(*fields, reason=Reason.UNKNOWN_PARAMETER)

    def _take(self, name: str, kind: str, wanted: str) -> struct_pb2.Value | None:
        self._known.append(name)
        if name not in self._values:
            return None
        value = self._values[name]
        given = value.WhichOneof("kind")
        if given != kind:
            raise self._bad(name, f"must be {wanted}, got {_KINDS.get(given or '', 'nothing')}")
        return value

    def _bad(self, name: str, description: str) -> OmniError:
        return invalid(FieldViolation(f"{self._path}.{name}", description))
