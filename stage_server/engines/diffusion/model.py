"""What the diffusion engine asks of a model. It knows no library: a model package supplies these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni.v1 import config_pb2


@dataclass(frozen=True, slots=True)
class Limits:
    """What a loaded model can draw, and what it draws when a request does not say."""

    multiple: int
    """Width and height are multiples of this, in pixels."""
    max_side: int
    """Longest width or height, in pixels."""
    max_pixels: int
    """Most pixels in one picture."""
    width: int
    height: int
    steps: int
    guidance_scale: float
    negative_prompt: bool
    """Whether the model takes one."""


@dataclass(frozen=True, slots=True)
class PictureRequest:
    """A run's parameters, checked and complete."""

    prompt: str
    negative_prompt: str
    """Empty when there is none."""
    width: int
    height: int
    steps: int
    guidance_scale: float
    """In the scale of the model's own pipeline."""
    seed: int
    """Of the first picture, in [0, 2^64); picture k has seed + k."""
    outputs: int
    media_format: config_pb2.MediaFormat.ValueType

    def picture_seed(self, index: int) -> int:
        """Seed of one of the request's pictures."""
        return (self.seed + index) % 2**64


ConditioningT = TypeVar("ConditioningT")
SampleT = TypeVar("SampleT", bound="Sample")


class Sample(Protocol):
    """A picture on its way. All that its steps change is its own, so that samples may take turns."""

    @property
    def step(self) -> int:
        """Steps done."""

    @property
    def steps(self) -> int:
        """Steps in all."""


class DiffusionModel(Protocol, Generic[ConditioningT, SampleT]):
    """A model whose denoising can be stopped after any step. Called from one thread; each call is one engine step."""

    def load(self) -> Limits:
        """Reads the checkpoint onto its device.

        Raises:
            OmniError: the checkpoint is missing, broken, or not of a kind that this model package runs.
        """

    def unload(self) -> None:
        """Frees the model."""

    def encode(self, request: PictureRequest) -> ConditioningT:
        """Turns the prompts into what steers the denoising, once for all pictures of a request.

        Raises:
            OmniError: PROMPT_TOO_LONG.
        """

    def begin(self, conditioning: ConditioningT, request: PictureRequest, index: int) -> SampleT:
        """Draws the noise that picture `index` starts from."""

    def advance(self, sample: SampleT) -> None:
        """Does one denoising step."""

    def decode(self, sample: SampleT) -> NDArray[Any]:
        """The finished picture: [height, width, 3] in [0, 1], in host memory, no longer used by the model."""
