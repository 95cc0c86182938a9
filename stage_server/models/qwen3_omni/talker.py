"""The talker under the autoregressive engine: the thinker's text in, frames of codec codes out, while it still thinks.

A frame's input is the frame before it plus one word of the text. A run whose next word has not come sits the steps
out; when the text has ended its end marker comes in place of a word, then padding, until the talker ends by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omni.rpc.params import check_voice
from omni.v1 import config_pb2
from stage_server.checkpoint import WEIGHTS, readable, require
from stage_server.device import device
from stage_server.engines.ar import attention, settings
from stage_server.engines.ar.decoder import Decoder, DecodeState, Geometry, Slice, last_rows, pack_positions
from stage_server.engines.ar.engine import ArEngine
from stage_server.engines.ar.sampling import UNBOUNDED, Sampling
from stage_server.engines.arguments import Arguments, refuse_unused
from stage_server.models.qwen3_omni.checkpoint import load_part, read_config, read_rows
from stage_server.models.qwen3_omni.talker_codes import CodePredictor
from stage_server.models.qwen3_omni.talker_prompt import PromptBuilder, Turns, find_turns

if TYPE_CHECKING:
    from transformers import Cache

    from stage_server.engines.base import Feed, Run

EMBEDDINGS = "thinker.model.embed_tokens.weight"
DEFAULTS = config_pb2.SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05, max_tokens=4096)
"""What transformers' generate gives the talker."""
CONTROLS = 1024
"""Ids at the end of the talker's vocabulary that are no codes; of these only the end may be drawn."""


@dataclass(slots=True)
class TalkerState(DecodeState):
    """One run's words, and what waits for them."""

    further: Sampling = field(default_factory=Sampling)
    """How the codes after a frame's first one are drawn."""
    speaker: int = 0
    ids: torch.Tensor | None = None
    """The thinker's prompt, [n]."""
    turns: Turns | None = None
    grids: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    embeds: list[torch.Tensor] = field(default_factory=list)
    """The thinker's rows that have come before the prompt could be built, as are `hidden`."""
    hidden: list[torch.Tensor] = field(default_factory=list)
    words: deque[torch.Tensor] = field(default_factory=deque)
    """Thinker embeddings [H] of words that no frame has taken."""
    text_ended: bool = False
    end_marked: bool = False
    frame: torch.Tensor | None = None
    """Sum of the last frame's embeddings [h] while its word has not come."""
    inputs: torch.Tensor | None = None
    """Input of the positions from `base` on, [n, h]."""
    base: int = 0
    places: torch.Tensor | None = None
    """Rotary positions of the prompt, [3, n]."""
    shift: int = 0
    codes: list[torch.Tensor] = field(default_factory=list)
    """Frames [groups] that are made and not published."""
    published: bool = False


CHUNK_FRAMES, FIRST_CHUNK_FRAMES = 25, 8


@dataclass(frozen=True, slots=True)
class TalkerOptions:
    """Engine arguments of a talker stage (`StageSpec.engine`)."""

    max_length: int
    step_tokens: int
    chunk_frames: int
    """Frames that are handed on together."""
    first_chunk_frames: int
    """The same for a run's first ones, so that sound begins early."""

    @classmethod
    def read(cls, spec: config_pb2.StageSpec) -> TalkerOptions:
        """Checks a spec's engine arguments.

        Raises:
            OmniError: an unknown key, or a value out of its bounds.
        """
        arguments = Arguments(spec.engine, "engine")
        options = cls(
            max_length=arguments.integer("max_length", settings.LONGEST, 2, 1 << 20),
            step_tokens=arguments.integer("step_tokens", settings.STEP_TOKENS, 1, 1 << 20),
            chunk_frames=arguments.integer("chunk_frames", CHUNK_FRAMES, 1, 4096),
            first_chunk_frames=arguments.integer("first_chunk_frames", FIRST_CHUNK_FRAMES, 1, 4096),
        )
        arguments.done()
        return options


