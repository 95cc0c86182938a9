"""What a model family supplies to the autoregressive engine.

The engine owns the loop: which runs share a step, the KV cache, sampling, stop conditions, text. A decoder owns the
model: how a run's input becomes embeddings, and what a sampled token becomes as the next input. A run is put through
the model position by position: `DecodeState.ready` says how many positions have their input, the engine takes those
beyond `DecodeState.position` in slices, and draws a token after the last one of a slice once the prompt is through.
A run with `ready == position` has nothing to put through and sits out the step: so a run waits for another stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from transformers import Cache

    from stage_server.engines.ar.sampling import Sampling
    from stage_server.engines.ar.text import TextStream
    from stage_server.engines.base import Feed, Run


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the engine needs to know of a model to hold its KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    max_length: int
    """Positions that one run may have in all, prompt and output."""
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class DecodeState:
    """One run's state. Made in `Decoder.prepare`, from then on touched by the engine's thread only.

    A decoder derives its own class from this for what it keeps beside.
    """

    run: Run
    sampling: Sampling
    ready: int = 0
    """Positions whose input is known; raised by the decoder."""
    prompt: int | None = None
    """Positions before the first sampled token; None while the decoder does not know yet."""
    prompt_ids: Sequence[int] = ()
    """Token ids that the repetition penalty counts beside the sampled ones."""
    text: TextStream | None = None
    """Set when sampled tokens are text: the engine then reports `token_ids` and `text`."""
    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Made in this step; the decoder appends, the engine joins each list along the first axis and empties it."""
    position: int = 0
    """Positions that are in the KV cache; raised by the engine."""
    tokens: list[int] = field(default_factory=list)
    """Sampled so far; the engine appends before it calls `Decoder.sampled`."""
    finished: bool = False
    """Set by a decoder that ends the run itself, in `sampled` or `feed`; the engine ends it with STOP after that."""

    def wants(self, tensor: str) -> bool:
        """Whether somebody reads this tensor of the run."""
        return tensor in self.run.tensors

    def publish(self, tensor: str, rows: torch.Tensor) -> None:
        """Adds rows [n, ...] to what the step made for the run; they must not be written to afterwards."""
        self.tensors.setdefault(tensor, []).append(rows)


StateT = TypeVar("StateT", bound=DecodeState)


@dataclass(frozen=True, slots=True)
class Slice(Generic[StateT]):
    """Positions `start` to `stop - 1` of a run, in one step. They lie at `offset` of the packed step."""

    state: StateT
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """Where these positions lie in a packed tensor [T, ...]."""
        return slice(self.offset, self.offset + self.stop - self.start)


class Decoder(ABC, Generic[StateT]):
    """A model that decodes step by step.

    Calls come from the engine's thread under `torch.inference_mode`, except where it says otherwise. An exception from
    `prepare` or `feed` fails that run alone. After one from `forward` the runs of the step are put through one by one,
    and those fail that fail alone; one from `logits` or `sampled` fails the runs of the step.
    """

    voices: Sequence[str] = ()
    """Speakers that a run may name; known once the model is loaded, and replaced as a whole."""

    @abstractmethod
    def load(self) -> Geometry:
        """Loads the model, with its text attention set to `attention.NAME` (`attention.use(config)`).

        Raises:
            OmniError: with what is wrong with the checkpoint.
        """

    def check(self, run: Run) -> None:
        """Refuses a run by its parameters. Called on the server's loop: quick, and touches no model state.

        Raises:
            OmniError: BAD_REQUEST, UNSUPPORTED_MODALITY ... with the field.
        """

    @abstractmethod
    def prepare(self, run: Run) -> StateT:
        """Makes a run's state: tokenizes, decodes media, runs encoders. Called in a worker thread, in inference mode.

        Raises:
            OmniError: with what is wrong with the run's input.
        """

    def feed(self, state: StateT, feed: Feed) -> None:
        """Takes in output of another run, or its end; releases the feed when it has been copied or consumed."""
        feed.release()

    @abstractmethod
    def forward(self, step: Sequence[Slice[StateT]], cache: Cache) -> torch.Tensor:
        """Puts the slices through the model, packed along one axis in the order given.

        The model is called once, as a batch of one: `inputs_embeds` [1, T, H], `position_ids` [1, T] or [3, 1, T]
        (`pack_positions` joins them), `past_key_values=cache`, `use_cache=True` and no attention mask. The cache knows
        where each slice belongs. Returns one row a slice [S, H]: the last hidden state (after the final norm) of its
        last position (`last_rows` finds them).
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Those rows of `forward`'s that a token is drawn from, [R, H] -> logits [R, V] of its own, which the engine
        writes to. Tokens that must never be drawn are set to -inf here.
        """

    @abstractmethod
    def sampled(self, states: Sequence[StateT], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Makes the next input of each state from its token and last hidden state (row i of [R, H]), raising `ready`
        when the input is complete, and appends to `state.tensors` what the step made.

        Not called for a run that this token ended (an end token, the length, a stop string).
        """

    def ended(self, state: StateT) -> None:
        """Appends to `state.tensors` what was held back. Called once for a run that ends by itself, STOP or LENGTH,
        before its last output is taken."""

    def unload(self) -> None:
        """Frees the model."""


def last_rows(step: Sequence[Slice[StateT]]) -> list[int]:
    """Where each slice's last position lies in the packed step."""
    return [part.offset + part.length - 1 for part in step]


def pack_positions(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins the slices' positions, [n] each, into [1, T], or [3, n] each (temporal, height, width) into [3, 1, T]."""
    joined = torch.cat(list(parts), dim=-1)
    return joined.unsqueeze(-2)


def capture(layers: torch.nn.ModuleList, index: int, into: dict[int, torch.Tensor]) -> None:
    """Keeps the residual stream after `index` layers, [1, T, H], in `into[index]` at each forward (index >= 1).

    Equal to transformers' `hidden_states[index]` for every index but the last (which has the final norm on it).
    """

    def keep(_module: torch.nn.Module, _args: tuple[object, ...], output: object) -> None:
        value = output[0] if isinstance(output, tuple) else output
        assert isinstance(value, torch.Tensor)
        into[index] = value

    layers[index - 1].register_forward_hook(keep)
