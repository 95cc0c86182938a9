"""Drawing tokens for many runs at once, each by its own parameters and from its own random stream.

A run's draw depends on its own logits, parameters and seed only: one uniform number a token, taken from the run's
generator, is looked up in the cumulative distribution of what its filters leave.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from omni.v1 import config_pb2

UNBOUNDED = 1 << 62
"""No bound of its own on a run's tokens; the context ends it."""


@dataclass(slots=True)
class Sampling:
    """A run's decoding parameters, resolved, and its random stream."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = UNBOUNDED
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """End tokens of the model (unless ignored) and of the request."""
    logprobs: int | None = None
    rng: random.Random = field(default_factory=random.Random)

    @classmethod
    def of(
        cls, params: config_pb2.SamplingParams, model: config_pb2.SamplingParams, end_ids: frozenset[int]
    ) -> Sampling:
        """Lays a run's parameters over the model's own (its generation config); what neither sets is greedy."""
        merged = config_pb2.SamplingParams()
        merged.CopyFrom(model)
        merged.MergeFrom(params)
        ids = frozenset(params.stop_token_ids) | (frozenset() if merged.ignore_eos else end_ids)
        return cls(
            temperature=merged.temperature,
            top_k=merged.top_k,
            top_p=merged.top_p if merged.HasField("top_p") else 1.0,
            min_p=merged.min_p,
            repetition_penalty=merged.repetition_penalty if merged.HasField("repetition_penalty") else 1.0,
            presence_penalty=merged.presence_penalty,
            frequency_penalty=merged.frequency_penalty,
            max_tokens=merged.max_tokens if merged.HasField("max_tokens") else UNBOUNDED,
            min_tokens=merged.min_tokens,
            stop=tuple(params.stop),
            stop_ids=ids,
            logprobs=merged.logprobs if merged.HasField("logprobs") else None,
            rng=random.Random(merged.seed) if merged.HasField("seed") else random.Random(),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Seen:
    """The tokens of one run, each once, with how often it was sampled; kept up as tokens come."""

    def __init__(self, prompt_ids: Sequence[int], device: torch.device) -> None:
        known = list(dict.fromkeys(prompt_ids))
        self._place = {token: place for place, token in enumerate(known)}
        capacity = max(64, 2 * len(known))
        self._ids = torch.zeros(capacity, dtype=torch.long, device=device)
        self._counts = torch.zeros(capacity, device=device)
        self._ids[: len(known)] = torch.tensor(known, dtype=torch.long, device=device)

    def add(self, token: int) -> None:
        """Counts a sampled token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1

    def __len__(self) -> int:
        return len(self._place)

    @property
    def ids(self) -> torch.Tensor:
        """Distinct tokens of prompt and output, [n]."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> torch.Tensor:
        """How often each was sampled, [n]; 0 for those of the prompt alone."""
        return self._counts[: len(self)]


def penalize(logits: torch.Tensor, rows: Sequence[tuple[int, Sampling, Seen]]) -> None:
    """Applies the penalties of some rows of logits [R, V], in place.

    The repetition penalty counts prompt and output (as transformers'), the other two the output alone (as OpenAI's).
    """
    if not rows:
        return
    device = logits.device
    lengths = torch.tensor([len(seen) for _, _, seen in rows], device=device)

    def spread(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=device).repeat_interleave(lengths)

    row = spread([row for row, _, _ in rows])
    token = torch.cat([seen.ids for _, _, seen in rows])
    count = torch.cat([seen.counts for _, _, seen in rows])
    repetition = spread([sampling.repetition_penalty for _, sampling, _ in rows])
    values = logits[row, token].float()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([sampling.frequency_penalty for _, sampling, _ in rows]) * count
    values -= spread([sampling.presence_penalty for _, sampling, _ in rows]) * (count > 0)
    logits[row, token] = values.to(logits.dtype)


def draw(logits: torch.Tensor, samplings: Sequence[Sampling]) -> list[int]:
    """One token for each row of logits [R, V] (penalties already applied).

    Filters in transformers' order: temperature, top-k, top-p, min-p, each on what the one before it left.
    """
    sampled = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if not sampled:
        return logits.argmax(-1).tolist()
    tokens = [0] * len(samplings)
    if len(sampled) < len(samplings):
        rows = [row for row, sampling in enumerate(samplings) if sampling.greedy]
        for row, token in zip(rows, logits[rows].argmax(-1).tolist(), strict=True):
            tokens[row] = token
    narrow = [row for row in sampled if 0 < samplings[row].top_k < logits.shape[-1]]
    sorted_ = [row for row in sampled if row not in narrow and samplings[row].top_p < 1.0]
    plain = [row for row in sampled if row not in narrow and row not in sorted_]
    for rows, width in (
        (narrow, max((samplings[row].top_k for row in narrow), default=0)),
        (sorted_, logits.shape[-1]),
        (plain, 0),
    ):
        if rows:
            drawn = _draw_filtered(logits[rows].float(), [samplings[row] for row in rows], width)
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = token
    return tokens


def _draw_filtered(logits: torch.Tensor, samplings: Sequence[Sampling], width: int) -> list[int]:
    """Draws from rows [R, V]; `width` likeliest tokens of each are looked at in order, 0: all, unsorted."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    index = None
    if width:
        logits, index = logits.topk(width, dim=-1)
    scaled = logits.double() / column([sampling.temperature for sampling in samplings])
    if width:
        rank = torch.arange(width, device=logits.device)
        kept = column([sampling.top_k or width for sampling in samplings])
        scaled = scaled.masked_fill(rank >= kept, float("-inf"))
    weights = scaled.softmax(-1)
    if width:
        before = weights.cumsum(-1) - weights
        weights = weights.masked_fill(before >= column([sampling.top_p for sampling in samplings]), 0.0)
    floor = column([sampling.min_p for sampling in samplings]) * weights.amax(-1, keepdim=True)
    weights = weights.masked_fill(weights < floor, 0.0)
    cumulative = weights.cumsum(-1)
    uniform = column([sampling.rng.random() for sampling in samplings])
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    last = (weights > 0).long().mul(torch.arange(weights.shape[-1], device=logits.device)).amax(-1, keepdim=True)
    place = torch.minimum(place, last)
    return (place if index is None else index.gather(1, place)).squeeze(1).tolist()