class Talker(Decoder[TalkerState]):
    """The talker's part of a Qwen3-Omni checkpoint."""

    def __init__(self, spec: config_pb2.StageSpec, options: TalkerOptions) -> None:
        self._spec = spec
        self._options = options

    def load(self) -> Geometry:
        spec, folder = self._spec, Path(self._spec.checkpoint)
        require(folder, "config.json", WEIGHTS)
        with readable(folder):
            config = read_config(folder)
            model = load_part(spec, folder, "talker")
            special = (config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id)
            self._prompts = PromptBuilder(model, config, read_rows(folder, EMBEDDINGS, special))
        self._config = config
        talker = config.talker_config
        if not hasattr(talker, "audio_config"):
            talker.audio_config = config.thinker_config.audio_config  # read where pictures and recordings mix
            model.config.audio_config = talker.audio_config
        self.voices = tuple(talker.speaker_id)
        self._model = model
        self._predictor = CodePredictor(model)
        self._end = talker.codec_eos_token_id
        attention.use(model.model.config)
        return settings.geometry(talker.text_config, model.dtype, device(), self._options.max_length)

    def check(self, run: Run) -> None:
        check_voice(run.params, self.voices, "params.voice")
        refuse_unused(run.params, "format", "diffusion")
        _further(run, Sampling())

    def prepare(self, run: Run) -> TalkerState:
        sampling = Sampling.of(run.params.sampling, DEFAULTS, frozenset([self._end]))
        if (
            self._end not in sampling.stop_ids
        ):  # Ignored: it is no sound that the next stage could make, so never drawn.
            sampling.stop_ids |= {self._end}
            sampling.min_tokens = UNBOUNDED
        voices = self._config.talker_config.speaker_id
        speaker = voices[run.params.voice.lower()] if run.params.HasField("voice") else next(iter(voices.values()))
        return TalkerState(run, sampling, further=_further(run, sampling), speaker=speaker)

    def feed(self, state: TalkerState, feed: Feed) -> None:
        try:
            for name in ("prompt_ids", "image_grid_thw", "audio_feature_lengths"):
                for tensor in feed.tensors.get(name, ()):
                    self._describe(state, name, tensor.clone())
            for embeds in feed.tensors.get("embeds", ()):
                state.embeds.append(embeds.clone())
            for hidden in feed.tensors.get("hidden", ()):
                if state.prompt is None:
                    state.hidden.append(hidden.clone())
        finally:
            feed.release()
        state.text_ended |= feed.end
        if state.prompt is None:
            self._begin(state)
        else:
            state.words.extend(row for rows in state.embeds for row in rows)
            state.embeds.clear()
        if state.frame is not None:
            self._advance([state])

    def forward(self, step: Sequence[Slice[TalkerState]], cache: Cache) -> torch.Tensor:
        rows, places = [], []
        for part in step:
            state = part.state
            assert state.inputs is not None, "a run steps only with its input"
            rows.append(state.inputs[part.start - state.base : part.stop - state.base])
            if state.places is not None and part.stop <= state.places.shape[1]:
                places.append(state.places[:, part.start : part.stop])
            else:
                places.append(torch.arange(part.start, part.stop).expand(3, -1) + state.shift)
        output = self._model.model(
            inputs_embeds=torch.cat(rows).unsqueeze(0),
            position_ids=pack_positions(places).to(rows[0].device),
            past_key_values=cache,
            use_cache=True,
        )
        last: torch.Tensor = output.last_hidden_state[0][last_rows(step)]
        return last

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.codec_head(hidden)
        first = logits.shape[-1] - CONTROLS
        end = logits[:, self._end].clone()
        logits[:, first:] = float("-inf")
        logits[:, self._end] = end
        return logits

    def sampled(self, states: Sequence[TalkerState], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        frames, sums = self._predictor.complete(hidden, tokens, [state.further for state in states])
        frames = frames.cpu()
        for state, codes, total in zip(states, frames, sums, strict=True):
            state.frame = total
            state.codes.append(codes)
            wanted = self._options.chunk_frames if state.published else self._options.first_chunk_frames
            if len(state.codes) >= wanted:
                self.ended(state)
        self._advance(states)

    def ended(self, state: TalkerState) -> None:
        """Publishes the frames that are held back."""
        if state.codes and state.wants("codes"):
            state.publish("codes", torch.stack(state.codes))
            state.published = True
        state.codes = []

    def unload(self) -> None:
        del self._model, self._predictor, self._prompts

    def _describe(self, state: TalkerState, name: str, tensor: torch.Tensor) -> None:
        if name == "prompt_ids":
            state.ids = tensor
            state.turns = find_turns(tensor, self._config)
        elif name == "image_grid_thw":
            state.grids = tensor
        else:
            state.lengths = tensor

    def _begin(self, state: TalkerState) -> None:
        """Builds the prompt as soon as the first word is there; a text without one is silence."""
        turns, ids = state.turns, state.ids
        enough = turns is not None and sum(len(rows) for rows in state.embeds) > turns.first_word
        if turns is None or ids is None or not enough:
            state.finished = state.text_ended
            return
        embeds = torch.cat(state.embeds)
        hidden = torch.cat(state.hidden)[turns.user] if turns.media.any() else embeds[:0]
        state.inputs = self._prompts.build(turns, embeds, hidden, state.speaker)
        state.prompt = state.ready = len(state.inputs)
        state.places, state.shift = self._prompts.positions(turns, ids, state.grids, state.lengths, state.prompt)
        state.words.extend(embeds[turns.first_word + 1 :])
        state.embeds.clear()
        state.hidden.clear()

    def _advance(self, states: Sequence[TalkerState]) -> None:
        """Completes the next input of those whose word has come."""
        spoken = [state for state in states if state.words]
        words = self._prompts.words(torch.stack([state.words.popleft() for state in spoken])) if spoken else []
        for state, word in zip(spoken, words, strict=True):
            self._complete(state, word)
        for state in states:
            if state.frame is not None and state.text_ended:
                self._complete(state, self._prompts.pad[0] if state.end_marked else self._prompts.eos[0])
                state.end_marked = True

    @staticmethod
    def _complete(state: TalkerState, word: torch.Tensor) -> None:
        assert state.frame is not None, "a word belongs to a frame"
        state.inputs, state.base = (state.frame + word).unsqueeze(0), state.ready
        state.frame = None
        state.ready += 1


def _further(run: Run, first: Sampling) -> Sampling:
    """How a run draws the codes after a frame's first one: greedily when that is, else as transformers does.

    Raises:
        OmniError: an unknown key in the run's `extra`, or a value out of its bounds.
    """
    arguments = Arguments(run.params.extra, "params.extra")
    temperature = arguments.number("subtalker_temperature", 1.0, 0.0, 100.0)
    sampling = Sampling(
        temperature=0.0 if first.greedy else temperature,
        top_k=arguments.integer("subtalker_top_k", 50, 0, 1 << 20),
        top_p=arguments.number("subtalker_top_p", 0.8, 1e-6, 1.0),
        rng=first.rng,
    )
    arguments.done()
    return sampling


def build(spec: config_pb2.StageSpec) -> ArEngine[TalkerState]:
    """The engine of a talker stage, not yet started.

    Raises:
        OmniError: UNKNOWN_PARAMETER or BAD_REQUEST for what is wrong with the spec.
    """
    options = TalkerOptions.read(spec)
    return ArEngine(Talker(spec, options), max_running=spec.max_running, step_tokens=options.step_tokens)
