"""The thinker under the autoregressive engine: text, pictures and sound in, text and hidden states out.

Row i of the tensors `embeds` (what went into the first layer) and `hidden` (what left the layer that the talker reads)
belongs to position i of prompt and output; the last token has none, as in transformers' generate. With the first rows
come `prompt_ids` [n], and for a talker that must place media, `image_grid_thw` [pictures, 3] and
`audio_feature_lengths` [recordings] when there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import Cache, GenerationConfig

from stage_server.checkpoint import WEIGHTS, readable, require
from stage_server.device import device
from stage_server.engines.ar import attention, settings
from stage_server.engines.ar.causal import CausalDecoder, TokenState
from stage_server.engines.ar.decoder import Geometry, Slice, capture, last_rows
from stage_server.engines.ar.engine import ArEngine
from stage_server.engines.arguments import Arguments, refuse_unused
from stage_server.models.qwen3_omni.checkpoint import load_part, read_config
from stage_server.models.qwen3_omni.processor import Inputs, PromptReader

if TYPE_CHECKING:
    from omni.v1 import config_pb2
    from stage_server.engines.base import Run


@dataclass(slots=True)
class ThinkerState(TokenState):
    """What a prompt with media has beside its ids; freed when the prompt is through."""

    inputs: Inputs | None = None
    embeds: torch.Tensor | None = None
    """Prompt embeddings with those of media in their places, [n, H]."""
    visual: torch.Tensor | None = None
    """Which prompt positions are parts of pictures, [n] bool."""
    deepstack: list[torch.Tensor] = field(default_factory=list)
    """For each of the first layers, what it adds at these positions, [visual positions, H]."""


class Thinker(CausalDecoder[ThinkerState]):
    """The thinker's part of a Qwen3-Omni checkpoint."""

    axes = 3

    def __init__(self, spec: config_pb2.StageSpec, *, max_length: int) -> None:
        self._spec = spec
        self._max_length = max_length
        self._kept: dict[int, torch.Tensor] = {}

    def load(self) -> Geometry:
        spec, folder = self._spec, Path(self._spec.checkpoint)
        require(folder, "config.json", WEIGHTS, "tokenizer*", "preprocessor_config.json")
        with readable(folder):
            config = read_config(folder)
            text = config.thinker_config.text_config
            model = load_part(spec, folder, "thinker")
            geometry = settings.geometry(text, model.dtype, device(), self._max_length)
            self._reader = PromptReader(folder, spec.limits, text.vocab_size, geometry.max_length)
            generation = _generation_config(folder)
        self.tokenizer = self._reader.tokenizer
        self.device = geometry.device
        self._model = model
        self._layer = config.talker_config.accept_hidden_layer
        capture(model.model.layers, self._layer, self._kept)
        attention.use(model.model.config)
        self.defaults = settings.sampling_defaults(generation)
        self.end_ids = settings.end_ids(generation, self.tokenizer)
        return geometry

    def check(self, run: Run) -> None:
        self._reader.check(run.prompt)
        refuse_unused(run.params, "voice", "format", "diffusion")
        Arguments(run.params.extra, "params.extra").done()

    def prepare(self, run: Run) -> ThinkerState:
        assert run.prompt is not None, "check() refuses a run without a prompt"
        inputs = self._reader.read(run.prompt)
        state = ThinkerState(run, self.sampling(run), prompt_ids=inputs.ids, inputs=inputs)
        if inputs.pixels is not None or inputs.mel is not None:
            self._encode(state, inputs)
        return self.begin(state)

    def forward(self, step: Sequence[Slice[ThinkerState]], cache: Cache) -> torch.Tensor:
        ids, positions = self.inputs(step)
        embeds = self._model.get_input_embeddings()(ids)
        visual, deepstack = None, None
        media = [part for part in step if part.state.embeds is not None]
        for part in media:
            assert part.state.embeds is not None
            embeds[0, part.rows] = part.state.embeds[part.start : part.stop]
        if any(part.state.visual is not None for part in media):
            visual, deepstack = self._deepstack(media, embeds.shape[1])
        output = self._model.model(
            inputs_embeds=embeds,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            visual_pos_masks=visual,
            deepstack_visual_embeds=deepstack,
        )
        hidden = self._kept.pop(self._layer)[0]
        for part in step:
            self._publish(part, embeds[0], hidden)
        rows: torch.Tensor = output.last_hidden_state[0][last_rows(step)]
        return rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits

    def sampled(self, states: Sequence[ThinkerState], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        super().sampled(states, tokens, hidden)
        for state in states:
            if state.inputs is not None:
                state.inputs = state.embeds = state.visual = None
                state.deepstack = []

    def unload(self) -> None:
        del self._model

    def _encode(self, state: ThinkerState, inputs: Inputs) -> None:
        """Runs the encoders over a prompt's media and places what they give, as the model's own forward does."""
        config, ids = self._model.config, torch.tensor(inputs.ids, device=self.device)
        embeds = self._model.get_input_embeddings()(ids)
        lengths = None
        if inputs.mel is not None and inputs.mel_mask is not None:
            mask = inputs.mel_mask.to(self.device)
            lengths = mask.sum(-1)
            mel = inputs.mel.to(self.device, self._model.dtype)
            sound = self._model.get_audio_features(mel, feature_attention_mask=mask).last_hidden_state
            embeds[ids == config.audio_token_id] = sound.to(embeds.dtype)
        if inputs.pixels is not None and inputs.grids is not None:
            grids = inputs.grids.to(self.device)
            seen = self._model.get_image_features(inputs.pixels.to(self.device), grids)
            state.visual = ids == config.image_token_id
            embeds[state.visual] = torch.cat(seen.pooler_output).to(embeds.dtype)
            state.deepstack = [torch.cat(layer) for layer in seen.deepstack_features]
            row = ids.unsqueeze(0)
            positions, shift = self._model.get_rope_index(
                row, image_grid_thw=grids, attention_mask=torch.ones_like(row), audio_seqlens=lengths
            )
            state.positions, state.shift = positions[:, 0], int(shift)
        state.embeds = embeds

    def _deepstack(
        self, media: Sequence[Slice[ThinkerState]], total: int
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Mask [1, T] of the visual positions in a step, and what the first layers add there, in the packed order."""
        mask = torch.zeros(1, total, dtype=torch.bool, device=self.device)
        rows: list[list[torch.Tensor]] = []
        for part in media:
            state = part.state
            if state.visual is None:
                continue
            before, within = state.visual[: part.start].sum(), state.visual[part.start : part.stop]
            mask[0, part.rows] = within
            place = slice(int(before), int(before + within.sum()))
            rows.append([layer[place] for layer in state.deepstack])
        return mask, [torch.cat(layer) for layer in zip(*rows, strict=True)]

    def _publish(self, part: Slice[ThinkerState], embeds: torch.Tensor, hidden: torch.Tensor) -> None:
        state = part.state
        if state.wants("embeds"):
            state.publish("embeds", embeds[part.rows])
        if state.wants("hidden"):
            state.publish("hidden", hidden[part.rows])
        if part.start == 0:
            if state.wants("prompt_ids"):
                state.publish("prompt_ids", torch.tensor(state.prompt_ids))
            if state.inputs is not None:
                if state.inputs.grids is not None and state.wants("image_grid_thw"):
                    state.publish("image_grid_thw", state.inputs.grids)
                if state.inputs.mel_mask is not None and state.wants("audio_feature_lengths"):
                    state.publish("audio_feature_lengths", state.inputs.mel_mask.sum(-1))


def _generation_config(folder: Path) -> GenerationConfig:
    """The thinker's decoding parameters: those of the checkpoint that are meant for the thinker.

    The whole model's file names them plainly; transformers' generate ends the thinker at <|im_end|>, the tokenizer's
    end token, whatever it says.
    """
    try:
        config = GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig()
    config.eos_token_id = None
    return config


def build(spec: config_pb2.StageSpec) -> ArEngine[ThinkerState]:
    """The engine of a thinker stage, not yet started. Engine arguments: those of `settings.sizes`.

    Raises:
        OmniError: UNKNOWN_PARAMETER or BAD_REQUEST for what is wrong with the spec.
    """
    sizes = settings.sizes(spec)
    decoder = Thinker(spec, max_length=sizes.max_length)
    return ArEngine(decoder, max_running=spec.max_running, step_tokens=sizes.step_tokens)
