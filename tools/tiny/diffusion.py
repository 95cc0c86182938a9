"""Tiny text-to-image pipelines in the layout of diffusers: FLUX.1 and Qwen-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers import processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from tools.tiny import tokenizer as tokens

VOCABULARY = 512
WIDTH = 32
"""Of every text encoder."""
HEADS = 4
HEAD = 16
"""Size of one of a transformer's heads, split over time, rows and columns by `ROPE`."""
ROPE = (4, 6, 6)
CONTRAST = 0.4
"""Of pictures: standard deviation of what the decoder's last layer makes of unit noise, in [-1, 1]."""
LATENT = 16
"""Channels of a latent; the transformers see patches of two by two."""


def _tokenizer(longest: int, *, ends: bool = False) -> Any:
    """With `ends`, a text's last token is the end token, as CLIP's pooling and T5 expect."""
    tokenizer = tokens.make(VOCABULARY)
    tokenizer.model_max_length = longest
    if ends:
        end = tokenizer.eos_token
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
        )
    return tokenizer


def _make_visible(pipe: diffusers.DiffusionPipeline) -> diffusers.DiffusionPipeline:
    """Draws the weights anew so that signals keep their size: under the default ones all pictures look alike, and a
    prompt, a seed or a scale that went astray could not be seen."""
    for part in (pipe.transformer, pipe.vae):
        for weights in part.parameters():
            if weights.ndim > 1:
                torch.nn.init.kaiming_normal_(weights, nonlinearity="linear")
    pipe.vae.decoder.conv_out.weight.data *= CONTRAST
    return pipe


def flux(folder: Path) -> None:
    """A FLUX.1 [dev]: two text encoders, and a transformer that takes the guidance scale."""
    torch.manual_seed(0)
    clip_tokenizer = _tokenizer(77, ends=True)
    clip = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=WIDTH,
        eos_token_id=clip_tokenizer.eos_token_id,
        pad_token_id=clip_tokenizer.pad_token_id,
    )
    t5 = T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=2, num_heads=2)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=ROPE,
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=LATENT,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=CLIPTextModel(clip),
        tokenizer=clip_tokenizer,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=_tokenizer(512, ends=True),
        transformer=transformer,
    )
    _make_visible(pipe).save_pretrained(folder)


def qwen_image(folder: Path) -> None:
    """A Qwen-Image: encodes prompts with a Qwen2.5-VL, and is guided where there is a negative prompt."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(4096)
    encoder = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT,
        out_channels=LATENT,
        num_layers=2,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        axes_dims_rope=ROPE,
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=LATENT,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT,
        latents_std=[1.0] * LATENT,
    )
    pipe = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, shift_terminal=0.02, max_shift=0.9, max_image_seq_len=8192
        ),
        vae=vae,
        text_encoder=Qwen2_5_VLForConditionalGeneration(encoder),
        tokenizer=tokenizer,
        transformer=transformer,
    )
    _make_visible(pipe).save_pretrained(folder)
