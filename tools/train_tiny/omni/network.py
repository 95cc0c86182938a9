"""The forward pass of training: the layers of the model itself, with all experts computed for all positions.

Taking every expert's output times its weight, zero where it was not chosen, is the same sum as sending each position
to its experts; at this width it costs less than sorting the positions, and shapes do not depend on the data. Rows hold
several sequences, told apart by their segment numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_tiny.optimize import console

Layer = Callable[..., tuple[Tensor, Tensor]]
DROPPED = 0.1
"""Share of a branch's values that are left out in training."""


def segment_mask(segments: Tensor) -> Tensor:
    """Which positions each one sees: those before it in its own sequence. [B, L] to [B, 1, L, L] bool."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


def mixture(block: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What a mixture of experts adds, and how unevenly it used them (1 where even)."""
    gate, experts = block.gate, block.experts
    flat = hidden.reshape(-1, hidden.shape[-1])
    chances = functional.softmax(functional.linear(flat, gate.weight), dim=-1, dtype=torch.float)
    top, chosen = chances.topk(gate.top_k, dim=-1)
    if gate.norm_topk_prob:
        top = top / top.sum(dim=-1, keepdim=True)
    weights = torch.zeros_like(chances).scatter(1, chosen, top)
    total = torch.zeros_like(flat)
    for expert in range(gate.num_experts):
        gated, up = functional.linear(flat, experts.gate_up_proj[expert]).chunk(2, dim=-1)
        output = functional.linear(experts.act_fn(gated) * up, experts.down_proj[expert])
        total = total + output * weights[:, expert, None].to(output.dtype)
    if hasattr(block, "shared_expert"):
        total = total + functional.sigmoid(block.shared_expert_gate(flat)) * block.shared_expert(flat)
    used = (weights > 0).float().mean(0)
    uneven = (used * chances.mean(0)).sum() * gate.num_experts / gate.top_k
    return total.reshape(hidden.shape), uneven


def decoder_layer(block: nn.Module, hidden: Tensor, mask: Tensor | None, rope: Any) -> tuple[Tensor, Tensor]:
    """One layer of thinker, talker or code predictor. Hidden states [B, L, H]."""
    normed = block.input_layernorm(hidden)
    attended = block.self_attn(hidden_states=normed, position_embeddings=rope, attention_mask=mask)[0]
    hidden = hidden + functional.dropout(attended, DROPPED, block.training)
    normed = block.post_attention_layernorm(hidden)
    if hasattr(block.mlp, "experts"):
        added, uneven = mixture(block.mlp, normed)
    else:
        added, uneven = block.mlp(normed), hidden.new_ones((), dtype=torch.float)
    return hidden + functional.dropout(added, DROPPED, block.training), uneven


def backbone(
    model: nn.Module, embeds: Tensor, positions: Tensor, mask: Tensor | None, layer: Layer = decoder_layer
) -> tuple[Tensor, Tensor]:
    """A stack of layers and its last norm: embeddings [B, L, H] to hidden states, and the mean unevenness."""
    rope = model.rotary_emb(embeds, positions)
    hidden, uneven = functional.dropout(embeds, DROPPED, model.training), []
    for block in model.layers:
        hidden, odd = layer(block, hidden, mask, rope)
        uneven.append(odd)
    normed: Tensor = model.norm(hidden)
    return normed, torch.stack(uneven).mean()


def fastest(device: torch.device, attempt: Callable[[Layer], None]) -> Layer:
    """`decoder_layer`, compiled where a GPU runs it: one compilation serves all layers of a kind.

    `attempt` puts a batch through, forward and backward; where that fails the layer stays as it is.
    """
    if device.type == "cuda":
        layer: Layer = torch.compile(decoder_layer, dynamic=False)
        try:
            attempt(layer)
            torch.cuda.synchronize()
        except Exception as error:  # whatever a compiler may raise, training goes on without it
            console.print(f"layers are not compiled: {error!r:.500}")
        else:
            return layer
    return decoder_layer
