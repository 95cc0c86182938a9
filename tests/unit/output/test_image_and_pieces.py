"""Pictures survive encoding, and artifacts survive being cut."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from omni.v1 import config_pb2, content_pb2
from stage_server.output.image import FORMATS, encode_image, mime_type
from stage_server.output.pieces import PIECE_BYTES, split

GRADIENT = np.linspace(0, 1, 32 * 48 * 3, dtype=np.float32).reshape(32, 48, 3)
KIND = content_pb2.MODALITY_IMAGE


def test_png_gives_the_picture_back_exactly() -> None:
    picture = Image.open(io.BytesIO(encode_image(GRADIENT, config_pb2.MEDIA_FORMAT_PNG)))
    assert np.array_equal(np.asarray(picture), np.rint(GRADIENT * 255).astype(np.uint8))


@pytest.mark.parametrize("media_format", sorted(FORMATS))
@pytest.mark.parametrize("shape", [(16, 24), (16, 24, 1), (16, 24, 3), (16, 24, 4)])
def test_every_format_takes_every_kind_of_picture(media_format: int, shape: tuple[int, ...]) -> None:
    picture = Image.open(io.BytesIO(encode_image(np.full(shape, 200, np.uint8), media_format)))
    assert picture.size == (24, 16)
    assert Image.MIME[picture.format] == mime_type(media_format)


def test_values_outside_the_range_are_clipped() -> None:
    data = encode_image(np.array([[-1.0, 0.5], [2.0, np.nan]]), config_pb2.MEDIA_FORMAT_PNG)
    assert np.asarray(Image.open(io.BytesIO(data))).tolist() == [[0, 128], [255, 0]]


@pytest.mark.parametrize("shape", [(4,), (4, 4, 2), (1, 4, 4, 3)])
def test_an_array_that_is_no_picture_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a picture is"):
        encode_image(np.zeros(shape, np.uint8), config_pb2.MEDIA_FORMAT_PNG)


def test_a_format_of_sound_is_refused() -> None:
    with pytest.raises(ValueError, match="no format of pictures"):
        encode_image(GRADIENT, config_pb2.MEDIA_FORMAT_WAV)


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
def test_pieces_joined_are_the_artifact(size: int) -> None:
    data = np.random.default_rng(0).bytes(size)
    pieces = split(data, modality=KIND, mime_type="image/png", artifact=3)
    assert b"".join(piece.data for piece in pieces) == data
    assert max(len(piece.data) for piece in pieces) <= PIECE_BYTES
    assert [piece.mime_type for piece in pieces] == ["image/png"] + [""] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {(piece.artifact, piece.modality) for piece in pieces} == {(3, KIND)}


def test_samples_are_shared_out_without_loss() -> None:
    kind = content_pb2.MODALITY_AUDIO
    pieces = split(bytes(3 * PIECE_BYTES + 1), modality=kind, mime_type="audio/pcm", sample_rate=24_000, samples=98_305)
    assert sum(piece.samples for piece in pieces) == 98_305
    assert [piece.sample_rate for piece in pieces] == [24_000, 0, 0, 0]


def test_the_end_is_said_even_when_no_bytes_are_left() -> None:
    (piece,) = split(b"", modality=KIND, last=True)
    assert piece.last


def test_nothing_new_makes_no_piece() -> None:
    assert split(b"", modality=KIND, last=False) == []
