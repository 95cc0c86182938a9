"""What a run has made and its reader has not got yet: outputs join when they are taken, as far as one message holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch

from omni.v1 import content_pb2
from stage_server.engines.base import Output

MESSAGE_BYTES = 64 * 1024
"""What one message of a run holds, so that it holds up no message of other runs; a larger output goes alone."""

_ENTRY_BYTES = 256
"""What an output costs in here however little it holds."""
_FIELD_BYTES = 16
"""Upper bound of what the wire adds to a text, a list of token ids, a log-probability or a progress."""
_PIECE_BYTES = 64
"""Upper bound of what the wire adds to the bytes of a media piece, its names of types aside."""
_TOKEN_BYTES = 5
_HANDLE_BYTES = 512
"""Upper bound of a named tensor on the wire, its names aside."""


@dataclass(slots=True)
class _Entry:
    """What one number stands for: an output, or one piece of media of it."""

    output: Output
    wire: int
    """Bytes in a message, at most; tensors excepted."""
    tensors: int
    """Bytes of its tensors."""


@dataclass(slots=True)
class Taken:
    """The oldest outputs, as many as one message holds."""

    entries: list[_Entry]
    tensors: dict[str, list[torch.Tensor]]
    """By name; to be joined along the first axis."""
    wire: int
    """Bytes in a message, at most."""

    def fill(self, payload: content_pb2.Payload) -> None:
        """Joins all but the tensors in an empty payload."""
        texts: list[str] = []
        for entry in self.entries:
            output = entry.output
            if output.token_ids:
                payload.token_ids.extend(output.token_ids)
            if output.text:
                texts.append(output.text)
            if output.logprobs:
                payload.logprobs.extend(output.logprobs)
            if output.media:
                payload.media.extend(output.media)
            if output.progress is not None:
                payload.progress.CopyFrom(output.progress)
        if texts:
            payload.text = texts[0] if len(texts) == 1 else "".join(texts)

    def outlines(self) -> list[torch.Tensor]:
        """Each joined tensor in shape and dtype, without its data where there is something to join."""
        return [_outline(parts) for parts in self.tensors.values()]

    def joined(self) -> list[torch.Tensor]:
        """Each joined tensor."""
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self.tensors.values()]


@dataclass(slots=True)
class Outbox:
    """Outputs of one run. Each engine output has one number; one with several pieces of media has one for each piece.

    A number is never split between messages, so that every message covers a whole range of them.
    """

    first: int = 0
    """Number of the oldest output in here."""
    size: int = 0
    """Bytes in here, roughly, tensors excepted."""
    tensor_bytes: int = 0
    _entries: deque[_Entry] = field(default_factory=deque)

    @property
    def count(self) -> int:
        """Outputs in here."""
        return len(self._entries)

    @property
    def made(self) -> int:
        """Outputs made in all."""
        return self.first + len(self._entries)

    def put(self, output: Output) -> None:
        """Takes an output in."""
        if len(output.media) < 2:
            self._put(output)
            return
        self._put(replace(output, media=output.media[:1]))
        for piece in output.media[1:]:
            self._put(Output(output.run, media=[piece]))

    def _put(self, output: Output) -> None:
        tensors = 0
        wire = _FIELD_BYTES
        if output.text:
            text = output.text
            wire += _FIELD_BYTES + len(text if text.isascii() else text.encode("utf-8", "surrogatepass"))
        if output.token_ids:
            wire += _FIELD_BYTES + _TOKEN_BYTES * len(output.token_ids)
        for each in output.logprobs:
            wire += _FIELD_BYTES + each.ByteSize()
        for piece in output.media:
            wire += _PIECE_BYTES + len(piece.data) + len(piece.mime_type)
        for name, tensor in output.tensors.items():
            tensors += tensor.nbytes
            if self._entries:  # It may wait for long.
                output.tensors[name] = _own(tensor)
        self._entries.append(_Entry(output, wire, tensors))
        self.size += _ENTRY_BYTES + wire
        self.tensor_bytes += tensors

    def look(self, tensor_bytes: int) -> Taken:
        """What the next message holds: as many outputs as fit, at least one. They stay in here until `drop`.

        Args:
            tensor_bytes: bound of the tensors' bytes.
        """
        entries = self._entries
        if len(entries) == 1 and not entries[0].output.tensors:  # What nearly every message is whose reader keeps up.
            return Taken([entries[0]], {}, entries[0].wire)
        taken = Taken([], {}, 0)
        wire = tensors = 0
        for entry in entries:
            wire += entry.wire
            tensors += entry.tensors
            if taken.entries and (wire > MESSAGE_BYTES or tensors > tensor_bytes):
                break
            named = entry.output.tensors
            if named:
                if not all(_joins(taken.tensors.get(name), tensor) for name, tensor in named.items()):
                    break
                for name, tensor in named.items():
                    taken.tensors.setdefault(name, []).append(tensor)
            taken.entries.append(entry)
            taken.wire = wire
        taken.wire += sum(_HANDLE_BYTES + len(name) for name in taken.tensors)
        return taken

    def drop(self, taken: Taken) -> tuple[int, int]:
        """Forgets what was looked at last, which is on its way, and returns its first number and their count."""
        first, count = self.first, len(taken.entries)
        for entry in taken.entries:
            self._entries.popleft()
            self.size -= _ENTRY_BYTES + entry.wire
            self.tensor_bytes -= entry.tensors
        self.first = first + count
        return first, count


def _joins(parts: list[torch.Tensor] | None, tensor: torch.Tensor) -> bool:
    """Whether a tensor can be joined to those of earlier outputs."""
    if not parts:
        return True
    last = parts[-1]
    return tensor.ndim > 0 and last.dtype == tensor.dtype and last.ndim > 0 and last.shape[1:] == tensor.shape[1:]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of what it is a part of: a step makes one for all its runs."""
    return tensor if tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes else tensor.clone()


def _outline(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    rows = sum(part.shape[0] for part in parts)
    return torch.empty((rows, *parts[0].shape[1:]), dtype=parts[0].dtype, device="meta")
