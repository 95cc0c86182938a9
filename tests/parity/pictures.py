"""What the tests of diffusion stages share: pictures out of events, and how far two of them are apart."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from tests.parity.driver import Seen


def pictures(seen: Seen) -> list[np.ndarray]:
    """The run's pictures, [height, width, 3] in [0, 1]."""
    files: dict[int, bytearray] = {}
    for output in seen.outputs:
        for piece in output.media:
            files.setdefault(piece.artifact, bytearray()).extend(piece.data)
    return [np.asarray(Image.open(io.BytesIO(bytes(data)))) / 255 for _, data in sorted(files.items())]


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Decibels between a picture out of a file, and one that is rounded here as that file's was; 200 when equal."""
    # The file holds eight bits a channel.
    error = float(np.mean((one - np.round(other.astype(np.float64) * 255) / 255) ** 2))
    return 200.0 if error == 0 else -10 * np.log10(error)
