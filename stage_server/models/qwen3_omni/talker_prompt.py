"""What the talker is given before its first frame, built from the thinker's prompt and first words.

Row by row as transformers' `Qwen3OmniMoeForConditionalGeneration.generate` builds it for a single request: the user's
turns (text by its embeddings, media by their hidden states), the head of the assistant's turn, the speaker, the first
word. The words after it come one a frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from omni.rpc.errors import OmniError, Reason

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

HEAD = 3
"""Rows of the assistant's turn before its first word: its start, its name, a line break."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Where the parts of a prompt lie that the talker reads."""

    user: torch.Tensor
    """Positions of all user turns, [u], in order."""
    media: torch.Tensor
    """Which of them are placeholders of media, [u] bool."""
    assistant: int
    """First position of the last assistant turn."""

    @property
    def first_word(self) -> int:
        return self.assistant + HEAD


def find_turns(ids: torch.Tensor, config: Qwen3OmniMoeConfig) -> Turns:
    """Cuts a prompt [n] into its turns.

    Raises:
        OmniError: BAD_REQUEST, the prompt has no assistant turn to speak.
    """
    positions = torch.arange(len(ids))
    starts = torch.where(ids == config.im_start_token_id, positions, -1)
    turn = starts.cummax(0).values.clamp_min(0)
    role = ids[(turn + 1).clamp_max(len(ids) - 1)]
    user = (role == config.user_token_id).nonzero().squeeze(1)
    begins = (ids[:-1] == config.im_start_token_id) & (ids[1:] == config.assistant_token_id)
    assistant = begins.nonzero().squeeze(1)
    if not len(assistant):
        message = "speech needs a prompt with an assistant turn (a conversation, not plain text)"
        raise OmniError(Reason.BAD_REQUEST, message)
    thinker = config.thinker_config
    media = torch.isin(ids, torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]))
    return Turns(user, media[user], int(assistant[-1]))


class PromptBuilder:
    """Builds talker prompts. `special` are the thinker's embeddings of tts_bos, tts_eos and tts_pad, [3, H]."""

    def __init__(
        self,
        model: Qwen3OmniMoeTalkerForConditionalGeneration,
        config: Qwen3OmniMoeConfig,
        special: torch.Tensor,
    ) -> None:
        self._model = model
        self._config = config
        self._bos, self.eos, self.pad = model.text_projection(special.to(model.device, model.dtype)).unsqueeze(1)

    def words(self, embeds: torch.Tensor) -> torch.Tensor:
        """Thinker embeddings [n, H] of text as the talker takes them, [n, h]."""
        projected: torch.Tensor = self._model.text_projection(embeds.to(self._model.device, self._model.dtype))
        return projected

    def build(self, turns: Turns, embeds: torch.Tensor, hidden: torch.Tensor, speaker: int) -> torch.Tensor:
        """The talker's prompt [p, h].

        Args:
            turns: of the thinker's prompt.
            embeds: the thinker's embeddings of all positions up to the first word, [first_word + 1, H].
            hidden: the hidden states of the user's turns, [u, H].
            speaker: id of the voice.
        """
        model, talker = self._model, self._config.talker_config
        user = self.words(embeds[turns.user])
        if turns.media.any():
            rows = hidden[turns.media].to(model.device, model.dtype)
            user[turns.media.to(model.device)] = model.hidden_projection(rows)
        assistant = self.words(embeds[turns.assistant : turns.first_word + 1])
        text = torch.cat((assistant[:HEAD], self.pad.expand(4, -1), self._bos, assistant[HEAD:]))
        control = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id, speaker]
        control += [talker.codec_pad_id, talker.codec_bos_id]
        text[HEAD:] += model.get_input_embeddings()(torch.tensor(control, device=model.device))
        return torch.cat((user, text))

    def positions(
        self, turns: Turns, ids: torch.Tensor, grids: torch.Tensor | None, lengths: torch.Tensor | None, prompt: int
    ) -> tuple[torch.Tensor, int]:
        """Rotary positions [3, prompt] of a prompt, and what those after it have on top of their index."""
        if grids is None:
            return torch.arange(prompt).expand(3, -1), 0
        tail = torch.full((prompt - len(turns.user),), self._config.tts_pad_token_id)
        row = torch.cat((ids[turns.user], tail)).unsqueeze(0)
        positions, shift = self._model.get_rope_index(
            row, image_grid_thw=grids, attention_mask=torch.ones_like(row), audio_seqlens=lengths
        )
        return positions[:, 0], int(shift)
