"""What a file's first bytes say about it: its type, and its size in pixels or seconds, without decoding it."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sniffed:
    """What was found.

    Attributes:
        mime_type: "image/png", "audio/wav" ...
        width: pixels; 0 for sound, or when the header does not say.
        height: pixels.
        seconds: length of sound; 0 for pictures, or when the header does not say.
    """

    mime_type: str
    width: int = 0
    height: int = 0
    seconds: float = 0.0


def sniff(data: bytes) -> Sniffed | None:
    """The kind of file that `data` is; None for one that is not known, or whose header is broken."""
    try:
        for magic, offset, read in _KINDS:
            if data[offset : offset + len(magic)] == magic:
                return read(data)
    except (struct.error, IndexError, ZeroDivisionError):
        return None
    return None


def _png(data: bytes) -> Sniffed:
    width, height = struct.unpack_from(">II", data, 16)
    return Sniffed("image/png", width, height)


def _gif(data: bytes) -> Sniffed:
    width, height = struct.unpack_from("<HH", data, 6)
    return Sniffed("image/gif", width, height)


def _bmp(data: bytes) -> Sniffed:
    width, height = struct.unpack_from("<ii", data, 18)
    return Sniffed("image/bmp", abs(width), abs(height))


def _jpeg(data: bytes) -> Sniffed | None:
    """Looks for the frame header: a segment SOF0 to SOF15 other than DHT, JPG and DAC."""
    at = 2
    while at + 9 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker in (0x01, 0xFF) or 0xD0 <= marker <= 0xD7:
            at += 1 if marker == 0xFF else 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return Sniffed("image/jpeg", width, height)
        length = struct.unpack_from(">H", data, at + 2)[0]
        if length < 2:
            return None
        at += 2 + length
    return None


def _webp(data: bytes) -> Sniffed | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return Sniffed(
            "image/webp", 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        )
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return Sniffed("image/webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return Sniffed("image/webp", width & 0x3FFF, height & 0x3FFF)
    return None


def _riff(data: bytes) -> Sniffed | None:
    if data[8:12] == b"WEBP":
        return _webp(data)
    if data[8:12] != b"WAVE":
        return None
    byte_rate = 0
    for name, start, size in _chunks(data):
        if name == b"fmt ":
            byte_rate = struct.unpack_from("<I", data, start + 8)[0]
        elif name == b"data":
            # A streamed file does not know its length; what is there counts.
            return Sniffed("audio/wav", seconds=min(size, len(data) - start) / byte_rate)
    return None


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, first byte and size of each chunk of a RIFF file."""
    at = 12
    while at + 8 <= len(data):
        size = struct.unpack_from("<I", data, at + 4)[0]
        yield data[at : at + 4], at + 8, size
        at += 8 + size + size % 2


def _flac(data: bytes) -> Sniffed:
    packed = int.from_bytes(data[18:26], "big")
    rate, samples = packed >> 44, packed & (1 << 36) - 1
    return Sniffed("audio/flac", seconds=samples / rate)


_KINDS = (
    (b"\x89PNG\r\n\x1a\n", 0, _png),
    (b"\xff\xd8\xff", 0, _jpeg),
    (b"GIF8", 0, _gif),
    (b"BM", 0, _bmp),
    (b"RIFF", 0, _riff),
    (b"fLaC", 0, _flac),
    (b"OggS", 0, lambda _data: Sniffed("audio/ogg")),
    (b"ID3", 0, lambda _data: Sniffed("audio/mpeg")),
    (b"\xff\xfb", 0, lambda _data: Sniffed("audio/mpeg")),
    (b"\xff\xfa", 0, lambda _data: Sniffed("audio/mpeg")),
    (b"\xff\xf3", 0, lambda _data: Sniffed("audio/mpeg")),
    (b"\xff\xf2", 0, lambda _data: Sniffed("audio/mpeg")),
    (b"ftyp", 4, lambda _data: Sniffed("audio/mp4")),
    (b"\x1a\x45\xdf\xa3", 0, lambda _data: Sniffed("audio/webm")),
)
