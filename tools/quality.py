#!/usr/bin/env python3
"""Asks a cluster of the embedded models what they were not trained on, and has programs judge the answers.

    python tools/quality.py [--deploy demo] [--most 4] [--json out/quality.json]

Answers come through the gateway, as clients get them: text is judged by its words, speech by pocketsphinx (the choice
among thirty sentences, and the word error rate of what it hears freely), pictures by the checker of their training.
"""
# ruff: noqa: E402 - the project's root must be on the path first

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Self

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import numpy as np
import openai
import torch
import typer
from matplotlib import pyplot as plt
from PIL import Image
from rich.console import Console
from rich.table import Table

from omni.rpc import logs
from omnid.config import load_deploy, resolve
from omnid.launcher.local import local_cluster
from tools.train_tiny.image import evaluate as pictures
from tools.train_tiny.image import grammar as g
from tools.train_tiny.image.judge import Verdict, judge
from tools.train_tiny.omni import evaluate as voices
from tools.train_tiny.omni import language, speech
from tools.train_tiny.omni.codec_encoder import RATE
from tools.train_tiny.omni.vocabulary import HELD_OUT_SENTENCES

AT_ONCE = 8
READY_SECONDS = 300.0
SIDE = 128
SHOWN, SOUNDS = 24, 6
"""Pictures and sounds on the contact sheets."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture, what it was asked for with, and the verdict on it."""

    prompt: str
    picture: torch.Tensor
    """[3, SIDE, SIDE] from -1 to 1."""
    verdict: Verdict


@dataclass(slots=True)
class Answers:
    """What the models made."""

    texts: list[str] = field(default_factory=list)
    sounds: list[voices.Sound] = field(default_factory=list)
    drawn: dict[str, list[Drawn]] = field(default_factory=dict)
    """By set of prompts."""


class Client:
    """Asks for one thing at a time, `AT_ONCE` of them at once; the same answer for the same seed."""

    def __init__(self, url: str) -> None:
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._openai.close()

    async def text(self, question: str) -> str:
        """The answer in words."""
        async with self._turn:
            answer = await self._openai.chat.completions.create(
                model="tiny-omni", messages=[{"role": "user", "content": question}], temperature=0
            )
        return answer.choices[0].message.content or ""

    async def sound(self, question: str, seed: int = 0) -> voices.Sound:
        """The spoken answer as it streams, 24 kHz from -1 to 1."""
        pcm = bytearray()
        async with self._turn:
            stream = await self._openai.chat.completions.create(
                model="tiny-omni",
                messages=[{"role": "user", "content": question}],
                modalities=["text", "audio"],
                extra_body={"audio": {"format": "pcm16"}},
                stream=True,
                temperature=0,
                seed=seed,
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    audio: Any = getattr(choice.delta, "audio", None)
                    pcm += base64.b64decode(getattr(audio, "data", None) or "")
        return np.frombuffer(bytes(pcm), dtype="<i2").astype(np.float32) / 32768

    async def picture(self, prompt: str, wanted: g.Wanted, seed: int = 0) -> Drawn:
        """The picture for a prompt that asks for `wanted`."""
        async with self._turn:
            answer = await self._openai.images.generate(
                model="tiny-image", prompt=prompt, size=f"{SIDE}x{SIDE}", extra_body={"seed": seed}
            )
        assert answer.data
        with Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))) as opened:
            pixels = torch.from_numpy(np.asarray(opened.convert("RGB")).copy())
        picture = pixels.permute(2, 0, 1).float() / 127.5 - 1
        return Drawn(prompt, picture, judge(picture, wanted))


async def ask(deploy: str, most: int | None, console: Console) -> Answers:
    """Starts the deployment on free ports, asks everything, stops it."""
    made = Answers()
    pipelines = resolve(load_deploy(deploy))
    async with local_cluster(pipelines, grpc="127.0.0.1:0", http="127.0.0.1:0", echo=lambda _line: None) as cluster:
        await cluster.ready(READY_SECONDS)
        async with Client(f"http://{cluster.http}") as client:
            with console.status("asking questions"):
                asked = language.held_out()[:most]
                made.texts = await asyncio.gather(*(client.text(each.question) for each in asked))
            with console.status("having sentences said"):
                said = HELD_OUT_SENTENCES[:most]
                made.sounds = await asyncio.gather(*(client.sound(f"say {each}") for each in said))
            for name, wanted in pictures.prompts().items():
                texts = [pictures.text_of(each, place) for place, each in enumerate(wanted[:most])]
                with console.status(f"having pictures drawn: {name}"):
                    made.drawn[name] = await asyncio.gather(
                        *(client.picture(text, wanted[seed], seed) for seed, text in enumerate(texts))
                    )
    return made


