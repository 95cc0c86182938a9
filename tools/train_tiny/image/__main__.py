"""Trains the tiny image model, or judges one: `python -m tools.train_tiny.image train --out DIR --minutes 9`."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer

from tools.train_tiny import curves
from tools.train_tiny.image import evaluate, networks
from tools.train_tiny.image.captions import Captions, make_tokenizer
from tools.train_tiny.image.training import (
    PainterLoss,
    batches,
    normalize_latents,
    vae_loss,
)
from tools.train_tiny.optimize import Training, console

app = typer.Typer(add_completion=False, help=__doc__)

Device = Annotated[str, typer.Option(help="cuda or cpu; a GPU where there is one")]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    side: int
    """Pixels of a picture."""
    vae_batch: int
    batch: int
    steps: int | None
    """Of each training at most; None: as many as there is time for."""
    judged: int | None
    """Prompts of each set; None: all."""


FULL = Size(side=128, vae_batch=96, batch=256, steps=None, judged=None)
TOY = Size(side=32, vae_batch=8, batch=12, steps=3, judged=1)
_JUDGING = 45.0
"""Seconds kept for rounding, saving and judging."""


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="folder that gets the model and what resumes its training")],
    minutes: Annotated[float, typer.Option(help="for all, from start to judgement")] = 9.0,
    vae_seconds: Annotated[float, typer.Option(help="of these, for the VAE")] = 90.0,
    whole_minutes: Annotated[
        float,
        typer.Option(help="of the painter's training in all calls, over which its rate falls; 0: this is the last"),
    ] = 0.0,
    start: Annotated[str, typer.Option(help="a pipeline's folder to begin from; else from nothing")] = "",
    rate: Annotated[float, typer.Option(help="the painter's highest learning rate")] = 1.5e-3,
    device: Device = "",
    toy: Annotated[bool, typer.Option(help="few data, few steps: shows only that the program runs")] = False,
) -> None:
    """Trains VAE and painter, writes the pipeline into OUT/model and judges it.

    A second call with the same OUT takes up what is there: a finished VAE stays, and the painter is trained on for the
    minutes given.
    """
    begin = time.monotonic()
    deadline = begin + 60 * minutes - (0 if toy else _JUDGING)
    size = TOY if toy else FULL
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(int(time.time()) if (out / "state" / "painter.pt").is_file() else 0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
    tokenizer = make_tokenizer()
    model = networks.load(start, tokenizer) if start else networks.build(tokenizer, size.side)
    model.vae.to(where)
    model.painter.to(where)
    captions = Captions(tokenizer, where)
    counted = {
        name: sum(weights.numel() for weights in part.parameters()) / 1e6
        for name, part in (("vae", model.vae), ("text", model.painter.text), ("transformer", model.painter.transformer))
    }
    console.print(f"on {where}, millions of weights: {counted}, {len(tokenizer)} tokens")
    state = out / "state"
    vae = Training("vae", model.vae, rate=1e-3, decay=1e-4, average=0.998, warm_up=50)
    if not vae.resume(state):
        source = batches(captions, size.vae_batch, size.side, where)
        vae.run(source, vae_loss, until=time.monotonic() + vae_seconds, most_steps=size.steps)
        model.vae.load_state_dict(vae.average.state_dict())
        normalize_latents(model.vae, captions, size.side, where)
        vae.average.load_state_dict(model.vae.state_dict())
        vae.save(state)
    model.vae.load_state_dict(vae.average.state_dict())
    model.vae.eval().requires_grad_(False)
    model.painter.prepare(size.side // 4)
    painter = Training("painter", model.painter, rate=rate, decay=0.01, average=0.999)
    painter.resume(state)
    loss = PainterLoss(model.vae, compiled=where.type == "cuda")
    source = batches(captions, size.batch, size.side, where)
    asked = time.monotonic()
    painter.attempt(next(source), loss)
    console.print(f"first batch after {time.monotonic() - asked:.0f} s")
    painter.run(source, loss, until=deadline, most_steps=size.steps, whole=60 * whole_minutes or None)
    painter.save(state)
    curves.draw({"vae": vae.curve, "painter": painter.curve}, out / "curves.png")
    model.painter.load_state_dict(painter.average.state_dict())
    networks.save(model, tokenizer, str(out / "model"), evaluate.SHIFT)
    _judge(out, where, size)
    console.print(f"all: {time.monotonic() - begin:.0f} s")


@app.command()
def judge(out: Annotated[Path, typer.Argument(help="folder that train filled")], device: Device = "") -> None:
    """Judges OUT/model again."""
    _judge(out, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), FULL)


def _judge(out: Path, device: torch.device, size: Size) -> None:
    """Judges the rounded weights, computed in float32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    tokenizer = make_tokenizer()
    model = networks.load(str(out / "model"), tokenizer)
    model.vae.to(device)
    model.painter.to(device)
    figures, pictures = evaluate.measure(model, tokenizer, size.side, most=size.judged)
    for name, found in figures.items():
        console.print(f"{name}: {found}")
    (out / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
    everything = torch.cat([each[:12] for each in pictures.values()])
    evaluate.contact_sheet(everything, out / "sheet.png")


if __name__ == "__main__":
    app()
