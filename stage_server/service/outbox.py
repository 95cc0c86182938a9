"""What a run has made and its reader has not got yet: outputs join while the run is out of credit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omni.v1 import content_pb2
from stage_server.engines.base import Output

MEDIA_BYTES = 64 * 1024
"""Media in one message of a run, so that no artifact holds up the messages of other runs."""


@dataclass(slots=True)
class Outbox:
    """Outputs of one run, merged. Numbers count engine outputs; each piece of media counts as one."""

    first: int = 0
    """Number of the oldest output in here."""
    count: int = 0
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[content_pb2.TokenLogprobs] = field(default_factory=list)
    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    media: list[content_pb2.MediaPiece] = field(default_factory=list)
    progress: content_pb2.Progress | None = None
    size: int = 0
    """Bytes in here, roughly."""

    @property
    def made(self) -> int:
        """Outputs made in all."""
        return self.first + self.count

    def put(self, output: Output) -> None:
        """Joins an output to what is here."""
        self.count += max(1, len(output.media))
        if output.token_ids:
            self.token_ids += output.token_ids
        if output.text:
            self.texts.append(output.text)
            self.size += len(output.text)
        if output.logprobs:
            self.logprobs += output.logprobs
        for name, tensor in output.tensors.items():
            self.tensors.setdefault(name, []).append(tensor)
            self.size += tensor.nbytes
        for piece in output.media:
            self.media.append(piece)
            self.size += len(piece.data)
        if output.progress is not None:
            self.progress = output.progress

    def joined_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, each name's joined along the first axis; they stay in here."""
        for name, parts in self.tensors.items():
            if len(parts) > 1:
                self.tensors[name] = [torch.cat(parts)]
        return {name: parts[0] for name, parts in self.tensors.items()}

    def take(self, payload: content_pb2.Payload) -> tuple[int, int]:
        """Moves what fits into one message into `payload`, tensors excepted, and returns (first, count) of it."""
        taken = held = 0
        for piece in self.media:
            if taken and held + len(piece.data) > MEDIA_BYTES:
                break
            held += len(piece.data)
            taken += 1
        rest = self.media[taken:]
        first, count = self.first, self.count - len(rest)
        if self.token_ids:
            payload.token_ids.extend(self.token_ids)
        if self.texts:
            payload.text = self.texts[0] if len(self.texts) == 1 else "".join(self.texts)
        if self.logprobs:
            payload.logprobs.extend(self.logprobs)
        if taken:
            payload.media.extend(self.media[:taken])
        if self.progress is not None:
            payload.progress.CopyFrom(self.progress)
        self.first, self.count = first + count, len(rest)
        self.token_ids, self.texts, self.logprobs, self.tensors = [], [], [], {}
        self.media, self.progress = rest, None
        self.size = sum(len(piece.data) for piece in rest)
        return first, count
