"""Code2wav, the vocoder, in chunks that join to exactly one decode of the whole.

What a chunk must know of the frames before it comes in two parts. The transformer attends over a sliding window in each
layer, so its reach grows with its depth (568 frames at the released size): its keys and values are carried. The
convolutions above it reach back a few frames only: those are put through them once more, as hidden states, and the
sound that was already given is cut off. Each transposed convolution of the decoder looks one input ahead, so the last
samples of a chunk become final with the next one; transformers drops them at the end of a decode, and so they are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference

from omni.rpc.errors import OmniError, Reason
from stage_server.checkpoint import WEIGHTS, readable, require
from stage_server.engines.generation.decoder import ChunkDecoder
from stage_server.engines.generation.engine import GenerationEngine, GenerationOptions
from stage_server.models.qwen3_omni.checkpoint import load_part, read_config

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni.v1 import config_pb2

SAMPLE_RATE = 24_000
"""Of all released Qwen3-Omni vocoders; their configuration does not say it."""


@dataclass(frozen=True, slots=True)
class WaveState:
    """What is remembered of a run between two chunks."""

    frames: int
    """Decoded so far."""
    samples: int
    """Given so far."""
    past: torch.Tensor
    """Keys and values of the newest frames, [layers, 2, kv heads, up to window - 1, head dim]."""
    hidden: torch.Tensor
    """Transformer output of the newest frames, [up to reach, hidden size]."""


class Code2Wav(ChunkDecoder[WaveState]):
    """Residual codes [frames, codebooks] int64 to mono sound."""

    input = "codes"
    sample_rate = SAMPLE_RATE

    def __init__(self, spec: config_pb2.StageSpec) -> None:
        self._spec = spec

    def load(self) -> None:
        folder = Path(self._spec.checkpoint)
        require(folder, "config.json", WEIGHTS)
        with readable(folder):
            self.config = read_config(folder).code2wav_config
            model = load_part(self._spec, folder, "code2wav")
        assert isinstance(model, reference.Qwen3OmniMoeCode2Wav)
        self._model = model
        self._device = model.device
        self._dtype = model.dtype
        self._upsample = int(model.total_upsample)
        self._lost, self._reach = _tail(model), _reach(model)
        self._window = self.config.sliding_window - 1
        frames = torch.zeros(self._reach + 1, self.config.num_quantizers, dtype=torch.int64)
        self.decode([(self.open(), frames)])

    def open(self) -> WaveState:
        heads, dim = self.config.num_key_value_heads, self._head_dim()
        return WaveState(
            frames=0,
            samples=0,
            past=torch.empty(self.config.num_hidden_layers, 2, heads, 0, dim, dtype=self._dtype, device=self._device),
            hidden=torch.empty(0, self.config.hidden_size, dtype=self._dtype, device=self._device),
        )

    def take(self, frames: torch.Tensor) -> torch.Tensor:
        quantizers, size = self.config.num_quantizers, self.config.codebook_size
        if frames.dtype != torch.int64 or frames.ndim != 2 or frames.shape[1] != quantizers:
            got = f"{tuple(frames.shape)} {str(frames.dtype).removeprefix('torch.')}"
            raise OmniError(Reason.STAGE_FAILED, f"codes must be [frames, {quantizers}] int64, got {got}")
        copied = frames.clone()
        if copied.numel() and not 0 <= int(copied.min()) <= int(copied.max()) < size:
            low, high = int(copied.min()), int(copied.max())
            raise OmniError(Reason.STAGE_FAILED, f"codes must be from 0 to {size - 1}, got {low} to {high}")
        return copied

    def decode(self, rows: Sequence[tuple[WaveState, torch.Tensor]]) -> list[tuple[WaveState, NDArray[np.float32]]]:
        states = [state for state, _ in rows]
        hidden, pasts = self._transform(states, [frames for _, frames in rows])
        joined = [torch.cat((state.hidden, new)) for state, new in zip(states, hidden, strict=True)]
        batch = torch.nn.utils.rnn.pad_sequence(joined, batch_first=True)
        sound = self._convolve(batch).float().cpu().numpy()
        decoded: list[tuple[WaveState, NDArray[np.float32]]] = []
        for row, (state, frames) in enumerate(rows):
            begin = (state.frames - len(state.hidden)) * self._upsample
            total = state.frames + len(frames)
            upto = max(total * self._upsample - self._lost, state.samples)
            samples = sound[row, state.samples - begin : upto - begin].copy()
            newest = joined[row][-self._reach :].clone()
            decoded.append((WaveState(total, upto, pasts[row], newest), samples))
        return decoded

    def unload(self) -> None:
        del self._model

    def _head_dim(self) -> int:
        given = getattr(self.config, "head_dim", None)
        return int(given or self.config.hidden_size // self.config.num_attention_heads)

    def _transform(
        self, states: Sequence[WaveState], frames: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """New frames through the transformer: hidden states [n, H] of each row, and its keys and values after them.

        Rows lie in one batch: what is carried to the right edge of a common past, new frames at its left.
        """
        lengths = [len(new) for new in frames]
        past, new = max(state.past.shape[3] for state in states), max(lengths)
        codes = torch.nn.utils.rnn.pad_sequence(list(frames), batch_first=True).transpose(1, 2).to(self._device)
        embeds = self._model.code_embedding(codes + self._model.code_offset).mean(1)
        cache = _Past(torch.stack([_pad_left(state.past, past) for state in states], dim=2))
        index = torch.arange(past + new, device=self._device)
        distance = index[past:, None] - index
        seen = (distance >= 0) & (distance <= self._window)
        carried = torch.tensor([state.past.shape[3] for state in states], device=self._device)
        mask = seen & (index >= past - carried[:, None])[:, None, :]
        done = torch.tensor([state.frames for state in states], device=self._device)
        output = self._model.pre_transformer(
            inputs_embeds=embeds,
            attention_mask={"sliding_attention": mask[:, None]},
            position_ids=done[:, None] + torch.arange(new, device=self._device),
            past_key_values=cache,
        ).last_hidden_state
        both = cache.joined()
        pasts = []
        for row, (state, length) in enumerate(zip(states, lengths, strict=True)):
            stop = past + length
            start = max(past - state.past.shape[3], stop - self._window)
            pasts.append(both[:, :, row, :, start:stop].clone())
        return [output[row, :length] for row, length in enumerate(lengths)], pasts

    def _convolve(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, frames, H] to sound [B, samples], as the model itself does after its transformer."""
        wave = hidden.transpose(1, 2)
        for blocks in self._model.upsample:
            for block in blocks:
                wave = block(wave)
        for block in self._model.decoder:
            wave = block(wave)
        return wave.squeeze(1).clamp(min=-1, max=1)