def figures(made: Answers) -> dict[str, float]:
    """Shares of what is right, `speech_closed` too; `speech_length` is the departure that nine in ten keep within.

    The background, colour, shape and all of a picture are those of one thing, `image_pairs` is all of two things.
    """
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=get_context("spawn"), initializer=speech.single_thread
    ) as workers:
        teacher = [speech.teacher().say(text) for text in HELD_OUT_SENTENCES[: len(made.sounds)]]
        lengths = [len(sound) / len(other) for sound, other in zip(made.sounds, teacher, strict=True)]
        loudest = max(float(np.abs(sound).max(initial=0)) for sound in made.sounds)
        voice = voices.Voice({}, lengths, loudest, len(lengths))
        voices.judge(voice, made.sounds, workers)
    asked = language.held_out()[: len(made.texts)]
    shares = {name: pictures.share([each.verdict for each in drawn]) for name, drawn in made.drawn.items()}
    one = shares.pop("one")
    found = {
        "thinker_exact": sum(text == each.answer for text, each in zip(made.texts, asked, strict=True)) / len(asked),
        "speech_closed": (voice.closed or 0) / len(made.sounds),
        "speech_wer": voice.wer or 0.0,
        "image_background": one["background"],
        "image_colour": one["colour"],
        "image_shape": one["shape"],
        "image_all": one["every"],
        "image_pairs": shares.pop("two")["every"],
        **{f"image_{name}": share["every"] for name, share in shares.items()},
        "speech_length": voice.length_within,
        "speech_loudest": loudest,
    }
    return {name: round(value, 3) for name, value in found.items()}


def picture_sheet(drawn: Sequence[Drawn], path: Path, columns: int = 8) -> None:
    """Pictures over their prompts; a prompt in red was not met."""
    rows = -(-len(drawn) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(1.5 * columns, 1.95 * rows), squeeze=False)
    figure.subplots_adjust(0.005, 0.08, 0.995, 0.995, wspace=0.04, hspace=0.28)
    for panel in panels.flat:
        panel.axis("off")
    for panel, each in zip(panels.flat, drawn, strict=False):
        panel.imshow((each.picture.permute(1, 2, 0) / 2 + 0.5).clamp(0, 1).numpy())
        words = "\n".join(textwrap.wrap(each.prompt, 27))
        colour = "black" if each.verdict.every else "red"
        panel.text(0.5, -0.03, words, transform=panel.transAxes, fontsize=6, ha="center", va="top", color=colour)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def sound_sheet(sounds: Sequence[voices.Sound], path: Path) -> None:
    """Waveform and spectrogram of each sound."""
    figure, panels = plt.subplots(2, len(sounds), figsize=(4 * len(sounds), 5), squeeze=False)
    for column, sound in enumerate(sounds):
        seconds = np.arange(len(sound)) / RATE
        panels[0][column].plot(seconds, sound, linewidth=0.5)
        panels[0][column].set(title=HELD_OUT_SENTENCES[column], ylim=(-1, 1))
        panels[1][column].specgram(sound + 1e-6, NFFT=512, Fs=RATE, noverlap=384)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(
    deploy: Annotated[str, typer.Option(help="a deployment that serves tiny-omni and tiny-image")] = "demo",
    most: Annotated[int | None, typer.Option(min=1, help="of each kind of question at most; default: all")] = None,
    out: Annotated[Path, typer.Option(help="folder for the contact sheets")] = Path("out"),
    json_path: Annotated[Path | None, typer.Option("--json", help="file for the figures")] = None,
) -> None:
    """Prints a table of figures, and saves pictures (as in the model card's sheet) and sounds side by side."""
    logs.configure(level="WARNING")
    console = Console()
    made = asyncio.run(ask(deploy, most, console))
    found = figures(made)
    out.mkdir(parents=True, exist_ok=True)
    in_turn = chain.from_iterable(zip_longest(*made.drawn.values()))
    picture_sheet(list(islice(filter(None, in_turn), SHOWN)), out / "pictures.png")
    sound_sheet(made.sounds[:SOUNDS], out / "sounds.png")
    table = Table("figure", "value")
    for name, value in found.items():
        table.add_row(name, f"{value:g}")
    console.print(table)
    console.print(f"{out / 'pictures.png'}, {out / 'sounds.png'}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
