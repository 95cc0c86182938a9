"""Pictures and recordings in a prompt, decoded to what the processor takes. Limits are checked before decoding."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import av
import numpy as np
import soundfile
import soxr
from PIL import Image, ImageOps

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.v1 import config_pb2, content_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
TAKEN = {content_pb2.MODALITY_IMAGE: "image", content_pb2.MODALITY_AUDIO: "audio"}
SHORTEST = 0.03
"""Seconds that a recording must have: one window of the mel transform, and a little."""


def parts(prompt: content_pb2.Prompt) -> Iterator[tuple[str, content_pb2.Media]]:
    """Media of a prompt in the order of its text, each with its field path."""
    for at, message in enumerate(prompt.conversation.messages):
        for place, part in enumerate(message.content):
            if part.WhichOneof("part") == "media":
                yield f"prompt.conversation.messages[{at}].content[{place}].media", part.media


def check(prompt: content_pb2.Prompt, limits: config_pb2.MediaLimits) -> None:
    """Refuses what can be seen without decoding: kinds, number and encoded size.

    Raises:
        OmniError: UNSUPPORTED_MODALITY or MEDIA_TOO_LARGE with the part.
    """
    for count, (field, media) in enumerate(parts(prompt), start=1):
        if media.modality not in TAKEN:
            kind = content_pb2.Modality.Name(media.modality).removeprefix("MODALITY_").lower()
            raise _error(Reason.UNSUPPORTED_MODALITY, field, f"this model takes text, image and audio, not {kind}")
        if count > limits.parts:
            raise _error(Reason.MEDIA_TOO_LARGE, field, f"a request may hold {limits.parts} media parts at most")
        if len(media.data) > limits.bytes:
            message = f"has {len(media.data)} bytes, the limit is {limits.bytes}"
            raise _error(Reason.MEDIA_TOO_LARGE, field, message)


def picture(field: str, media: content_pb2.Media, limits: config_pb2.MediaLimits) -> Image.Image:
    """An upright RGB picture.

    Raises:
        OmniError: MEDIA_TOO_LARGE by its header, MEDIA_INVALID when it cannot be decoded.
    """
    try:
        with Image.open(io.BytesIO(media.data), formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > limits.pixels:
                message = f"has {image.width} x {image.height} pixels, the limit is {limits.pixels} in all"
                raise _error(Reason.MEDIA_TOO_LARGE, field, message)
            return ImageOps.exif_transpose(image).convert("RGB")
    except OmniError:
        raise
    except Image.DecompressionBombError as error:
        raise _error(Reason.MEDIA_TOO_LARGE, field, str(error)) from error
    except Exception as error:  # What a decoder raises over foreign bytes is not for it to choose: none is ours.
        message = f"is not a picture that can be decoded; those are taken: {', '.join(FORMATS)}"
        raise _error(Reason.MEDIA_INVALID, field, message) from error


def recording(field: str, media: content_pb2.Media, limits: config_pb2.MediaLimits, rate: int) -> NDArray[np.float32]:
    """Mono samples at `rate` a second, full scale 1.

    Raises:
        OmniError: MEDIA_TOO_LARGE when it is too long, MEDIA_INVALID when it cannot be decoded or is too short.
    """
    try:
        try:
            samples, own = _by_soundfile(field, media.data, limits.seconds)
        except soundfile.LibsndfileError:
            samples, own = _by_av(field, media.data, limits.seconds)
        if samples.ndim > 1:
            samples = samples.mean(axis=1)
        if own != rate:
            samples = soxr.resample(samples, own, rate)
    except OmniError:
        raise
    except Exception as error:  # As with pictures: the bytes are foreign, and so is what goes wrong with them.
        raise _error(Reason.MEDIA_INVALID, field, f"is not a recording that can be decoded: {_cause(error)}") from error
    if len(samples) < SHORTEST * rate:
        raise _error(Reason.MEDIA_INVALID, field, f"must be {SHORTEST:g} seconds long at least")
    return np.nan_to_num(samples.astype(np.float32, copy=False), posinf=1.0, neginf=-1.0)


def _by_soundfile(field: str, data: bytes, longest: float) -> tuple[NDArray[np.float32], int]:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if file.samplerate <= 0 or file.frames > longest * file.samplerate:
            raise _too_long(field, longest)
        # Some headers claim less than there is.
        most = int(longest * file.samplerate) + 1
        samples: NDArray[np.float32] = file.read(frames=most, dtype="float32")
        if len(samples) == most:
            raise _too_long(field, longest)
        return samples, file.samplerate


def _by_av(field: str, data: bytes, longest: float) -> tuple[NDArray[np.float32], int]:
    """Containers that libsndfile does not read: MP4, WebM, AAC."""
    with av.open(io.BytesIO(data)) as container:
        if not container.streams.audio:
            raise _error(Reason.MEDIA_INVALID, field, "holds no sound")
        stream = container.streams.audio[0]
        if stream.codec_context is None or not stream.rate:
            raise _error(Reason.MEDIA_INVALID, field, "is written in a way that cannot be decoded")
        if stream.duration and stream.time_base and stream.duration * stream.time_base > longest:
            raise _too_long(field, longest)
        rate = stream.rate
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        pieces, total = [], 0
        for frame in container.decode(stream):
            for even in resampler.resample(frame):
                pieces.append(even.to_ndarray().reshape(-1))
                total += len(pieces[-1])
            if total > longest * rate:
                raise _too_long(field, longest)
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32), rate


def _cause(error: Exception) -> str:
    """What FFmpeg found, without its number and the name of the buffer."""
    return error.strerror or type(error).__name__ if isinstance(error, av.FFmpegError) else str(error)


def _too_long(field: str, longest: float) -> OmniError:
    return _error(Reason.MEDIA_TOO_LARGE, field, f"is longer than {longest:g} seconds")


def _error(reason: Reason, field: str, description: str) -> OmniError:
    return invalid(FieldViolation(field, description), reason=reason)
