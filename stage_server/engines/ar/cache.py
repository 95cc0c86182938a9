"""The KV cache: one slot a run, written in place.

Keys and values of a layer lie in one tensor [slots, kv_heads, max_length, head_dim], made once. A step writes the new
positions where they belong and attends over a view of the slots in use; nothing is copied but the row of the last
slot, once, when a run leaves a hole below it. On the CPU, memory that no run has reached is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Cache

from omni.rpc.errors import OmniError, Reason

if TYPE_CHECKING:
    from stage_server.engines.ar.decoder import Geometry


SPREAD = 17
"""Positions that lie unused behind each head's keys. Lengths are powers of two: without it, all heads of all slots
would begin in the same few sets of the CPU's caches, and throw each other out at every step."""


@dataclass(slots=True)
class PromptPart:
    """Several positions of one run in a step."""

    slot: int
    start: int
    stop: int
    offset: int
    device: torch.device
    dtype: torch.dtype
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.stop - self.start

    def mask(self, window: int | None, groups: int) -> torch.Tensor:
        """What is added to the scores, [groups * length, stop]: 0, or -inf where a query does not see the key. The
        queries of one head follow those of the one before it."""
        if window not in self._masks:
            query = torch.arange(self.start, self.stop, device=self.device).unsqueeze(1)
            keys = torch.arange(self.stop, device=self.device).unsqueeze(0)
            mask = keys <= query
            if window is not None:
                mask &= keys > query - window
            self._masks[window] = _additive(mask, self.dtype).repeat(groups, 1)
        return self._masks[window]


@dataclass(slots=True)
class StepLayout:
    """Where the rows of a packed step belong; the same for all layers."""

    index: torch.Tensor
    """Row of each (kv head, packed position) in a layer's storage seen as [slots * kv_heads * length, head_dim]."""
    slots_in_use: int
    prompts: list[PromptPart]
    decode_rows: torch.Tensor | None
    """Packed rows of the runs that put one position through, or None when there are none."""
    decode_slots: torch.Tensor
    decode_lengths: torch.Tensor
    """For every slot in use, the keys that its query sees; 1 for slots that are not decoding (their result is junk)."""
    decode_reach: int
    """Longest of them."""
    dtype: torch.dtype
    whole: bool
    """Every slot in use decodes, in the order of the slots, and nothing else is in the step."""
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """What is added to the scores of each decoding slot, [slots_in_use, 1, 1, decode_reach]."""
        if window not in self._masks:
            keys = torch.arange(self.decode_reach, device=self.decode_lengths.device)
            lengths = self.decode_lengths.unsqueeze(1)
            mask = keys < lengths
            if window is not None:
                mask &= keys >= lengths - window
            self._masks[window] = _additive(mask, self.dtype)[:, None, None, :]
        return self._masks[window]


def _zeros(shape: tuple[int, ...], geometry: Geometry) -> torch.Tensor:
    """Zeros, so that a masked key never is a NaN; on the CPU the pages are the kernel's until they are written to."""
    if geometry.device.type != "cpu":
        return torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)
    size = math.prod(shape) * geometry.dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(geometry.dtype).view(shape)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Made once a step: given a boolean mask, every layer's attention would make it again."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


@dataclass(frozen=True, slots=True)
class LayerView:
    """A layer's storage and the step at work, as `attention.attend` takes them."""

    keys: torch.Tensor
    values: torch.Tensor
    step: StepLayout


