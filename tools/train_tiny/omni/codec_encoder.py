"""The codec's encoder and quantizer: sound in, codes out. They serve training only and are no part of the model."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

RATE = 24_000
FRAME = 1_920
"""Samples a frame of codes stands for: 12.5 frames a second."""
_MELS, _WINDOW, _HOP = 100, 1024, 240


def mel_bank(bands: int, window: int) -> Tensor:
    """Triangular filters from the bins of a spectrum to mel bands, [bands, window / 2 + 1]."""

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    bins = torch.linspace(0, RATE / 2, window // 2 + 1)
    corners = 700 * (10 ** (torch.linspace(mel(0), mel(RATE / 2), bands + 2) / 2595) - 1)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    return torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp(min=0)


class Residual(nn.Module):
    """Two convolutions around the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv1d(channels, channels, 3, 1, 1)
        self.b = nn.Conv1d(channels, channels, 1)
        self.n = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.b(functional.gelu(self.a(functional.gelu(self.n(x)))))
        return x + added


class ConvNext(nn.Module):
    """A depth-wise convolution over seven frames, then two layers a frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.d = nn.Conv1d(channels, channels, 7, 1, 3, groups=channels)
        self.n = nn.LayerNorm(channels)
        self.u = nn.Linear(channels, 2 * channels)
        self.v = nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.v(functional.gelu(self.u(self.n(self.d(x).transpose(1, 2)))))
        return x + added.transpose(1, 2)


class Encoder(nn.Module):
    """Sound [B, n * FRAME] to latents [B, size, n] on a sphere; each sees the whole of its recording."""

    def __init__(self, width: int = 256, size: int = 64) -> None:
        super().__init__()
        wide = width * 3 // 2
        self.size = size
        self.net = nn.Sequential(
            nn.Conv1d(_MELS, width, 5, 1, 2),
            Residual(width),
            nn.GELU(),
            nn.Conv1d(width, width, 4, 2, 1),
            Residual(width),
            nn.GELU(),
            nn.Conv1d(width, wide, 4, 2, 1),
            Residual(wide),
            nn.GELU(),
            nn.Conv1d(wide, wide, 4, 2, 1),
            ConvNext(wide),
            ConvNext(wide),
            ConvNext(wide),
            nn.Conv1d(wide, size, 1),
        )
        self.register_buffer("bank", mel_bank(_MELS, _WINDOW), persistent=False)
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)

    def forward(self, sound: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(sound.device.type, enabled=False):
            spectrum = torch.stft(sound.float(), _WINDOW, _HOP, window=self.window, return_complex=True).abs()
            mels = (self.bank @ spectrum).clamp(min=1e-2).log()[..., : sound.shape[-1] // _HOP] * 0.4
        latents: Tensor = self.net(mels)
        return functional.normalize(latents.float(), dim=1) * self.size**0.5


class Quantizer:
    """A trained encoder with its codebooks."""

    def __init__(self, encoder: Encoder, codebooks: Tensor) -> None:
        """`codebooks` are [groups, entries, size]; each refines what those before it left."""
        self.encoder, self.codebooks = encoder.eval(), codebooks

    @classmethod
    def load(cls, path: Path, groups: int, device: torch.device) -> Quantizer:
        """The first `groups` codebooks of a file that the codec's training wrote."""
        with safe_open(path, "pt") as file:
            about, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        encoder = Encoder(int(about["width"]), int(about["d"]))
        weights = {name.removeprefix("enc."): each.float() for name, each in state.items() if name.startswith("enc.")}
        missing, unknown = encoder.load_state_dict(
            {f"net.{name.removeprefix('net.')}": weights[name] for name in weights}
        )
        assert not missing and not unknown
        return cls(encoder.to(device), state["rvq.C"][:groups].float().to(device))

    @torch.no_grad()
    def encode(self, sound: Tensor) -> Tensor:
        """Recordings of one length [B, n * FRAME] to codes [B, n, groups]."""
        left = self.encoder(sound).transpose(1, 2)
        found = []
        for codebook in self.codebooks:
            nearest = torch.cdist(left, codebook.expand(len(left), -1, -1)).argmin(-1)
            found.append(nearest)
            left = left - codebook[nearest]
        return torch.stack(found, dim=-1)
