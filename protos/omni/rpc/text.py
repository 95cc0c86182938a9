"""How things are said in messages for people: texts cut to a bound, values as they were given, names of modalities."""

from omni.v1 import content_pb2

SHOWN = 80
"""Most characters of a value that a message shows."""

MODALITIES = {
    name.removeprefix("MODALITY_").lower(): content_pb2.Modality.ValueType(number)
    for name, number in content_pb2.Modality.items()
    if number
}
"""By the name that people write: "text" is MODALITY_TEXT."""

_NAMES: dict[int, str] = {number: name for name, number in MODALITIES.items()}


def clip(text: str, limit: int) -> str:
    """`text`, cut to `limit` bytes of UTF-8, with an ellipsis where something is missing."""
    encoded = text[: limit + 1].encode("utf-8", "replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode("utf-8", "ignore") + "…"


def shown(value: object) -> str:
    """`value` as Python writes it, cut to `SHOWN` characters: no message gives a sender its megabytes back."""
    written = repr(value[: SHOWN + 1] if isinstance(value, str | bytes) else value)
    return written if len(written) <= SHOWN else f"{written[: SHOWN - 1]}…"


def modality_name(number: int) -> str:
    """A modality as people write it; one that the contract does not have is its number."""
    return _NAMES.get(number, str(number))
