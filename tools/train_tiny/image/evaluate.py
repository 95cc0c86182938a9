"""Draws held-out prompts with the trained model and judges the pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tools.train_tiny.image import grammar as g
from tools.train_tiny.image.captions import tokenize
from tools.train_tiny.image.judge import Verdict, judge
from tools.train_tiny.image.networks import CHANNELS, Model
from tools.train_tiny.image.sampling import sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STEPS, GUIDANCE, SHIFT = 20, 2.0, 2.0
"""What the model is judged, and shipped, with. The pipeline's `guidance_scale` is one less."""

GATES = {"one": 96, "two": 48, "unseen": 24, "three": 24, "count": 24, "digit": 20, "scene": 15}
"""Prompts of each set. `unseen` are pairs of which none was in training."""


def prompts(seed: int = 11) -> dict[str, list[g.Wanted]]:
    """The prompts of each set, always the same."""
    torch.manual_seed(seed)
    device = torch.device("cpu")
    found: dict[str, list[g.Wanted]] = {}
    for name, count in GATES.items():
        kind = g.TWO if name == "unseen" else g.KINDS.index(name)
        draws = sample(kind, count, device, held_out=name == "unseen")
        found[name] = [draws.wanted(row) for row in range(count)]
    return found


@torch.no_grad()
def paint(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    side: int,
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
) -> Tensor:
    """Pictures [n, 3, side, side] from -1 to 1 for captions."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    device = next(model.painter.parameters()).device
    noise = torch.Generator().manual_seed(seed)
    latents = torch.randn(len(texts), CHANNELS, side // 4, side // 4, generator=noise).to(device)
    ids, valid = tokenize(tokenizer, texts, device)
    no_ids, no_valid = tokenize(tokenizer, [""] * len(texts), device)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(sigmas=[1 - step / steps for step in range(steps)], device=device)
    for time in scheduler.timesteps:
        sigma = torch.full((len(texts),), float(time) / 1000, device=device)
        with_text = model.painter(latents, sigma, ids, valid)
        without = model.painter(latents, sigma, no_ids, no_valid)
        velocity = without + guidance * (with_text - without)
        latents = scheduler.step(velocity, time, latents, return_dict=False)[0]
    vae: Any = model.vae
    return vae.decode(latents).sample.float().clamp(-1, 1)


def text_of(wanted: g.Wanted, place: int) -> str:
    """A prompt in one of the plainer sentences, those that say the background."""
    templates = [text for text in g.TEMPLATES[wanted.kind] if g.names_background(text)] or g.TEMPLATES[wanted.kind]
    return g.sentence(wanted, templates[place % min(4, len(templates))])


def measure(
    model: Model, tokenizer: PreTrainedTokenizerFast, side: int, *, most: int | None = None, steps: int = STEPS
) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:
    """Shares of right pictures of each set, and the pictures; of each set at most the first `most`."""
    figures, pictures = {}, {}
    for name, wanted in prompts().items():
        asked = wanted[:most]
        made = paint(model, tokenizer, [text_of(each, i) for i, each in enumerate(asked)], side, steps=steps)
        figures[name] = share([judge(each, want) for each, want in zip(made, asked, strict=True)])
        pictures[name] = made.cpu()
    return figures, pictures


def share(verdicts: list[Verdict]) -> dict[str, float]:
    """How many of them are right, as shares."""
    names = ("background", "colour", "shape", "every")
    return {name: round(sum(getattr(each, name) for each in verdicts) / len(verdicts), 3) for name in names}


def contact_sheet(pictures: Tensor, path: Path, columns: int = 12) -> None:
    """Pictures side by side."""
    from PIL import Image
    from torch.nn import functional

    bytes_ = ((pictures.cpu() + 1) * 127.5).round().clamp(0, 255).byte()
    framed = functional.pad(bytes_, (1, 1, 1, 1), value=90)
    rows = [torch.cat(list(row), -1) for row in framed.split(columns) if len(row) == min(columns, len(framed))]
    Image.fromarray(torch.cat(rows, -2).permute(1, 2, 0).numpy()).save(path)
