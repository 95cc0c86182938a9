"""From tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextStream:
    """One run's text. What `push` and `finish` return, joined, is the text up to the first stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""
        self._unread: list[int] = []
        self.stopped = False
        """A stop string was met; nothing follows."""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Takes a token and gives the text that is certain now; `may_stop` False looks for no stop string yet."""
        piece = self._stream.step(self._backend, token)
        if piece is None:
            self._unread.append(token)
            return ""
        self._unread.clear()
        return self._release(piece, may_stop)

    def finish(self) -> str:
        """The rest, when no token follows: text held for a stop string that did not come, and a broken character."""
        if self.stopped:
            return ""
        if self._unread:
            self._held += self._tokenizer.decode(self._unread, skip_special_tokens=True)
        text, self._held = self._held, ""
        return text

    def piece(self, token: int) -> str:
        """A token's own text, special tokens included."""
        return self._tokenizer.decode([token])

    def _release(self, piece: str, may_stop: bool) -> str:
        text = self._held + piece
        if not self._stop:
            return text
        if not may_stop:
            self._held = ""
            return text
        met = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if met:
            self.stopped = True
            self._held = ""
            return text[: min(met)]
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
