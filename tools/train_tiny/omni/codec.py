"""Trains the codec: our own encoder and quantizer, and transformers' Qwen3OmniMoeCode2Wav, unchanged, as the decoder.

Three stages by time: no quantizer, noise on the latents instead; codebooks set by k-means, then learned along; and
discriminators on top. The decoder's embedding of a code is the mean over groups of what the quantizer adds, so that
`code_embedding[group, code] = groups * projection(codebook[group, code])` gives the class the same input.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tools.train_tiny.omni.codec_encoder import FRAME, Encoder
from tools.train_tiny.omni.codec_networks import LearningQuantizer, Spectra, discriminators
from tools.train_tiny.omni.model import CODE2WAV, CODE_GROUPS, CODEBOOK
from tools.train_tiny.optimize import console

GROUPS = 8
"""Trained; the first `CODE_GROUPS` of them are kept."""
SIZE = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how large."""

    seconds: float = 460.0
    warm: float = 0.16
    """Share of the time without a quantizer."""
    judged_from: float = 0.41
    """Share of the time after which the discriminators join in."""
    batch: int = 64
    frames: int = 24
    rate: float = 6e-4
    noise: float = 0.2
    adversarial: float = 1.0
    features: float = 2.0
    latents: int = 60_000
    """By which the codebooks are set."""
    crop: int = 24_000
    """Samples that the discriminators see of each item."""
    most_steps: int | None = None


