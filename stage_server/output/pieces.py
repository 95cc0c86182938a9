"""Cuts encoded artifacts into the pieces that travel between those of other runs."""

from __future__ import annotations

from omni.v1 import content_pb2

PIECE_BYTES = 64 * 1024


def split(
    data: bytes,
    *,
    modality: content_pb2.Modality.ValueType,
    mime_type: str = "",
    artifact: int = 0,
    last: bool = True,
    sample_rate: int = 0,
    samples: int = 0,
) -> list[content_pb2.MediaPiece]:
    """Cuts what an artifact has grown by into pieces of at most 64 KiB.

    Args:
        data: the next bytes of the artifact.
        modality: what it is.
        mime_type: given with an artifact's first bytes; only its first piece carries it.
        artifact: which of the run's artifacts.
        last: whether the artifact ends here; then there is a piece even for no bytes, and the last one says so.
        sample_rate: of sound, in Hz, given with `mime_type`.
        samples: of sound, how many samples `data` stands for; shared out over the pieces by their bytes.
    """
    view = memoryview(data)
    starts = range(0, len(data), PIECE_BYTES)
    pieces = [
        content_pb2.MediaPiece(artifact=artifact, modality=modality, data=bytes(view[start : start + PIECE_BYTES]))
        for start in starts
    ]
    if not pieces and (last or mime_type):
        pieces = [content_pb2.MediaPiece(artifact=artifact, modality=modality)]
    if not pieces:
        return []
    pieces[0].mime_type = mime_type
    pieces[0].sample_rate = sample_rate
    pieces[-1].last = last
    given = 0
    for start, piece in zip(starts or [0], pieces, strict=True):
        end = start + len(piece.data)
        upto = samples * end // len(data) if data else samples
        piece.samples = upto - given
        given = upto
    return pieces
