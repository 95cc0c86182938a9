"""Attention over a slot cache, for a packed step of many runs.

Registered with transformers under `NAME`; a model whose text config names it hands its queries to `attend`, and the
cache that it was called with (`SlotCache`) says which rows belong to which run. Without a mask function of that name
transformers builds no mask: masking is done here, from the runs' lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from stage_server.engines.ar.cache import LayerView

NAME = "omnid_slots"


def use(config: PretrainedConfig) -> None:
    """Makes the model of this (text) config attend over slots."""
    config._attn_implementation = NAME


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LayerView,
    value: LayerView,
    _mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Queries [1, heads, T, d] over the layer that `SlotCache.update` has just written -> [1, T, heads, d].

    Rows that put one position through (decoding) are attended together, in place, over the slots in use; longer
    slices (prompts) one by one. Query heads that share a key head are laid along the query axis, so that keys and
    values are never repeated.
    """
    view = key
    step = view.step
    heads, total, dim = query.shape[1:]
    groups = heads // view.keys.shape[1]
    packed = query[0].transpose(0, 1)

    def scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if softcap is None and s_aux is None:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        weights = torch.matmul(q, k.transpose(-1, -2)).float() * (scaling or dim**-0.5)
        if softcap is not None:
            weights = torch.tanh(weights / softcap) * softcap
        weights = weights + mask
        if s_aux is not None:
            repeats = q.shape[2] // groups
            sink = s_aux.float().view(1, -1, groups, 1).repeat_interleave(repeats, dim=2)
            weights = torch.cat((weights, sink.expand(q.shape[0], -1, -1, 1)), dim=-1)
            return torch.matmul(weights.softmax(-1)[..., :-1].to(v.dtype), v)
        return torch.matmul(weights.softmax(-1).to(v.dtype), v)

    output = query.new_empty(total, heads, dim)
    if step.decode_rows is not None:
        slots, reach = step.slots_in_use, step.decode_reach
        if step.whole:
            q = packed.contiguous()
        else:
            q = query.new_zeros(slots, heads, dim)
            q.index_copy_(0, step.decode_slots, packed.index_select(0, step.decode_rows))
        mixed = scores(
            q.view(slots, -1, groups, dim),
            view.keys[:slots, :, :reach],
            view.values[:slots, :, :reach],
            step.decode_mask(sliding_window),
        )
        mixed = mixed.reshape(slots, heads, dim)
        if step.whole:
            return mixed.unsqueeze(0), None
        output.index_copy_(0, step.decode_rows, mixed.index_select(0, step.decode_slots))
    for part in step.prompts:
        rows = slice(part.offset, part.offset + part.length)
        keys = view.keys[part.slot : part.slot + 1, :, : part.stop]
        values = view.values[part.slot : part.slot + 1, :, : part.stop]
        if part.start == 0 and sliding_window is None and softcap is None and s_aux is None:
            mixed = scaled_dot_product_attention(
                query[:, :, rows], keys, values, is_causal=True, scale=scaling, enable_gqa=groups > 1
            )
            output[rows] = mixed[0].transpose(0, 1)
            continue
        q = packed[rows].reshape(part.length, -1, groups, dim).permute(1, 2, 0, 3)
        q = q.reshape(1, -1, groups * part.length, dim)
        mixed = scores(q, keys, values, part.mask(sliding_window, groups))
        output[rows] = mixed.view(-1, groups, part.length, dim).permute(2, 0, 1, 3).reshape(part.length, heads, dim)
    return output.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