class SlotCache(Cache):
    """Cache of all runs. `begin` says what the next forward puts through."""

    def __init__(self, geometry: Geometry, slots: int) -> None:
        """For at most `slots` runs at a time.

        Raises:
            OmniError: STAGE_FAILED, when there is no memory for it, with what to lower.
        """
        super().__init__(layers=[])
        self.geometry = geometry
        self._length = geometry.max_length + SPREAD
        shape = (slots, geometry.kv_heads, self._length, geometry.head_dim)
        try:
            self._keys = [_zeros(shape, geometry) for _ in range(geometry.layers)]
            self._values = [_zeros(shape, geometry) for _ in range(geometry.layers)]
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = 2 * geometry.layers * math.prod(shape) * geometry.dtype.itemsize
            message = (
                f"no memory on {geometry.device} for the KV cache of {size} bytes: {slots} runs (`max_running`) of"
                f" {geometry.max_length} positions (`engine.max_length`); lower one of them"
            )
            raise OmniError(Reason.STAGE_FAILED, message) from error
        self._owners: list[int] = []
        self._capacity = slots
        self._step: StepLayout | None = None
        heads = torch.arange(geometry.kv_heads, device=geometry.device) * self._length
        self._heads = heads.unsqueeze(1)

    @property
    def free(self) -> int:
        """Slots without an owner."""
        return self._capacity - len(self._owners)

    def acquire(self, run: int) -> None:
        """Gives a run the next slot. The slots in use are always the first ones."""
        assert self.free, "more runs than slots"
        self._owners.append(run)

    def release(self, run: int, last_position: int = 0) -> None:
        """Takes a run's slot back; the last run in use, `last_position` long, moves into it."""
        slot = self._owners.index(run)
        last = self._owners.pop()
        if last == run:
            return
        self._owners[slot] = last
        source = len(self._owners)
        for tensor in (*self._keys, *self._values):
            tensor[slot, :, :last_position].copy_(tensor[source, :, :last_position])

    def wipe(self, run: int) -> None:
        """Zeroes a run's slot."""
        slot = self._owners.index(run)
        for tensor in (*self._keys, *self._values):
            tensor[slot].zero_()

    @property
    def last(self) -> int | None:
        """The run in the last slot in use, which a release may move."""
        return self._owners[-1] if self._owners else None

    def begin(self, parts: Sequence[tuple[int, int, int]]) -> None:
        """Lays out a step of (run, start, stop) slices, packed in this order."""
        device = self.geometry.device
        slot_of = {run: slot for slot, run in enumerate(self._owners)}
        in_use = len(self._owners)
        rows, slots, prompts, places = [], [], [], []
        lengths = [1] * in_use
        offset = 0
        for run, start, stop in parts:
            slot = slot_of[run]
            places.append((slot, start, stop))
            if stop - start == 1:
                rows.append(offset)
                slots.append(slot)
                lengths[slot] = stop
            else:
                prompts.append(PromptPart(slot, start, stop, offset, device, self.geometry.dtype))
            offset += stop - start
        stride = self.geometry.kv_heads * self._length
        if prompts:
            base = torch.cat([torch.arange(start, stop) + slot * stride for slot, start, stop in places])
        else:
            base = torch.tensor([slot * stride + start for slot, start, _ in places])
        self._step = StepLayout(
            index=(base.to(device).unsqueeze(0) + self._heads).reshape(-1),
            slots_in_use=in_use,
            prompts=prompts,
            decode_rows=torch.tensor(rows, device=device) if rows else None,
            decode_slots=torch.tensor(slots, dtype=torch.long, device=device),
            decode_lengths=torch.tensor(lengths, device=device),
            decode_reach=max(lengths, default=1),
            dtype=self.geometry.dtype,
            whole=not prompts and slots == list(range(in_use)),
        )

    def update(  # type: ignore[override]  # the view stands for both tensors
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[LayerView, LayerView]:
        """Writes the step's keys and values [1, kv_heads, T, head_dim] of a layer."""
        step = self._step
        assert step is not None, "begin() lays a step out first"
        dim = self.geometry.head_dim
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.view(-1, dim).index_copy_(0, step.index, key_states.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, step.index, value_states.reshape(-1, dim))
        view = LayerView(keys, values, step)
        return view, view

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given to the model with each step, so none is counted here."""
        return 0

    @property
    def is_initialized(self) -> bool:
        return True
