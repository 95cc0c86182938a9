"""Bounds the text that is tokenized at all: tokens of megabytes of text take minutes to find."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def characters(tokenizer: PreTrainedTokenizerBase, tokens: int) -> int:
    """More characters than this never fit into `tokens` tokens."""
    return tokens * _longest_token(tokenizer)


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(map(len, tokenizer.get_vocab()))


def too_long(field: str, length: int, unit: str, most: int) -> OmniError:
    """The error of a prompt of `length` of a unit."""
    return invalid(
        FieldViolation(field, f"has {length} {unit}; at most {most} are taken"), reason=Reason.PROMPT_TOO_LONG
    )
