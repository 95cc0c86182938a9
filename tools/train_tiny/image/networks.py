"""The model in diffusers' Z-Image layout, and its forward pass for whole batches.

Z-Image's own forward takes lists of pictures and captions of any size. Here all captions are padded to 32 tokens with
the model's learned token, as its pipeline pads them, so pictures of one size need neither lists nor masks; the result
is the same (tests/unit/train_image).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_tiny.image.captions import LENGTH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHANNELS = 8
"""Of latents; the VAE makes pictures four times smaller on each side."""
_PATCH = 2
_KEY = "2-1"
"""The transformer's name of the layers for its patch size."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the positions, [tokens, 1, half a head]."""


class Painter(nn.Module):
    """Text encoder and transformer, which are trained together: latents, noise level and caption to velocity."""

    def __init__(self, text: nn.Module, transformer: nn.Module) -> None:
        super().__init__()
        self.text = text
        self.transformer = transformer
        self._places: dict[tuple[int, int], tuple[Rotation, Rotation]] = {}

    def prepare(self, side: int) -> None:
        """Works out where patches stand on square latents of this side; `forward` does it itself, not compiled well."""
        rows = side // _PATCH
        device = next(self.parameters()).device
        self._places[rows, rows] = rotations(self.transformer, rows, rows, device)

    def forward(self, latents: Tensor, sigma: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
        """The velocity from picture to noise.

        Args:
            latents: [n, 8, h, w], a picture mixed with noise.
            sigma: [n], the share of noise, from 0 to 1.
            ids: [n, 32], captions.
            valid: [n, 32], which of them are text.
        """
        body: Any = self.transformer
        count, channels, height, width = latents.shape
        rows, columns = height // _PATCH, width // _PATCH
        if (rows, columns) not in self._places:
            self._places[rows, columns] = rotations(body, rows, columns, latents.device)
        picture_at, caption_at = self._places[rows, columns]
        # The model's time runs the other way, and its velocity too.
        time = body.t_embedder.mlp(body.t_embedder.timestep_embedding((1 - sigma) * body.t_scale, 256))
        caption = body.cap_embedder[1](_norm(encode(self.text, ids), body.cap_embedder[0])).float()
        caption = torch.where(valid[..., None], caption, body.cap_pad_token.float())
        for block in body.context_refiner:
            caption = _block(block, caption, caption_at)
        patches = latents.view(count, channels, rows, _PATCH, columns, _PATCH).permute(0, 2, 4, 3, 5, 1)
        picture = body.all_x_embedder[_KEY](patches.reshape(count, rows * columns, -1)).float()
        for block in body.noise_refiner:
            picture = _block(block, picture, picture_at, time)
        both = torch.cat([picture, caption], 1)
        at = torch.cat([picture_at[0], caption_at[0]]), torch.cat([picture_at[1], caption_at[1]])
        for block in body.layers:
            both = _block(block, both, at, time)
        last = body.all_final_layer[_KEY]
        picture = functional.layer_norm(both[:, : rows * columns].float(), (both.shape[-1],), eps=1e-6)
        picture = last.linear(picture * (1 + last.adaLN_modulation(time)[:, None].float()))
        picture = picture.view(count, rows, columns, _PATCH, _PATCH, channels).permute(0, 5, 1, 3, 2, 4)
        return -picture.reshape(count, channels, height, width).float()


@dataclass(slots=True)
class Model:
    """The parts of the pipeline."""

    vae: nn.Module
    painter: Painter


def build(tokenizer: PreTrainedTokenizerFast, side: int, *, width: int = 192, layers: int = 6) -> Model:
    """A model that has learned nothing. `side` is that of its pictures, in pixels."""
    from diffusers import AutoencoderKL, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=8,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
        sample_size=side,
    )
    text = Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,  # the pipeline reads what goes into the last
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.08,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    body = ZImageTransformer2DModel(
        in_channels=CHANNELS,
        dim=width,
        n_layers=layers,
        n_refiner_layers=1,
        n_heads=width // 32,
        n_kv_heads=width // 32,
        cap_feat_dim=128,
        axes_dims=[8, 12, 12],
        axes_lens=[512, 64, 64],
    )
    _initialize(body)
    return Model(vae, Painter(text, body))


def load(folder: str, tokenizer: PreTrainedTokenizerFast) -> Model:
    """The model of a pipeline's folder, to train on with another vocabulary: words are matched by their text."""
    from diffusers import AutoencoderKL, ZImageTransformer2DModel
    from transformers import AutoTokenizer, Qwen3Model

    vae = AutoencoderKL.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
    body = ZImageTransformer2DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.float32)
    text = Qwen3Model.from_pretrained(folder, subfolder="text_encoder", dtype=torch.float32)
    known = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer").get_vocab()
    made = build(tokenizer, vae.config.sample_size, width=body.config.dim, layers=body.config.n_layers)
    fresh: Any = made.painter.text
    with torch.no_grad():
        rows = fresh.embed_tokens.weight
        for word, index in tokenizer.get_vocab().items():
            if word in known:
                rows[index] = text.embed_tokens.weight[known[word]]
    state = {name: value for name, value in text.state_dict().items() if name != "embed_tokens.weight"}
    fresh.load_state_dict(state, strict=False)
    made.painter.transformer.load_state_dict(body.state_dict())
    return Model(vae, made.painter)


