"""Sequences of different length in rows of one length, for batches without padding and without new shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ragged:
    """Sequences as one flat tensor a field, on the device that trains."""

    def __init__(self, lengths: Sequence[int], fields: dict[str, Tensor], device: torch.device) -> None:
        """`fields` are [sum of lengths, ...] each, the sequences one after another."""
        self.lengths: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        self.begins = np.concatenate(([0], np.cumsum(self.lengths)[:-1]))
        self.fields = {name: flat.to(device) for name, flat in fields.items()}
        self.device = device


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows. Where nothing lies, `segments` is 0 and the fields are those of some other position."""

    segments: Tensor
    """Which sequence a position belongs to, from 1 in each row, [B, L]."""
    positions: Tensor
    """Place within its sequence, [B, L]."""
    fields: dict[str, Tensor]
    """[B, L, ...] each."""


def batches(data: Ragged, rows: int, length: int, seed: int, skip: int = 0) -> Iterator[Batch]:
    """Endless batches of `rows` by `length`; each pass goes through all sequences in a new order.

    The same seed gives the same batches; the first `skip` are left out without being made.

    Raises:
        ValueError: a sequence is longer than a row.
    """
    if int(data.lengths.max()) > length:
        raise ValueError(f"a sequence of {int(data.lengths.max())} positions does not fit into a row of {length}")
    rng = np.random.default_rng(seed)
    waiting: list[NDArray[np.int64]] = []
    while True:
        waiting += _rows(data.lengths, rng.permutation(len(data.lengths)), length)
        while len(waiting) >= rows:
            taken, waiting = waiting[:rows], waiting[rows:]
            if skip:
                skip -= 1
                continue
            yield _batch(data, taken, length)


def whole(data: Ragged, length: int) -> Batch:
    """All sequences, once each, in their order."""
    return _batch(data, _rows(data.lengths, np.arange(len(data.lengths)), length), length)


def _rows(lengths: NDArray[np.int64], order: NDArray[np.int64], length: int) -> list[NDArray[np.int64]]:
    """Cuts an order into runs that fit into a row."""
    found, begin, used = [], 0, 0
    for place, size in enumerate(lengths[order].tolist()):
        if used + size > length:
            found.append(order[begin:place])
            begin, used = place, 0
        used += size
    found.append(order[begin:])
    return found


def _batch(data: Ragged, rows: list[NDArray[np.int64]], length: int) -> Batch:
    """Gathers on the device: only index, segment and position of each place cross to it, in one copy."""
    members = np.concatenate(rows)
    counts = np.array([len(row) for row in rows])
    sizes = data.lengths[members]
    first = np.repeat(np.cumsum(counts) - counts, counts)
    ends = np.cumsum(sizes)
    within = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    target = np.repeat(np.arange(len(rows)), counts) * length + (ends - sizes) - (ends - sizes)[first]
    places = np.repeat(target, sizes) + within
    host = torch.zeros(3, len(rows) * length, dtype=torch.int32, pin_memory=data.device.type == "cuda")
    table = host.numpy()
    table[0, places] = np.repeat(data.begins[members], sizes) + within
    table[1, places] = np.repeat(np.arange(len(members)) - first + 1, sizes)
    table[2, places] = within
    index, segments, positions = host.to(data.device, non_blocking=True).view(3, len(rows), length)
    return Batch(segments, positions, {name: flat[index.long()] for name, flat in data.fields.items()})
