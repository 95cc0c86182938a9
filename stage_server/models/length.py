"""Bounds the text that is tokenized at all: tokens of megabytes of text take minutes to find."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_length(field: str, text: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """Refuses a text that has more than `longest` tokens whichever they are.

    Raises:
        OmniError: PROMPT_TOO_LONG.
    """
    most = longest * _longest_token(tokenizer)
    if len(text) > most:
        raise too_long(field, f"has {len(text)} characters; no more than {most} fit into the model's {longest} tokens")


def too_long(field: str, told: str) -> OmniError:
    """The error of a prompt that is too long."""
    return invalid(FieldViolation(field, told), reason=Reason.PROMPT_TOO_LONG)


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(map(len, tokenizer.get_vocab()))
