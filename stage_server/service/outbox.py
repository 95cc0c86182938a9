"""What a run has made and its reader has not got yet: outputs join when they are taken, as far as one message holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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
    """Bytes in a message, at most."""
    tensors: int
    """Bytes of its tensors."""


@dataclass(slots=True)
class Taken:
    """What goes out in one message."""

    payload: content_pb2.Payload
    tensors: dict[str, torch.Tensor]
    """By name, joined along the first axis; they are not in the payload."""
    count: int
    """Numbers that it covers."""
    wire: int
    """Bytes in a message, at most."""


@dataclass(slots=True)
class Outbox:
    """Outputs of one run. Each engine output has one number; one with several pieces of media has one for each piece.

    Numbers are never split between messages, so that every message covers a whole range of them.
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
        rest = output.media[1:]
        if rest:
            del output.media[1:]
        self._put(output)
        for piece in rest:
            self._put(Output(output.run, media=[piece]))

    def _put(self, output: Output) -> None:
        tensors = 0
        wire = _FIELD_BYTES
        if output.text:
            wire += _FIELD_BYTES + len(output.text.encode())
        if output.token_ids:
            wire += _FIELD_BYTES + _TOKEN_BYTES * len(output.token_ids)
        for each in output.logprobs:
            wire += _FIELD_BYTES + each.ByteSize()
        for piece in output.media:
            wire += _PIECE_BYTES + len(piece.data) + len(piece.mime_type)
        for tensor in output.tensors.values():
            tensors += tensor.nbytes
        self._entries.append(_Entry(output, wire, tensors))
        self.size += _ENTRY_BYTES + wire
        self.tensor_bytes += tensors

    def look(self, tensor_bytes: int) -> Taken:
        """What the next message holds: as many outputs as fit, at least one. They stay in here until `drop`.

        Args:
            tensor_bytes: bound of its tensors.
        """
        entries = self._entries
        head = entries[0]
        taken, wire, tensors = 1, head.wire, head.tensors
        while taken < len(entries):
            entry = entries[taken]
            wire += entry.wire
            tensors += entry.tensors
            if wire > MESSAGE_BYTES or tensors > tensor_bytes or not _joins(head.output, entry.output):
                break
            taken += 1
        return _joined([entries[at] for at in range(taken)])

    def drop(self, taken: Taken) -> int:
        """Forgets what has been looked at last, which is on its way; returns the number of its first output."""
        first = self.first
        for _ in range(taken.count):
            entry = self._entries.popleft()
            self.size -= _ENTRY_BYTES + entry.wire
            self.tensor_bytes -= entry.tensors
        self.first += taken.count
        return first


def _joins(one: Output, other: Output) -> bool:
    """Whether the tensors of an output can be joined to those of an earlier one."""
    for name, tensor in other.tensors.items():
        before = one.tensors.get(name)
        if before is not None and (
            not tensor.ndim
            or before.ndim != tensor.ndim
            or before.dtype != tensor.dtype
            or before.shape[1:] != tensor.shape[1:]
        ):
            return False
    return True


def _joined(entries: list[_Entry]) -> Taken:
    payload = content_pb2.Payload()
    texts: list[str] = []
    tensors: dict[str, list[torch.Tensor]] = {}
    wire = 0
    for entry in entries:
        output = entry.output
        wire += entry.wire
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
        for name, tensor in output.tensors.items():
            tensors.setdefault(name, []).append(tensor)
    if texts:
        payload.text = texts[0] if len(texts) == 1 else "".join(texts)
    together = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in tensors.items()}
    return Taken(payload, together, len(entries), wire + sum(_HANDLE_BYTES + len(name) for name in together))
