"""What autoregressive families read alike: engine arguments, and a checkpoint's own configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni.v1 import config_pb2
from stage_server.checkpoint import refused
from stage_server.engines.ar.decoder import Geometry
from stage_server.engines.arguments import Arguments

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

LONGEST = 8192
STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """Engine arguments that every autoregressive stage takes."""

    max_length: int
    """Positions that one run may have, prompt and output; the KV cache is made for that many."""
    step_tokens: int
    """Positions that one step puts through, of all runs: prompts beyond it go on in the next one."""


def sizes(spec: config_pb2.StageSpec) -> Sizes:
    """Reads them from the spec's `engine`.

    Raises:
        OmniError: UNKNOWN_PARAMETER or BAD_REQUEST with the key.
    """
    arguments = Arguments(spec.engine, "engine")
    found = Sizes(
        max_length=arguments.integer("max_length", LONGEST, 2, 1 << 20),
        step_tokens=arguments.integer("step_tokens", STEP_TOKENS, 1, 1 << 20),
    )
    arguments.done()
    return found


def geometry(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, max_length: int) -> Geometry:
    """Shape of the KV cache for a text config.

    Raises:
        OmniError: BAD_REQUEST when layers of the model keep a state that is not keys and values.
    """
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        raise refused(f"layers of kind {', '.join(sorted(odd))} are not supported by this engine")
    heads = config.num_attention_heads
    own = getattr(config, "max_position_embeddings", None) or LONGEST
    return Geometry(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_length=min(own, max_length),
        dtype=dtype,
        device=device,
    )


def sampling_defaults(config: GenerationConfig) -> config_pb2.SamplingParams:
    """A model's own decoding parameters; greedy when its generation config does not sample."""
    params = config_pb2.SamplingParams(temperature=0.0)
    if config.do_sample:
        params.temperature = 1.0 if config.temperature is None else config.temperature
        for name in ("top_k", "top_p", "min_p"):
            if (value := getattr(config, name)) is not None:
                setattr(params, name, value)
    if config.repetition_penalty is not None:
        params.repetition_penalty = config.repetition_penalty
    return params


def end_ids(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a run by themselves."""
    given = config.eos_token_id
    if given is None:
        given = tokenizer.eos_token_id
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)