class _Past:
    """Keys and values of a batch as transformers' attention extends them: [layers, 2, B, kv heads, past, head dim]."""

    def __init__(self, past: torch.Tensor) -> None:
        self._past = past
        self._layers: list[torch.Tensor] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat((self._past[layer], torch.stack((keys, values))), dim=3)
        self._layers.append(both)
        return both[0], both[1]

    def joined(self) -> torch.Tensor:
        return torch.stack(self._layers)


def _pad_left(past: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(past, (0, 0, length - past.shape[3], 0))


def _convolutions(model: reference.Qwen3OmniMoeCode2Wav) -> list[torch.nn.Module]:
    """All convolutions above the transformer, in the order in which sound passes them."""
    kinds = (reference.Qwen3OmniMoeCausalConvNet, reference.Qwen3OmniMoeCausalTransConvNet)
    return [each for part in (model.upsample, model.decoder) for each in part.modules() if isinstance(each, kinds)]


def _tail(model: reference.Qwen3OmniMoeCode2Wav) -> int:
    """Samples by which a decode is shorter than its frames."""
    lost = 0
    for each in _convolutions(model):
        if isinstance(each, reference.Qwen3OmniMoeCausalTransConvNet):
            stride, kernel = each.conv.stride[0], each.conv.kernel_size[0]
            lost = stride * lost + stride - kernel + each.left_pad + each.right_pad
    return int(lost)


def _reach(model: reference.Qwen3OmniMoeCode2Wav) -> int:
    """Frames back from a chunk's first one that the convolutions need for its first sample not yet given."""
    first = -_tail(model)
    for each in reversed(_convolutions(model)):
        if isinstance(each, reference.Qwen3OmniMoeCausalTransConvNet):
            stride, kernel = each.conv.stride[0], each.conv.kernel_size[0]
            first = -((kernel - 1 - each.left_pad - first) // stride)
        else:
            first -= each.padding
    return int(-first)


def build(spec: config_pb2.StageSpec) -> GenerationEngine[WaveState]:
    """The engine of a code2wav stage, not yet started.

    Raises:
        OmniError: UNKNOWN_PARAMETER or BAD_REQUEST for what is wrong with the spec.
    """
    options = GenerationOptions.read(spec)
    return GenerationEngine(Code2Wav(spec), options, max_running=spec.max_running)
