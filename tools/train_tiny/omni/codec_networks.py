"""What only the codec's own training needs: the quantizer that learns, the losses, the discriminators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from tools.train_tiny.omni.codec_encoder import mel_bank


class LearningQuantizer(nn.Module):
    """Codebooks that follow the latents by moving averages; entries that nothing falls on are drawn anew."""

    def __init__(self, groups: int, entries: int, size: int, frames: int) -> None:
        """`frames` are those of a batch."""
        super().__init__()
        self.groups, self.entries = groups, entries
        self._even = frames / entries
        self.register_buffer("codebooks", torch.zeros(groups, entries, size))
        self.register_buffer("counts", torch.ones(groups, entries))
        self.register_buffer("sums", torch.zeros(groups, entries, size))

    @torch.no_grad()
    def start(self, latents: Tensor, rounds: int = 12) -> None:
        """Sets the codebooks by k-means over latents [n, size], each on what those before it left."""
        left = latents
        for group in range(self.groups):
            centers = left[torch.randperm(len(left), device=left.device)[: self.entries]].clone()
            for _ in range(rounds):
                member = functional.one_hot(torch.cdist(left, centers).argmin(1), self.entries).float()
                counts = member.sum(0)
                fresh = left[torch.randint(len(left), (self.entries,), device=left.device)]
                means = (member.T @ left) / counts.clamp(min=1)[:, None]
                centers = torch.where((counts > 0)[:, None], means, fresh)
            self.codebooks[group] = centers
            self.counts[group] = counts / len(left) * self._even * self.entries
            self.sums[group] = centers * self.counts[group][:, None]
            left = left - centers[torch.cdist(left, centers).argmin(1)]

    def forward(self, latents: Tensor, fewest: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [B, size, T] to quantized ones, codes [B, groups, T] and the loss that keeps both together.

        With `fewest` some items use only the first groups, at least so many: each must be of use without the rest.
        """
        batch, size, frames = latents.shape
        flat = latents.transpose(1, 2).reshape(-1, size)
        used = torch.full((batch,), self.groups, device=flat.device)
        if fewest is not None:
            some = torch.randint(fewest, self.groups, (batch,), device=flat.device)
            used = torch.where(torch.rand(batch, device=flat.device) < 0.3, some, used)
        used = used.repeat_interleave(frames)
        left, total, codes = flat, torch.zeros_like(flat), []
        for group in range(self.groups):
            nearest = torch.cdist(left.detach(), self.codebooks[group]).argmin(1)
            entry = self.codebooks[group][nearest]
            if self.training:
                self._follow(group, left.detach(), nearest)
            total = total + (group < used).float()[:, None] * entry
            left = left - entry
            codes.append(nearest)
        commitment = functional.mse_loss(flat, total.detach())
        through = flat + (total - flat).detach()
        quantized = through.reshape(batch, frames, size).transpose(1, 2)
        return quantized, torch.stack(codes).reshape(self.groups, batch, frames).transpose(0, 1), commitment

    @torch.no_grad()
    def _follow(self, group: int, left: Tensor, nearest: Tensor) -> None:
        member = functional.one_hot(nearest, self.entries).float()
        self.counts[group].lerp_(member.sum(0), 0.01)
        self.sums[group].lerp_(member.T @ left, 0.01)
        dead = self.counts[group] < 0.03 * self._even
        fresh = left[torch.randint(len(left), (self.entries,), device=left.device)]
        start = 0.3 * self._even
        self.counts[group] = torch.where(dead, start, self.counts[group])
        self.sums[group] = torch.where(dead[:, None], fresh * start, self.sums[group])
        self.codebooks[group] = self.sums[group] / self.counts[group].clamp(min=1e-4)[:, None]


class Spectra(nn.Module):
    """Distance of two sounds: log-mel spectra at seven resolutions, magnitudes at two of them."""

    BANDS = {32: 5, 64: 10, 128: 20, 256: 40, 512: 80, 1024: 100, 2048: 160}  # noqa: RUF012
    PLAIN = (512, 2048)

    def __init__(self) -> None:
        super().__init__()
        for window, bands in self.BANDS.items():
            self.register_buffer(f"bank{window}", mel_bank(bands, window), persistent=False)
            self.register_buffer(f"window{window}", torch.hann_window(window), persistent=False)

    def forward(self, made: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Mean difference of the logarithms, and of the magnitudes relative to those wanted. Sounds [B, L]."""
        mel = magnitude = made.new_zeros(())
        for window in self.BANDS:
            bank = self.get_buffer(f"bank{window}")
            ours, theirs = (self._spectrum(sound, window).abs() for sound in (made, wanted))
            logs = [(bank @ each).clamp(min=1e-4 * window).log() for each in (ours, theirs)]
            mel = mel + (logs[0] - logs[1]).abs().mean() / len(self.BANDS)
            if window in self.PLAIN:
                magnitude = magnitude + (ours - theirs).abs().mean() / theirs.mean() / len(self.PLAIN)
        return mel, magnitude

    def _spectrum(self, sound: Tensor, window: int) -> Tensor:
        shape = self.get_buffer(f"window{window}")
        return torch.stft(sound.float(), window, window // 4, window=shape, return_complex=True)


def _convolution(*sizes: Any, **named: Any) -> nn.Module:
    return weight_norm(nn.Conv2d(*sizes, **named))


class PeriodDiscriminator(nn.Module):
    """Looks at every p-th sample."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self._period = period
        sizes = (1, 24, 48, 96, 192, 192)
        self.layers = nn.ModuleList(
            _convolution(sizes[place], sizes[place + 1], (5, 1), (3, 1) if place < 4 else 1, (2, 0))
            for place in range(5)
        )
        self.last = _convolution(192, 1, (3, 1), 1, (1, 0))

    def forward(self, sound: Tensor) -> tuple[Tensor, list[Tensor]]:
        padded = functional.pad(sound, (0, -sound.shape[-1] % self._period))
        folded = padded.view(len(padded), 1, -1, self._period).contiguous(memory_format=torch.channels_last)
        return _judge(self, folded)


class SpectrumDiscriminator(nn.Module):
    """Looks at the complex spectrum of one window length."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window
        wide = [_convolution(32, 32, (3, 9), (1, 2), (dilation, 4), dilation=(dilation, 1)) for dilation in (1, 2, 4)]
        self.layers = nn.ModuleList([_convolution(2, 32, (3, 9), 1, (1, 4)), *wide, _convolution(32, 32, (3, 3), 1, 1)])
        self.last = _convolution(32, 1, (3, 3), 1, 1)
        self.register_buffer("shape", torch.hann_window(window), persistent=False)

    def forward(self, sound: Tensor) -> tuple[Tensor, list[Tensor]]:
        spectrum = torch.stft(sound.float(), self._window, self._window // 4, window=self.shape, return_complex=True)
        spectrum = spectrum / self._window**0.5
        planes = torch.stack([spectrum.real, spectrum.imag], 1).transpose(2, 3)
        return _judge(self, planes.contiguous(memory_format=torch.channels_last))


def _judge(discriminator: Any, planes: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A verdict for each place, and the features on the way to it."""
    features = []
    for layer in discriminator.layers:
        planes = functional.leaky_relu(layer(planes), 0.1)
        features.append(planes)
    return discriminator.last(planes), features


def discriminators() -> nn.ModuleList:
    """All eight."""
    periods = [PeriodDiscriminator(period) for period in (2, 3, 5, 7, 11)]
    return nn.ModuleList([*periods, *(SpectrumDiscriminator(window) for window in (512, 1024, 2048))])
