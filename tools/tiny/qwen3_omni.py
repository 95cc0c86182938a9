"""A tiny Qwen3-Omni in the layout of the published checkpoint: thinker, talker, code predictor, code2wav, processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tools.tiny import tokenizer as tokens

VOCABULARY = 1024
CODEBOOK = 64
CODE_GROUPS = 4
# Each talker id from CODEBOOK on is a control token; generate() forbids the last 1024 of them but the end token.
TALKER_VOCABULARY = CODEBOOK + 1024
LOUDNESS = 0.1
"""Of the sound that it makes, root mean square of full scale."""
SPEAKERS = {"ethan": CODEBOOK + 20, "chelsie": CODEBOOK + 21, "aiden": CODEBOOK + 22}

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "interleaved": True}

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


def _config(tokenizer: Any) -> Qwen3OmniMoeConfig:
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
    mixture = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    attention = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": ROPE,
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,
    }
    thinker = {
        "text_config": {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "pad_token_id": at("<|endoftext|>"),
            "eos_token_id": at("<|im_end|>"),
            **mixture,
            **attention,
        },
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": 64,
            "n_window": 50,
            "n_window_infer": 800,
            "downsample_hidden_size": 16,
            "max_source_positions": 1500,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "spatial_merge_size": 2,
        },
        "user_token_id": at("user"),
        "seconds_per_chunk": 2,
        **multimodal,
    }
    talker = {
        "text_config": {
            "vocab_size": TALKER_VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "shared_expert_intermediate_size": 32,
            **mixture,
            **attention,
        },
        "code_predictor_config": {
            "vocab_size": CODEBOOK,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_code_groups": CODE_GROUPS,
        },
        "num_code_groups": CODE_GROUPS,
        "thinker_hidden_size": 64,
        "accept_hidden_layer": 2,
        "spatial_merge_size": 2,
        "codec_pad_id": CODEBOOK + 4,
        "codec_bos_id": CODEBOOK + 5,
        "codec_eos_token_id": CODEBOOK + 6,
        "codec_nothink_id": CODEBOOK + 11,
        "codec_think_bos_id": CODEBOOK + 12,
        "codec_think_eos_id": CODEBOOK + 13,
        "speaker_id": SPEAKERS,
        **multimodal,
    }
    code2wav = {
        "codebook_size": CODEBOOK,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_quantizers": CODE_GROUPS,
        "decoder_dim": 32,
        "sliding_window": 72,
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=code2wav,
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


def _make_audible(vocoder: Qwen3OmniMoeCode2Wav) -> None:
    """Draws the vocoder's weights so that signals keep their size: the default ones die away to silence on the way, and
    nothing that is wrong with a sound could be seen in it."""
    for name, weights in vocoder.named_parameters():
        if name.endswith((".gamma", "layer_scale.scale")):
            torch.nn.init.constant_(weights, 0.5)
        elif name.endswith("code_embedding.weight"):
            torch.nn.init.normal_(weights)
        elif weights.ndim == 3:
            torch.nn.init.kaiming_normal_(weights, nonlinearity="linear")
            if ".conv2." in name:  # the end of a residual branch
                weights.data *= 0.3
    last = vocoder.decoder[-1].conv
    last.weight.data *= 0.05
    codes = torch.randint(CODEBOOK, (1, CODE_GROUPS, 50))
    with torch.no_grad():
        last.weight.data *= LOUDNESS / vocoder(codes).square().mean().sqrt()


def build(folder: Path) -> None:
    """Under a million parameters; answers text, pictures and sound with text and 24 kHz sound."""
    tokenizer = tokens.make(VOCABULARY)
    torch.manual_seed(0)
    model = Qwen3OmniMoeForConditionalGeneration(_config(tokenizer)).eval()
    _make_audible(model.code2wav)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
