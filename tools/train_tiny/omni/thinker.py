"""Trains the thinker: questions in, answers out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_tiny.omni import language, network
from tools.train_tiny.omni.packing import Batch, Ragged
from tools.train_tiny.omni.tokenizer import chat
from tools.train_tiny.optimize import Losses

SYSTEMS = (
    "you are a helpful assistant",
    "you are tiny",
    "answer in one short sentence",
    "You are Qwen, a virtual human developed by the Qwen Team, capable of perceiving auditory and visual inputs.",
)
_UNEVEN = 0.01
"""Weight of what keeps the experts equally used."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt that ends where the answer begins, and the answer."""

    prompt: str
    answer: str


def conversations(shard: int, count: int) -> list[Conversation]:
    """Some conversations; the same for the same shard. A tenth has a system message, another earlier turns."""
    rng = random.Random(1_000_000 + shard)
    made = []
    for _ in range(count):
        found = language.exchange(rng)
        earlier: list[tuple[str, str]] = []
        if rng.random() < 0.12:
            earlier.append(("system", rng.choice(SYSTEMS)))
        if rng.random() < 0.12:
            before = language.exchange(rng)
            earlier += [("user", before.question), ("assistant", before.answer)]
        made.append(Conversation(chat(found.question, tuple(earlier)), found.answer))
    return made


def data(tokenizer: Any, made: Sequence[Conversation], device: torch.device) -> Ragged:
    """Conversations as tokens; `labels` are the next tokens of answers and their end, -100 elsewhere."""
    backend = tokenizer.backend_tokenizer
    prompts = backend.encode_batch([each.prompt for each in made], add_special_tokens=False)
    answers = backend.encode_batch([f"\n{each.answer}" for each in made], add_special_tokens=False)
    ids, labels, lengths = [], [], []
    end = tokenizer.eos_token_id
    for prompt, answer in zip(prompts, answers, strict=True):
        known, told = prompt.ids, [*answer.ids[1:], end]  # without the line break, which the prompt ends with
        ids += known + told
        labels += [-100] * (len(known) - 1) + told + [-100]
        lengths.append(len(known) + len(told))
    fields = {"ids": torch.tensor(ids, dtype=torch.int16), "labels": torch.tensor(labels, dtype=torch.int16)}
    return Ragged(lengths, fields, device)


class ThinkerLoss:
    """Cross-entropy of the answers."""

    def __init__(self, layer: network.Layer) -> None:
        self._layer = layer

    def __call__(self, thinker: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        labels = torch.where(batch.segments > 0, batch.fields["labels"].long(), -100)
        logits, uneven = logits_of(thinker, batch, self._layer)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
        with torch.no_grad():
            told = labels != -100
            right = ((logits.argmax(-1) == labels) & told).sum() / told.sum()
        return loss + _UNEVEN * uneven, {"loss": loss, "right": right, "uneven": uneven}


def logits_of(thinker: nn.Module, batch: Batch, layer: network.Layer) -> tuple[Tensor, Tensor]:
    """Logits [B, L, vocabulary] of packed rows, and how unevenly experts were used."""
    embeds = functional.embedding(batch.fields["ids"].long(), thinker.model.embed_tokens.weight)
    positions = batch.positions.expand(3, -1, -1)
    mask = network.segment_mask(batch.segments)
    hidden, uneven = network.backbone(thinker.model, embeds, positions, mask, layer)
    return thinker.lm_head(hidden), uneven


@torch.no_grad()
def exact(thinker: nn.Module, batch: Batch) -> float:
    """Share of a batch's conversations whose answer would be given word for word: each token is the likeliest one after
    those before it, which is what greedy decoding needs."""
    labels = torch.where(batch.segments > 0, batch.fields["labels"].long(), -100)
    logits, _ = logits_of(thinker, batch, network.decoder_layer)
    wrong = (logits.argmax(-1) != labels) & (labels != -100)
    rows = torch.arange(len(labels), device=labels.device)[:, None] * 1000 + batch.segments
    there = batch.segments > 0
    return 1 - len(rows[wrong].unique()) / len(rows[there].unique())
