"""A decoder over a causal language model of transformers: token ids in, token ids and text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from stage_server.engines.ar.decoder import Decoder, DecodeState, Slice
from stage_server.engines.ar.sampling import Sampling
from stage_server.engines.ar.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from omni.v1 import config_pb2
    from stage_server.engines.base import Run


@dataclass(slots=True)
class TokenState(DecodeState):
    """State of a run whose input are token ids."""

    positions: torch.Tensor | None = None
    """Rotary positions of the prompt, [3, n]; None: 0, 1, 2 ... on every axis. Freed when they are through."""
    shift: int = 0
    """What a position after the prompt has on top of its index."""


TokenStateT = TypeVar("TokenStateT", bound=TokenState)


class CausalDecoder(Decoder[TokenStateT]):
    """What text models share. A subclass loads the model and makes the states."""

    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    defaults: config_pb2.SamplingParams
    """The model's own (from its generation config)."""
    end_ids: frozenset[int]
    axes: int = 1
    """Rows of a position: 1, or 3 for M-RoPE."""

    def begin(self, state: TokenStateT) -> TokenStateT:
        """Completes a state whose prompt is known."""
        state.prompt = state.ready = len(state.prompt_ids)
        state.text = TextStream(self.tokenizer, state.sampling.stop)
        return state

    def sampling(self, run: Run) -> Sampling:
        """A run's parameters over the model's own."""
        return Sampling.of(run.params.sampling, self.defaults, self.end_ids)

    def inputs(self, step: Sequence[Slice[TokenStateT]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [1, T] and rotary positions, [1, T] or [3, 1, T], of a packed step."""
        ids: list[int] = []
        places: list[int] = []
        given: list[Slice[TokenStateT]] = []
        for part in step:
            state, prompt = part.state, len(part.state.prompt_ids)
            if part.start >= prompt:
                ids.append(state.tokens[part.start - prompt])
                places.append(part.start + state.shift)
            else:
                ids.extend(state.prompt_ids[part.start : part.stop])
                places.extend(range(part.start, part.stop))
                if state.positions is not None:
                    given.append(part)
        positions = torch.tensor(places, device=self.device)
        if self.axes > 1:
            positions = positions.expand(self.axes, -1)
        if given:
            positions = positions.clone()
            for part in given:
                assert part.state.positions is not None
                positions[:, part.rows] = part.state.positions[:, part.start : part.stop]
        return torch.tensor([ids], device=self.device), positions.unsqueeze(-2)

    def sampled(self, states: Sequence[TokenStateT], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        for state in states:
            state.ready += 1
            state.positions = None