def save(model: Model, tokenizer: PreTrainedTokenizerFast, folder: str, shift: float) -> None:
    """Writes the pipeline's folder, in bfloat16. The model's own weights are rounded by it."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline

    parts = [part.to("cpu", torch.bfloat16) for part in (model.vae, model.painter.text, model.painter.transformer)]
    vae, text, body = parts
    ZImagePipeline(FlowMatchEulerDiscreteScheduler(shift=shift), vae, text, tokenizer, body).save_pretrained(folder)


def encode(text: Any, ids: Tensor) -> Tensor:
    """`hidden_states[-2]` of the text encoder, [n, 32, 128]. Padding is on the right, so causality hides it."""
    hidden = text.embed_tokens(ids)
    cosine, sine = text.rotary_emb(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
    cosine, sine = cosine[:, None], sine[:, None]

    def turn(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cosine + torch.cat([-second, first], -1) * sine

    for layer in text.layers[:-1]:
        attention, seen = layer.self_attn, _norm(hidden, layer.input_layernorm)
        query, key, value = (
            project(seen).unflatten(-1, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query = turn(_norm(query, attention.q_norm).transpose(1, 2))
        key, value = turn(_norm(key, attention.k_norm).transpose(1, 2)), value.transpose(1, 2)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = functional.scaled_dot_product_attention(
            query.to(value.dtype), key.to(value.dtype), value, is_causal=True
        )
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(_norm(hidden, layer.post_attention_layernorm))
    return hidden


def rotations(body: Any, rows: int, columns: int, device: torch.device) -> tuple[Rotation, Rotation]:
    """Where a picture's patches and a caption's tokens stand: captions first along the first axis, then the picture."""
    down, across = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    picture = torch.stack([torch.full_like(down, LENGTH + 1), down, across], -1).reshape(-1, 3)
    places = torch.arange(LENGTH) + 1
    caption = torch.stack([places, torch.zeros_like(places), torch.zeros_like(places)], -1)
    turns = [body.rope_embedder(each.to(device)) for each in (picture, caption)]
    first, second = ((each.real[:, None].to(device), each.imag[:, None].to(device)) for each in turns)
    return first, second


def _norm(hidden: Tensor, norm: Any) -> Tensor:
    """RMS norm in float32."""
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    return functional.rms_norm(hidden.float(), (hidden.shape[-1],), norm.weight.float(), eps)


def _block(block: Any, hidden: Tensor, at: Rotation, time: Tensor | None = None) -> Tensor:
    """One of the transformer's blocks; those without a time are not modulated."""
    if time is None:
        hidden = hidden + _norm(
            _attend(block.attention, _norm(hidden, block.attention_norm1), at), block.attention_norm2
        )
        return hidden + _norm(block.feed_forward(_norm(hidden, block.ffn_norm1)), block.ffn_norm2)
    scale, gate, wide, out = block.adaLN_modulation(time)[:, None].float().chunk(4, -1)
    seen = _norm(hidden, block.attention_norm1) * (1 + scale)
    hidden = hidden + gate.tanh() * _norm(_attend(block.attention, seen, at), block.attention_norm2)
    seen = _norm(hidden, block.ffn_norm1) * (1 + wide)
    return hidden + out.tanh() * _norm(block.feed_forward(seen), block.ffn_norm2)


def _attend(attention: Any, seen: Tensor, at: Rotation) -> Tensor:
    query, key, value = (
        project(seen).unflatten(-1, (attention.heads, -1))
        for project in (attention.to_q, attention.to_k, attention.to_v)
    )

    def turn(heads: Tensor) -> Tensor:
        real, imaginary = heads.unflatten(-1, (-1, 2)).unbind(-1)
        cosine, sine = at
        return torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], -1).flatten(-2)

    query, key = (
        turn(_norm(query, attention.norm_q)).to(value.dtype),
        turn(_norm(key, attention.norm_k)).to(value.dtype),
    )
    mixed = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (query, key, value)))
    return attention.to_out[0](mixed.transpose(1, 2).flatten(2))


def _initialize(body: Any) -> None:
    """Modulations and the last layer begin at zero, so that every block begins as the identity."""
    for module in body.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for layer in (body.t_embedder.mlp[0], body.t_embedder.mlp[2]):
        nn.init.normal_(layer.weight, std=0.02)
    for block in [*body.noise_refiner, *body.layers]:
        nn.init.zeros_(block.adaLN_modulation[0].weight)
    last = body.all_final_layer[_KEY]
    nn.init.zeros_(last.adaLN_modulation[1].weight)
    nn.init.zeros_(last.linear.weight)
    for token in (body.x_pad_token, body.cap_pad_token):
        nn.init.normal_(token, std=0.02)
