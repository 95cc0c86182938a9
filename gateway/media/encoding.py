"""Base64 and data URLs, decoded strictly and only after their size was found to be allowed."""

import asyncio
import binascii
from dataclasses import dataclass
from urllib.parse import unquote

from gateway.errors import bad_request
from omni.rpc.errors import Reason

# The interpreter's lock is held while a piece is decoded: small pieces let the event loop run in between.
_PIECE = 256 * 1024
_OFF_LOOP = _PIECE
_SHOWN_MIME = 128


@dataclass(frozen=True, slots=True)
class DataUrl:
    """A data URL taken apart: its type ("" when it names none) and its base64 text."""

    mime_type: str
    base64: str


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def split_data_url(url: str, param: str) -> DataUrl:
    """Takes a data URL apart without decoding its data.

    Raises:
        OmniError: MEDIA_INVALID, when it has no comma or its data is not base64.
    """
    # Only a short head is searched: what stands before the comma is a media type and its parameters.
    comma = url.find(",", 0, 1024)
    if comma < 0:
        raise bad_request(param, "is a broken data URL: no comma after the media type", Reason.MEDIA_INVALID)
    mime, *parameters = url[5:comma].split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise bad_request(param, "must be a base64 data URL: data:image/png;base64,...", Reason.MEDIA_INVALID)
    text = url[comma + 1 :]
    return DataUrl(mime.strip().lower()[:_SHOWN_MIME], unquote(text) if "%" in text else text)


def decoded_size(text: str) -> int:
    """Bytes that `text` decodes to if it is valid base64."""
    return len(text) // 4 * 3 - (text.endswith("=") + text.endswith("=="))


async def decode_base64(text: str, param: str, limit: int) -> bytes:
    """The bytes of `text`, off the loop when they are many.

    Args:
        text: standard alphabet, padded, no line breaks.
        param: name of the field for messages.
        limit: most bytes that are taken.

    Raises:
        OmniError: MEDIA_TOO_LARGE before anything is decoded, MEDIA_INVALID.
    """
    if decoded_size(text) > limit:
        raise too_large(param, decoded_size(text), limit)
    try:
        data = _decode(text) if len(text) <= _OFF_LOOP else await asyncio.to_thread(_decode, text)
    except ValueError as error:
        raise bad_request(param, f"is not valid base64: {error}", Reason.MEDIA_INVALID) from None
    if not data:
        raise bad_request(param, "holds no data", Reason.MEDIA_INVALID)
    return data


def too_large(param: str, size: int, limit: int) -> Exception:
    """The error for a part of `size` bytes where `limit` are taken."""
    return bad_request(param, f"is {size} bytes; this model takes at most {limit} a part", Reason.MEDIA_TOO_LARGE)


def _decode(text: str) -> bytes:
    if len(text) % 4:
        raise ValueError("its length is not a multiple of 4")
    if "=" in text[:-2]:
        raise ValueError("padding before its end")
    pieces = []
    for start in range(0, len(text), _PIECE):
        try:
            pieces.append(binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True))
        except binascii.Error as error:
            raise ValueError(str(error).lower()) from None
    return b"".join(pieces)
