"""The talker's code predictor: from a frame's first code and the talker's hidden state to its other codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from stage_server.engines.ar.sampling import Sampling, draw

if TYPE_CHECKING:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration


class CodePredictor:
    """Completes frames, many runs in one batch."""

    def __init__(self, model: Qwen3OmniMoeTalkerForConditionalGeneration) -> None:
        self._first = model.get_input_embeddings()
        self._predictor = model.code_predictor
        self._groups = model.config.num_code_groups

    def complete(
        self, hidden: torch.Tensor, tokens: Sequence[int], samplings: Sequence[Sampling]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames [R, groups] int64, and the sum of their codes' embeddings [R, H], of which the next input is made.

        Args:
            hidden: the talker's last hidden states, [R, H].
            tokens: the frames' first codes.
            samplings: how each row draws its further codes.
        """
        codes = torch.tensor(tokens, device=hidden.device)
        total = self._first(codes)
        frames = [codes]
        inputs = torch.stack((hidden, total), dim=1)
        cache = DynamicCache(config=self._predictor.config)
        for group in range(self._groups - 1):
            output = self._predictor.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True)
            logits = self._predictor.lm_head[group](output.last_hidden_state[:, -1])
            codes = torch.tensor(draw(logits, samplings), device=hidden.device)
            embeds = self._predictor.model.codec_embedding[group](codes)
            frames.append(codes)
            total = total + embeds
            inputs = embeds.unsqueeze(1)
        return torch.stack(frames, dim=1), total
