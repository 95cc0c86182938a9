"""Foreign bytes as media: decoded, or refused as what they are; never a fault of the stage."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, content_pb2
from stage_server.models.qwen3_omni import media

LIMITS = config_pb2.MediaLimits(bytes=1 << 20, pixels=1 << 20, parts=4, seconds=60)
RATE = 16_000
REFUSED = {Reason.MEDIA_INVALID, Reason.MEDIA_TOO_LARGE}


def wav(rate: int = RATE, channels: int = 1, bits: int = 16, kind: int = 1, samples: int = 1600) -> bytes:
    data = bytes(samples * channels * bits // 8)
    second, frame = (rate * channels * bits // 8) & 0xFFFFFFFF, (channels * bits // 8) & 0xFFFF
    head = struct.pack("<IHHIIHH", 16, kind, channels, rate, second, frame, bits)
    return (
        b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    )


def hear(data: bytes) -> np.ndarray:
    return media.recording("sound", content_pb2.Media(data=data), LIMITS, RATE)


def see(data: bytes) -> Image.Image:
    return media.picture("picture", content_pb2.Media(data=data), LIMITS)


def refused(data: bytes, take: object) -> OmniError:
    with pytest.raises(OmniError) as found:
        take(data)  # type: ignore[operator]
    assert found.value.reason in REFUSED
    assert found.value.fields
    return found.value


@pytest.mark.parametrize("kind", [*range(2, 120), 0x161, 0x2000, 0x674F, 0xFFFE, 0xFFFF])
def test_a_recording_of_any_format_tag_is_heard_or_refused(kind: int) -> None:
    try:
        hear(wav(kind=kind))
    except OmniError as error:
        assert error.reason in REFUSED, error


@pytest.mark.parametrize(
    "data",
    [wav(kind=99), wav(rate=0), wav(channels=0), wav(bits=0), wav()[:30], b"RIFF", b"", b"fLaC" + bytes(60)],
    ids=["tag", "rate", "channels", "bits", "half a head", "four bytes", "nothing", "flac"],
)
def test_what_is_no_recording_is_refused_as_that(data: bytes) -> None:
    assert refused(data, hear).reason == Reason.MEDIA_INVALID


@pytest.mark.parametrize("rate", [1, 2, 100, 2**31 - 1])
def test_a_recording_of_an_odd_rate_is_heard_or_refused(rate: int) -> None:
    try:
        hear(wav(rate=rate, samples=100))
    except OmniError as error:
        assert error.reason in REFUSED, error


def test_bytes_that_are_changed_one_by_one_are_heard_or_refused() -> None:
    good = wav(samples=800)
    draw = np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(good)
        bad[int(draw.integers(0, 44))] = int(draw.integers(0, 256))
        try:
            hear(bytes(bad))
        except OmniError as error:
            assert error.reason in REFUSED, error


@pytest.mark.parametrize("kind", media.FORMATS)
def test_pictures_whose_bytes_are_changed_are_seen_or_refused(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (24, 24), (9, 90, 200)).save(file, kind)
    good, draw = file.getvalue(), np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(good)
        for at in draw.integers(0, min(len(good), 200), 2):
            bad[int(at)] = int(draw.integers(0, 256))
        try:
            see(bytes(bad))
        except OmniError as error:
            assert error.reason in REFUSED, error


def test_a_decoder_that_fails_in_its_own_way_is_no_fault_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise zlib.error("its own way")

    monkeypatch.setattr(media.ImageOps, "exif_transpose", fail)
    monkeypatch.setattr(media.soxr, "resample", fail)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    assert refused(file.getvalue(), see).reason == Reason.MEDIA_INVALID
    assert refused(wav(rate=8000), hear).reason == Reason.MEDIA_INVALID
