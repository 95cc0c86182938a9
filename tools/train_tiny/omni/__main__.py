"""Trains the tiny speaking model, or judges one: `python -m tools.train_tiny.omni train --out DIR --minutes 9`."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import typer

from tools.train_tiny.omni import evaluate, run, speech
from tools.train_tiny.optimize import console

app = typer.Typer(add_completion=False, help=__doc__)

Folder = Annotated[Path, typer.Option(file_okay=False)]
Device = Annotated[str, typer.Option(help="cuda or cpu; a GPU where there is one")]


def _workers() -> ProcessPoolExecutor:
    count = max(1, len(os.sched_getaffinity(0)) - 1)
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=speech.single_thread)


def _device(name: str) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="folder that gets the model and what resumes its training")],
    codec: Annotated[Path, typer.Option(help="folder of the trained codec: encoder.safetensors and code2wav/")],
    minutes: Annotated[float, typer.Option(help="for all, from start to judgement")] = 9.0,
    thinker_minutes: Annotated[
        float, typer.Option(help="of these, for the thinker, its data and compilation; 0: three tenths")
    ] = 0.0,
    device: Device = "",
    toy: Annotated[bool, typer.Option(help="few data, few steps: shows only that the program runs")] = False,
) -> None:
    """Trains thinker and talker, writes the checkpoint into OUT/model and judges it.

    A second call with the same OUT takes up what is there: a finished thinker and spoken sentences are not made again,
    and the talker is trained on for the minutes given.
    """
    begin = time.monotonic()
    size = run.TOY if toy else run.FULL
    with _workers() as workers:
        run.train(
            run.Paths(out, codec),
            size,
            workers,
            _device(device),
            begin=begin,
            seconds=60 * minutes,
            thinker_seconds=60 * thinker_minutes or 18 * minutes,
        )
    console.print(f"all: {time.monotonic() - begin:.0f} s")


@app.command()
def judge(
    out: Annotated[Path, typer.Argument(help="folder that train filled")],
    device: Device = "",
) -> None:
    """Judges OUT/model again: answers, and speech where pocketsphinx is installed."""
    with _workers() as workers:
        run.judge(run.Paths(out, out), workers, _device(device))


@app.command()
def codec(
    out: Annotated[Path, typer.Option(help="folder that gets encoder.safetensors and code2wav/")],
    minutes: Annotated[float, typer.Option(help="for the training; speaking comes before it")] = 7.7,
    device: Device = "",
    toy: Annotated[bool, typer.Option(help="few data, few steps: shows only that the program runs")] = False,
) -> None:
    """Trains the codec anew; the talker then learns its codes."""
    with _workers() as workers:
        run.train_codec(out, run.TOY if toy else run.FULL, workers, _device(device), 60 * minutes)


@app.command()
def teacher(out: Annotated[Path, typer.Argument(help="folder that train filled")]) -> None:
    """Judges the teacher's own voice on the held-out sentences, as a measure of the judge."""
    sounds = run.Paths(out, out).load_teacher()
    found = evaluate.Voice({}, [1.0] * len(sounds), float(max(np.abs(each).max() for each in sounds)), len(sounds))
    with _workers() as workers:
        evaluate.judge(found, sounds, workers)
    console.print(json.dumps({"closed": found.closed, "wer": found.wer}))


if __name__ == "__main__":
    app()
