"""Tiny text models, of the kinds that differ for a decoding loop: plain attention, and a sliding window."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tools.tiny import tokenizer as tokens

VOCABULARY = 1024


def _save(model: PreTrainedModel, folder: Path) -> None:
    tokenizer = tokens.make(VOCABULARY)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def qwen3(folder: Path) -> None:
    """A Qwen3 of 0.6 M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    _save(Qwen3ForCausalLM(config).eval(), folder)


def mistral(folder: Path) -> None:
    """A Mistral whose layers see the last 16 positions only."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    _save(MistralForCausalLM(config).eval(), folder)
