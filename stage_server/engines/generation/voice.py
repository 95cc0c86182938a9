"""The encoding side of a run: samples in, pieces of one artifact out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni.rpc.errors import FieldViolation, invalid
from omni.v1 import config_pb2, content_pb2
from stage_server.output.audio import FORMATS, AudioEncoder
from stage_server.output.pieces import split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def check_format(params: config_pb2.StageParams) -> config_pb2.MediaFormat.ValueType:
    """The format that a run asks for.

    Raises:
        OmniError: BAD_REQUEST, it is none of sound; the message lists those that are.
    """
    if not params.HasField("format"):
        return config_pb2.MEDIA_FORMAT_PCM16
    if params.format not in FORMATS:
        name = config_pb2.MediaFormat.Name(params.format)
        known = ", ".join(config_pb2.MediaFormat.Name(each) for each in sorted(FORMATS))
        raise invalid(FieldViolation("params.format", f"{name} is no format of sound; known: {known}"))
    return params.format


class Voice:
    """One run's artifact as it grows. Touched by one encoding job at a time, in order."""

    def __init__(
        self, media_format: config_pb2.MediaFormat.ValueType, sample_rate: int, *, wanted: bool = True
    ) -> None:
        self._wanted = wanted
        self._format = media_format
        self._rate = sample_rate
        self._encoder: AudioEncoder | None = None
        self._begun = False
        self._unsent = 0
        """Samples in the encoder of which no byte has come out yet."""
        self.failed = False
        """Set when an encoding failed: what follows of the run is dropped."""

    def grow(self, samples: NDArray[np.float32], *, last: bool) -> list[content_pb2.MediaPiece]:
        """Encodes more samples [n]; after the last ones nothing follows. Nothing is made when nobody wants it."""
        if not self._wanted:
            return []
        if self._encoder is None:
            self._encoder = AudioEncoder(self._format, self._rate)
        data = self._encoder.encode(samples) if len(samples) else b""
        if last:
            data += self._encoder.finish()
        self._unsent += len(samples)
        if not data and not last:
            return []
        first, self._begun = not self._begun, True
        counted, self._unsent = self._unsent, 0
        return split(
            data,
            modality=content_pb2.MODALITY_AUDIO,
            mime_type=self._encoder.mime_type if first else "",
            sample_rate=self._rate if first else 0,
            samples=counted,
            last=last,
        )
