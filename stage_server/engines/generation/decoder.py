"""What a model family supplies to the generation engine.

The engine owns the order: which runs share a step, how much of each, encoding and the end. A decoder owns the model and
what it must remember of a run between two chunks, so that the chunks joined equal one decode of the whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

StateT = TypeVar("StateT")


class ChunkDecoder(ABC, Generic[StateT]):
    """A model that turns chunks of frames into sound. All calls come from the engine's thread, in inference mode."""

    input: str
    """Name of the tensor that it reads, [frames, ...]."""
    sample_rate: int
    """Samples a second of what it makes."""

    @abstractmethod
    def load(self) -> None:
        """Loads and warms the model.

        Raises:
            OmniError: with what is wrong with the checkpoint.
        """

    @abstractmethod
    def open(self) -> StateT:
        """What is remembered of a run before its first frame."""

    @abstractmethod
    def take(self, frames: torch.Tensor) -> torch.Tensor:
        """Checks one chunk of a run's input and copies it, since its memory goes back to its owner.

        Raises:
            OmniError: it is not what this model reads.
        """

    @abstractmethod
    def decode(self, rows: Sequence[tuple[StateT, torch.Tensor]]) -> list[tuple[StateT, NDArray[np.float32]]]:
        """Decodes the next frames of each run, all in one batch.

        Returns for each its state after them, and the samples [n] in [-1, 1] that are final by now. The given states
        are left as they are, so that a batch that failed can be decoded row by row.
        """

    @abstractmethod
    def unload(self) -> None:
        """Frees the model."""
