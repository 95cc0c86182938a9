"""Pictures to bytes: PNG, JPEG and WebP."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from omni.v1 import config_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENCODINGS: dict[int, tuple[str, str, dict[str, Any]]] = {
    config_pb2.MEDIA_FORMAT_PNG: ("image/png", "PNG", {}),
    config_pb2.MEDIA_FORMAT_JPEG: ("image/jpeg", "JPEG", {"quality": 95, "subsampling": 0}),
    config_pb2.MEDIA_FORMAT_WEBP: ("image/webp", "WEBP", {"quality": 95}),
}
FORMATS = frozenset(_ENCODINGS)
"""What encode_image makes."""


def mime_type(media_format: config_pb2.MediaFormat.ValueType) -> str:
    """The MIME type of a picture format; ValueError when it is none."""
    if media_format not in _ENCODINGS:
        raise ValueError(f"{config_pb2.MediaFormat.Name(media_format)} is no format of pictures")
    return _ENCODINGS[media_format][0]


def encode_image(picture: NDArray[Any] | Image.Image, media_format: config_pb2.MediaFormat.ValueType) -> bytes:
    """Encodes a picture.

    Args:
        picture: a Pillow picture, or an array [height, width], [height, width, 3] or [height, width, 4] of uint8,
            or of floats in [0, 1] (rounded; values outside are clipped).
        media_format: PNG, JPEG or WEBP.

    Raises:
        ValueError: the format is none of pictures, or the array has another shape.
    """
    mime_type(media_format)
    image = picture if isinstance(picture, Image.Image) else _from_array(picture)
    _, name, options = _ENCODINGS[media_format]
    if name == "JPEG" and image.mode not in {"L", "RGB"}:
        image = image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, format=name, **options)
    return buffer.getvalue()


def _from_array(picture: NDArray[Any]) -> Image.Image:
    if picture.ndim == 3 and picture.shape[2] == 1:
        picture = picture[:, :, 0]
    if picture.ndim not in {2, 3} or (picture.ndim == 3 and picture.shape[2] not in {3, 4}):
        raise ValueError(f"a picture is [height, width, 1, 3 or 4 channels], got {list(picture.shape)}")
    if picture.dtype != np.uint8:
        scaled = np.nan_to_num(picture.astype(np.float32), nan=0.0) * 255
        picture = np.rint(np.clip(scaled, 0, 255)).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(picture))