class Codec(nn.Module):
    """Encoder, quantizer and decoder."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.encoder = Encoder(size=SIZE)
        self.quantizer = LearningQuantizer(GROUPS, CODEBOOK, SIZE, plan.batch * plan.frames)
        self.decoder = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**{**CODE2WAV, "num_quantizers": GROUPS}))
        self.projection = nn.Linear(SIZE, CODE2WAV["hidden_size"], bias=False)
        for part in self.decoder.modules():
            if hasattr(part, "gamma"):
                nn.init.constant_(part.gamma, 0.1)  # transformers' 1e-6 learns too slowly here
        self.decoder.code_embedding.requires_grad_(False)

    def decode(self, latents: Tensor) -> Tensor:
        """Quantized latents [B, size, T] to sound [B, L], as the decoder does after its embedding."""
        wave = self.decoder.pre_transformer(inputs_embeds=self.projection(latents.transpose(1, 2)))
        return self.convolve(wave.last_hidden_state.transpose(1, 2))

    def convolve(self, wave: Tensor) -> Tensor:
        """The decoder after its transformer: [B, H, T] to sound [B, L]."""
        for blocks in self.decoder.upsample:
            for block in blocks:
                wave = block(wave)
        for block in self.decoder.decoder:
            wave = block(wave)
        return wave.squeeze(1)

    @torch.no_grad()
    def export(self, folder: Path, groups: int = CODE_GROUPS) -> None:
        """Writes the decoder for the first `groups` groups, and encoder with codebooks beside it."""
        small = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**{**CODE2WAV, "num_quantizers": groups}))
        state = {name: each for name, each in self.decoder.state_dict().items() if not name.startswith("code_")}
        small.load_state_dict(state, strict=False)
        rows = self.projection(self.quantizer.codebooks[:groups].reshape(groups * CODEBOOK, SIZE)) * groups
        small.code_embedding.weight.copy_(rows)
        small.to(torch.bfloat16).save_pretrained(folder / "code2wav")
        kept = {f"enc.{name}": each.half() for name, each in self.encoder.state_dict().items()}
        kept["rvq.C"] = self.quantizer.codebooks
        kept = {name: each.cpu().contiguous() for name, each in kept.items()}
        save_file(kept, folder / "encoder.safetensors", metadata={"width": "256", "d": str(SIZE)})


def excerpts(samples: Tensor, plan: Plan, seed: int) -> Iterator[Tensor]:
    """Endless random excerpts [batch, L] of one long recording of 16-bit samples."""
    generator = torch.Generator(device=samples.device).manual_seed(seed)
    length = FRAME * plan.frames
    reach = torch.arange(length, device=samples.device)
    while True:
        starts = torch.randint(len(samples) - length, (plan.batch, 1), generator=generator, device=samples.device)
        yield samples[starts + reach].float() / 32767


def train(samples: Tensor, plan: Plan, folder: Path, seed: int = 0) -> list[dict[str, float]]:
    """Trains on a recording on its device, writes the codec into a folder and returns the curve."""
    device = samples.device
    torch.manual_seed(seed)
    codec, judges, spectra = Codec(plan).to(device), discriminators().to(device), Spectra().to(device)
    if device.type == "cuda":
        codec.convolve = torch.compile(codec.convolve, dynamic=False)  # type: ignore[method-assign]
    weights = [each for each in codec.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=plan.rate, betas=(0.8, 0.98), weight_decay=0.01)
    judging = torch.optim.AdamW(judges.parameters(), lr=plan.rate / 2, betas=(0.8, 0.98), weight_decay=0.01)
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    sounds = excerpts(samples, plan, seed)
    begin, step, joined, quantized, curve = time.monotonic(), 0, -1, False, []
    while True:
        seconds = time.monotonic() - begin
        done = step / plan.most_steps if plan.most_steps else seconds / plan.seconds
        if done >= 1:
            break
        rate = min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for each, share in ((optimizer, 1.0), (judging, 0.5)):
            each.param_groups[0]["lr"] = plan.rate * share * rate
        if not quantized and done >= plan.warm:
            with torch.no_grad():
                rounds = max(2, plan.latents // (plan.batch * plan.frames))
                found = [codec.encoder(next(sounds)).transpose(1, 2).reshape(-1, SIZE) for _ in range(rounds)]
            codec.quantizer.start(torch.cat(found))
            quantized = True
        joined = step if joined < 0 and done >= plan.judged_from else joined
        wanted = next(sounds)
        with half:
            latents = codec.encoder(wanted)
        if quantized:
            latents, _, commitment = codec.quantizer(latents, fewest=4)
        else:
            latents, commitment = latents + plan.noise * torch.randn_like(latents), latents.new_zeros(())
        made = codec.decode(latents)
        wanted = wanted[:, : made.shape[-1]]
        mel, magnitude = spectra(made, wanted)
        loss = 45 * mel + 4 * magnitude + commitment
        if joined >= 0:
            loss = loss + min(1.0, (step - joined) / 300) * _contest(judges, judging, made, wanted, plan, half)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 30.0)
        optimizer.step()
        step += 1
        if step % 100 == 0 or step == 1:
            curve.append(
                {"step": step, "seconds": seconds, "mel": float(mel.detach()), "magnitude": float(magnitude.detach())}
            )
            console.print("codec: " + "  ".join(f"{name} {value:.4g}" for name, value in curve[-1].items()))
    folder.mkdir(parents=True, exist_ok=True)
    codec.eval().cpu().export(folder)
    return curve


def _contest(
    judges: nn.ModuleList,
    judging: torch.optim.Optimizer,
    made: Tensor,
    wanted: Tensor,
    plan: Plan,
    half: torch.autocast,
) -> Tensor:
    """Trains the discriminators one step, and gives the codec's loss before them."""
    length = min(plan.crop, made.shape[-1])
    start = int(torch.randint(made.shape[-1] - length + 1, ()))
    count = max(1, len(made) // 2)
    ours, theirs = made[:count, start : start + length], wanted[:count, start : start + length]
    judging.zero_grad()
    with half:
        real, false = ([judge(sound) for judge in judges] for sound in (theirs, ours.detach()))
    verdicts = zip(real, false, strict=True)
    wrong = [
        functional.relu(1 - r.float()).mean() + functional.relu(1 + f.float()).mean() for (r, _), (f, _) in verdicts
    ]
    torch.stack(wrong).mean().backward()
    nn.utils.clip_grad_norm_(judges.parameters(), 10.0)
    judging.step()
    judges.requires_grad_(False)
    with half:
        heard = [judge(ours) for judge in judges]
    judges.requires_grad_(True)
    deceived = -sum(verdict.float().mean() for verdict, _ in heard)
    alike = [
        ((mine - other.detach()).abs().mean() / other.detach().abs().mean().clamp(min=1e-3)).float()
        for (_, ours_seen), (_, theirs_seen) in zip(heard, real, strict=True)
        for mine, other in zip(ours_seen, theirs_seen, strict=True)
    ]
    return plan.adversarial * deceived + plan.features * torch.stack(alike).sum()
