"""Media that a request holds itself."""

import base64
import binascii
import re

from gateway.errors import bad_request
from omni.rpc.errors import Reason
from omni.v1 import content_pb2

_DATA_URL = re.compile(r"data:(?P<mime>[a-zA-Z0-9!#$&^_.+-]+/[a-zA-Z0-9!#$&^_.+-]+)?(?P<base64>;base64)?,", re.ASCII)


def decode_base64(text: str, param: str, limit: int) -> bytes:
    """The bytes of base64 text, which are counted before they are made.

    Raises:
        OmniError: MEDIA_INVALID, or MEDIA_TOO_LARGE for more than `limit` bytes.
    """
    size = len(text) * 3 // 4
    if size > limit + 3:
        raise bad_request(param, f"has about {size} bytes; at most {limit} are taken", Reason.MEDIA_TOO_LARGE)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(param, f"is no valid base64: {error}", Reason.MEDIA_INVALID) from None
    if not data:
        raise bad_request(param, "is empty", Reason.MEDIA_INVALID)
    if len(data) > limit:
        raise bad_request(param, f"has {len(data)} bytes; at most {limit} are taken", Reason.MEDIA_TOO_LARGE)
    return data


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def decode_data_url(url: str, param: str, limit: int, modality: content_pb2.Modality.ValueType) -> content_pb2.Media:
    """The media of a data URL.

    Raises:
        OmniError: MEDIA_INVALID, MEDIA_TOO_LARGE.
    """
    head = _DATA_URL.match(url)
    if head is None or not head["base64"]:
        raise bad_request(param, "must be a data URL of the form data:TYPE;base64,DATA", Reason.MEDIA_INVALID)
    data = decode_base64(url[head.end() :], param, limit)
    return content_pb2.Media(modality=modality, mime_type=head["mime"] or "", data=data)
