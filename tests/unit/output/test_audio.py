"""Sound comes out of every format as it went in, however it is cut."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from omni.v1 import config_pb2
from stage_server.output.audio import FORMATS, AudioEncoder, pcm16, wav_header

RATE = 24_000
TONE = (0.3 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)
LOSSLESS = (config_pb2.MEDIA_FORMAT_WAV, config_pb2.MEDIA_FORMAT_FLAC)
LOSSY = (config_pb2.MEDIA_FORMAT_MP3, config_pb2.MEDIA_FORMAT_OPUS)


def encode(media_format: int, samples: np.ndarray, chunk: int, rate: int = RATE) -> list[bytes]:
    encoder = AudioEncoder(media_format, rate)
    parts = [encoder.encode(samples[start : start + chunk]) for start in range(0, len(samples), chunk)]
    return [*parts, encoder.finish()]


def decode(data: bytes) -> tuple[np.ndarray, int]:
    with av.open(io.BytesIO(data)) as source:
        frames = [frame.to_ndarray().astype(np.float64).reshape(-1) for frame in source.decode(audio=0)]
        scale = 1.0 if source.streams.audio[0].format.name.startswith("flt") else 32768.0
        return np.concatenate(frames) / scale, source.streams.audio[0].rate


def test_pcm_is_the_samples_themselves() -> None:
    assert b"".join(encode(config_pb2.MEDIA_FORMAT_PCM16, TONE, 1000)) == pcm16(TONE).tobytes()


@pytest.mark.parametrize("media_format", LOSSLESS)
def test_lossless_formats_give_every_sample_back(media_format: int) -> None:
    sound, rate = decode(b"".join(encode(media_format, TONE, 777)))
    assert rate == RATE
    assert np.array_equal(np.rint(sound * 32768).astype(np.int16), pcm16(TONE))


@pytest.mark.parametrize("media_format", LOSSY)
def test_lossy_formats_keep_the_pitch_and_the_length(media_format: int) -> None:
    sound, rate = decode(b"".join(encode(media_format, TONE, 777)))
    spectrum = np.abs(np.fft.rfft(sound[: rate // 2]))
    assert abs(int(spectrum.argmax()) * 2 - 440) <= 4
    assert len(sound) / rate == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("media_format", sorted(FORMATS))
def test_the_file_does_not_depend_on_how_the_sound_is_cut(media_format: int) -> None:
    fine, coarse = decode_any(media_format, 331), decode_any(media_format, 12_000)
    assert np.array_equal(fine, coarse)


def decode_any(media_format: int, chunk: int) -> np.ndarray:
    data = b"".join(encode(media_format, TONE, chunk))
    if media_format == config_pb2.MEDIA_FORMAT_PCM16:
        return np.frombuffer(data, dtype="<i2")
    return decode(data)[0]


@pytest.mark.parametrize("media_format", sorted(FORMATS))
def test_the_first_bytes_come_within_a_quarter_of_a_second_of_sound(media_format: int) -> None:
    parts = encode(media_format, TONE, RATE // 4)
    assert parts[0]


@pytest.mark.parametrize(("media_format", "rate"), [(f, r) for f in LOSSY for r in (22_050, 96_000)])
def test_a_rate_that_the_codec_does_not_take_is_resampled(media_format: int, rate: int) -> None:
    tone = (0.3 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    sound, out_rate = decode(b"".join(encode(media_format, tone, 5000, rate)))
    spectrum = np.abs(np.fft.rfft(sound[: out_rate // 2]))
    assert abs(int(spectrum.argmax()) * 2 - 440) <= 4


@pytest.mark.parametrize("media_format", sorted(FORMATS))
def test_no_sound_at_all_still_ends_well(media_format: int) -> None:
    AudioEncoder(media_format, RATE).finish()


def test_loud_and_broken_samples_are_clipped() -> None:
    assert pcm16(np.array([2.0, -2.0, np.nan, np.inf, 0.5])).tolist() == [32767, -32767, 0, 32767, 16384]


def test_a_known_length_stands_in_the_wav_header() -> None:
    header = wav_header(RATE, frames=10)
    assert len(header) == 44
    assert int.from_bytes(header[4:8], "little") == 56
    assert int.from_bytes(header[40:44], "little") == 20


@pytest.mark.parametrize("media_format", [config_pb2.MEDIA_FORMAT_PNG, config_pb2.MEDIA_FORMAT_UNSPECIFIED])
def test_a_format_of_pictures_is_refused(media_format: int) -> None:
    with pytest.raises(ValueError, match="no format of sound"):
        AudioEncoder(media_format, RATE)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="sample_rate"):
        AudioEncoder(config_pb2.MEDIA_FORMAT_WAV, 0)
