"""The model's shape, and its folder in the layout of the published checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

CODEBOOK = 512
CODE_GROUPS = 4
SPEAKER = "tiny"
TALKER_VOCABULARY = CODEBOOK + 1024
"""Each id from CODEBOOK on is a control token; generate() forbids the last 1024 of them but the end token."""
END, NO_THINK, THINK_BEGIN, THINK_END, PAD, BEGIN, VOICE = range(CODEBOOK, CODEBOOK + 7)

PREPROCESSOR = {
    "processor_class": "Qwen3OmniMoeProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "chunk_length": 30,
    "padding_side": "right",
    "padding_value": 0.0,
    "dither": 0.0,
    "return_attention_mask": True,
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 1024,
    "max_pixels": 65536,
}

TALKER_SAMPLING: dict[str, float] = {"temperature": 0.0}
"""How a frame's first code is drawn where nothing else is asked for."""

_ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [8, 4, 4],
        "interleaved": True,
        "mrope_interleaved": True,
    },
    "max_position_embeddings": 2048,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
_WIDTH = 128
CODE2WAV: dict[str, Any] = {
    "codebook_size": CODEBOOK,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_quantizers": CODE_GROUPS,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 256,
    "layer_scale_initial_scale": 0.1,
}
"""1,920 samples a frame at 24 kHz: 12.5 frames a second."""


def config(tokenizer: Any) -> Qwen3OmniMoeConfig:
    """Of a model that speaks the tokenizer's language."""

    def at(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    multimodal = {
        "audio_token_id": at("<|audio_pad|>"),
        "image_token_id": at("<|image_pad|>"),
        "video_token_id": at("<|video_pad|>"),
        "audio_start_token_id": at("<|audio_start|>"),
        "vision_start_token_id": at("<|vision_start|>"),
        "position_id_per_seconds": 13,
    }
    thinker = {
        "text_config": {
            "vocab_size": len(tokenizer),
            "hidden_size": _WIDTH,
            "intermediate_size": 256,
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
            "pad_token_id": at("<|endoftext|>"),
            "eos_token_id": at("<|im_end|>"),
            **_EXPERTS,
            **_ATTENTION,
        },
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": _WIDTH,
            "n_window": 50,
            "n_window_infer": 800,
            "downsample_hidden_size": 8,
            "max_source_positions": 1500,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": _WIDTH,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "spatial_merge_size": 2,
        },
        "tie_word_embeddings": True,
        "user_token_id": at("user"),
        "seconds_per_chunk": 2,
        **multimodal,
    }
    talker = {
        "text_config": {
            "vocab_size": TALKER_VOCABULARY,
            "hidden_size": _WIDTH,
            "intermediate_size": 384,
            "num_hidden_layers": 6,
            "shared_expert_intermediate_size": 128,
            **_EXPERTS,
            **_ATTENTION,
        },
        "code_predictor_config": {
            "vocab_size": CODEBOOK,
            "hidden_size": _WIDTH,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_code_groups": CODE_GROUPS,
            "max_position_embeddings": 64,
        },
        "num_code_groups": CODE_GROUPS,
        "thinker_hidden_size": _WIDTH,
        "accept_hidden_layer": 2,
        "spatial_merge_size": 2,
        "codec_eos_token_id": END,
        "codec_nothink_id": NO_THINK,
        "codec_think_bos_id": THINK_BEGIN,
        "codec_think_eos_id": THINK_END,
        "codec_pad_id": PAD,
        "codec_bos_id": BEGIN,
        "speaker_id": {SPEAKER: VOICE},
        **multimodal,
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=CODE2WAV,
        enable_audio_output=True,
        im_start_token_id=at("<|im_start|>"),
        im_end_token_id=at("<|im_end|>"),
        tts_pad_token_id=at("<tts_pad>"),
        tts_bos_token_id=at("<tts_text_bos>"),
        tts_eos_token_id=at("<tts_text_eod>"),
        system_token_id=at("system"),
        user_token_id=at("user"),
        assistant_token_id=at("assistant"),
    )


def build(tokenizer: Any, seed: int = 0) -> Qwen3OmniMoeForConditionalGeneration:
    """The whole model with random weights, in float32."""
    torch.manual_seed(seed)
    model: Qwen3OmniMoeForConditionalGeneration = Qwen3OmniMoeForConditionalGeneration(config(tokenizer))
    for part in (model.talker.model, model.talker):  # its routers are zeros else, and no expert is told from another
        for name, weights in part.named_parameters():
            if name.endswith("mlp.gate.weight") or "experts." in name:
                torch.nn.init.normal_(weights, std=0.02)
    return model


def load_code2wav(model: Qwen3OmniMoeForConditionalGeneration, folder: Path) -> None:
    """Takes over a trained vocoder of the same shape.

    Raises:
        ValueError: its weights are not those of this shape.
    """
    missing, unknown = model.code2wav.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if unknown or set(missing) - {"code_offset"}:
        raise ValueError(f"{folder} holds another vocoder: missing {missing}, unknown {unknown}")


def save(model: Qwen3OmniMoeForConditionalGeneration, tokenizer: Any, folder: Path) -> None:
    """Writes a copy in bfloat16 with everything that loaders look for; the model itself stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=False)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
