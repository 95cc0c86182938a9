"""The two trainings: pictures to latents and back (VAE), and captions to latents (the painter)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tools.train_tiny.image import grammar as g
from tools.train_tiny.image.captions import Captions
from tools.train_tiny.image.drawing import draw
from tools.train_tiny.image.networks import Painter
from tools.train_tiny.image.sampling import sample
from tools.train_tiny.optimize import Losses

MIX = (0.16, 0.40, 0.16, 0.12, 0.11, 0.05)
"""Share of each kind of picture in a batch."""
_TOGETHER = 16
"""Batches that are drawn at once."""
_KL = 3e-4
_GRADIENT = 0.2
"""Weight of the differences of neighbouring pixels: edges."""
_NOISE_MEAN, _NOISE_SPREAD = 0.8, 1.2
"""Of the logit of the noise level: above the middle, where it is decided what stands where."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pictures [n, 3, side, side] from -1 to 1, and their captions."""

    pictures: Tensor
    ids: Tensor
    valid: Tensor


def shares(size: int) -> list[int]:
    """How many pictures of each kind a batch of `size` has; always the same, so that shapes never change."""
    counts = [max(1, round(size * share)) for share in MIX]
    counts[g.TWO] += size - sum(counts)
    return counts


def batches(captions: Captions, size: int, side: int, device: torch.device) -> Iterator[Batch]:
    """Endless. Many batches are drawn at once: for a GPU they cost as much as one, since it is launches that cost."""
    counts = shares(size)
    while True:
        parts: list[list[Batch]] = [[] for _ in range(_TOGETHER)]
        for kind, count in enumerate(counts):
            with torch.no_grad():
                drawn = sample(kind, count * _TOGETHER, device)
                fields = (draw(drawn, side), *captions(drawn))
            for batch, part in zip(parts, zip(*(field.split(count) for field in fields), strict=True), strict=True):
                batch.append(Batch(*part))
        for batch in parts:
            yield Batch(*(torch.cat([getattr(part, name) for part in batch]) for name in ("pictures", "ids", "valid")))


def vae_loss(vae: Any, batch: Batch) -> tuple[Tensor, Losses]:
    """Pixels, edges, and a little of what keeps latents near a unit sphere."""
    picture = batch.pictures.contiguous(memory_format=torch.channels_last)
    found = vae.encode(picture).latent_dist
    made = vae.decode(found.sample()).sample.float()
    off = made - batch.pictures
    pixels = off.abs().mean() + off.square().mean()
    edges = off.diff(dim=-1).abs().mean() + off.diff(dim=-2).abs().mean()
    mean, log = found.mean.float(), found.logvar.float()
    spread = 0.5 * (mean.square() + log.exp() - 1 - log).mean()
    psnr = 10 * torch.log10(4 / off.detach().square().mean())
    return pixels + _GRADIENT * edges + _KL * spread, {"pixels": pixels, "edges": edges, "psnr": psnr}


@torch.no_grad()
def normalize_latents(vae: Any, captions: Captions, side: int, device: torch.device, rounds: int = 8) -> None:
    """Folds mean and deviation of each latent channel into the two 1x1 convolutions: the scaling factor is 1."""
    source = batches(captions, 64, side, device)
    means = [vae.encode(next(source).pictures).latent_dist.mean.transpose(0, 1).flatten(1) for _ in range(rounds)]
    latents = torch.cat(means, 1).float()
    mean, deviation = latents.mean(1), latents.std(1)
    before, after, count = vae.quant_conv, vae.post_quant_conv, len(mean)
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight *= deviation[None, :, None, None]
    before.weight[:count] /= deviation[:, None, None, None]
    before.bias[:count] = (before.bias[:count] - mean) / deviation
    before.bias[count:] -= 2 * deviation.log()


class PainterLoss:
    """Velocity error at a random noise level. Pictures are encoded by a VAE that stays as it is."""

    def __init__(self, vae: nn.Module, *, compiled: bool) -> None:
        self._vae = vae
        self._step = torch.compile(_velocity_error) if compiled else _velocity_error
        self._latents = torch.compile(self._encode) if compiled else self._encode

    def __call__(self, painter: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        with torch.no_grad():
            latents = self._latents(batch.pictures).float()
            noise = torch.randn_like(latents)
            level = torch.randn(len(latents), device=latents.device) * _NOISE_SPREAD + _NOISE_MEAN
        error = self._step(painter, latents, noise, torch.sigmoid(level), batch.ids, batch.valid)
        return error, {"velocity": error.detach()}

    def _encode(self, pictures: Tensor) -> Tensor:
        vae: Any = self._vae
        mean: Tensor = vae.encode(pictures).latent_dist.mean
        return mean


def _velocity_error(
    painter: Painter, latents: Tensor, noise: Tensor, sigma: Tensor, ids: Tensor, valid: Tensor
) -> Tensor:
    share = sigma[:, None, None, None]
    found = painter((1 - share) * latents + share * noise, sigma, ids, valid)
    return (found - (noise - latents)).square().mean()
