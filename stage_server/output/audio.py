"""Sound to bytes, piece by piece: PCM16, WAV, MP3, FLAC and Opus in Ogg."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from omni.v1 import config_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

FULL_SCALE = 32767
UNKNOWN_SIZE = 0xFFFFFFFF
"""What a WAV header says of a length that is not known yet; players then read to the end."""


@dataclass(frozen=True, slots=True)
class _Container:
    mime_type: str
    muxer: str
    codec: str
    bit_rate: int | None
    """Bits a second; None for a lossless codec."""
    options: dict[str, str]
    """What keeps the muxer from waiting: no index to write back, no padding, short pages (microseconds)."""


_CONTAINERS = {
    config_pb2.MEDIA_FORMAT_MP3: _Container("audio/mpeg", "mp3", "libmp3lame", 96_000, {"write_xing": "0"}),
    config_pb2.MEDIA_FORMAT_FLAC: _Container("audio/flac", "flac", "flac", None, {"metadata_header_padding": "0"}),
    config_pb2.MEDIA_FORMAT_OPUS: _Container("audio/ogg", "ogg", "libopus", 48_000, {"page_duration": "100000"}),
}
_PLAIN = {
    config_pb2.MEDIA_FORMAT_PCM16: "audio/pcm",
    config_pb2.MEDIA_FORMAT_WAV: "audio/wav",
}
FORMATS = frozenset(_CONTAINERS) | frozenset(_PLAIN)
"""What AudioEncoder makes."""


def pcm16(samples: NDArray[np.floating[Any]]) -> NDArray[np.int16]:
    """Samples in [-1, 1] as 16-bit little-endian numbers of the same shape; louder ones are clipped, NaN is silence."""
    scaled = np.nan_to_num(np.asarray(samples, dtype=np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    return np.rint(np.clip(scaled, -1.0, 1.0) * FULL_SCALE).astype("<i2")


def wav_header(sample_rate: int, frames: int | None = None) -> bytes:
    """The 44 bytes before mono 16-bit samples. `frames` is their number, None while a stream's end is not known."""
    size = UNKNOWN_SIZE if frames is None else frames * 2
    riff = UNKNOWN_SIZE if frames is None else size + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16, b"data", size),
    )


class AudioEncoder:
    """Turns a run's mono samples into one file, as they come. Calls must not overlap; any thread may make them.

    The bytes of all `encode` calls and of `finish`, joined in order, are the file.

    Raises:
        ValueError: the format is not one of sound, or the sample rate is not positive.
    """

    def __init__(self, media_format: config_pb2.MediaFormat.ValueType, sample_rate: int) -> None:
        if sample_rate <= 0:
            raise ValueError(f"sample_rate must be positive, got {sample_rate}")
        self._backend: _Backend
        if media_format in _PLAIN:
            self.mime_type = _PLAIN[media_format]
            header = wav_header(sample_rate) if media_format == config_pb2.MEDIA_FORMAT_WAV else b""
            self._backend = _Pcm(header)
        elif media_format in _CONTAINERS:
            container = _CONTAINERS[media_format]
            self.mime_type = container.mime_type
            self._backend = _Muxed(container, sample_rate)
        else:
            raise ValueError(f"{config_pb2.MediaFormat.Name(media_format)} is no format of sound")

    def encode(self, samples: NDArray[np.floating[Any]]) -> bytes:
        """Takes samples [n] in [-1, 1] and gives what of the file is ready, which may be nothing."""
        return self._backend.write(pcm16(samples).reshape(-1))

    def finish(self) -> bytes:
        """Gives the rest of the file; nothing may be encoded after it."""
        return self._backend.close()


class _Backend(Protocol):
    def write(self, samples: NDArray[np.int16]) -> bytes: ...

    def close(self) -> bytes: ...


class _Pcm:
    def __init__(self, header: bytes) -> None:
        self._header = header

    def write(self, samples: NDArray[np.int16]) -> bytes:
        header, self._header = self._header, b""
        return header + samples.tobytes()

    def close(self) -> bytes:
        header, self._header = self._header, b""
        return header


class _Sink:
    """A file that can only be appended to, as a network stream can."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


class _Muxed:
    """A codec and its container in FFmpeg, resampled when the codec does not take the rate."""

    def __init__(self, container: _Container, sample_rate: int) -> None:
        import av

        self._av = av
        self._rate = sample_rate
        self._sink = _Sink()
        options = {"flush_packets": "1", **container.options}
        self._file = av.open(self._sink, mode="w", format=container.muxer, options=options)
        rate = _nearest_rate(av.codec.Codec(container.codec, "w").audio_rates, sample_rate)
        self._stream = self._file.add_stream(container.codec, rate=rate, layout="mono")
        if container.bit_rate is not None:
            self._stream.bit_rate = container.bit_rate
        self._stream.codec_context.open()
        self._resampler = av.AudioResampler(
            format=self._stream.codec_context.format,
            layout="mono",
            rate=rate,
            frame_size=self._stream.codec_context.frame_size,
        )
        self._position = 0

    def write(self, samples: NDArray[np.int16]) -> bytes:
        if len(samples):
            frame = self._av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
            frame.sample_rate = self._rate
            frame.time_base = Fraction(1, self._rate)
            frame.pts = self._position
            self._position += len(samples)
            self._encode(frame)
        return self._sink.take()

    def close(self) -> bytes:
        if self._position:
            self._encode(None)
        self._file.start_encoding()
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.take()

    def _encode(self, frame: Any) -> None:
        for whole in self._resampler.resample(frame):
            self._file.mux(self._stream.encode(whole))


def _nearest_rate(rates: list[int] | None, wanted: int) -> int:
    """The lowest rate of a codec that keeps all that `wanted` holds, else its highest; None: it takes any."""
    if rates is None:
        return wanted
    return min((rate for rate in rates if rate >= wanted), default=max(rates))
