#!/usr/bin/env python3
"""Asks a cluster of the embedded models what they were not trained on, and has programs judge the answers.

    python tools/quality.py [--deploy demo] [--most 4] [--json out/quality.json]

Answers come through the gateway, as clients get them: text by its words, speech by pocketsphinx (the choice among
thirty sentences, and the word error rate of what it hears freely), pictures by the checker of their training.
"""
# ruff: noqa: E402 - the project's root must be on the path first

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import openai
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

from omnid.config import load_deploy, resolve
from omnid.launcher.local import local_cluster
from tools.train_tiny.image import evaluate as pictures
from tools.train_tiny.image.judge import judge
from tools.train_tiny.omni import evaluate as voices
from tools.train_tiny.omni import language, speech
from tools.train_tiny.omni.codec_encoder import RATE
from tools.train_tiny.omni.vocabulary import HELD_OUT_SENTENCES

AT_ONCE = 8
READY_SECONDS = 300.0
SIDE = 128


@dataclass(slots=True)
class Answers:
    """What the models made."""

    texts: list[str] = field(default_factory=list)
    sounds: list[voices.Sound] = field(default_factory=list)
    drawn: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Client:
    """Asks for one thing at a time, `AT_ONCE` of them at once."""

    def __init__(self, address: str) -> None:
        self._openai = openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=300)
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def text(self, question: str) -> str:
        """The answer in words."""
        async with self._turn:
            answer = await self._openai.chat.completions.create(
                model="tiny-omni", messages=[{"role": "user", "content": question}], temperature=0
            )
        return answer.choices[0].message.content or ""

    async def sound(self, question: str) -> voices.Sound:
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
                seed=0,
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    audio: Any = getattr(choice.delta, "audio", None)
                    pcm += base64.b64decode(getattr(audio, "data", None) or "")
        return np.frombuffer(bytes(pcm), dtype="<i2").astype(np.float32) / 32768

    async def picture(self, prompt: str, seed: int) -> torch.Tensor:
        """[3, SIDE, SIDE] from -1 to 1."""
        async with self._turn:
            answer = await self._openai.images.generate(
                model="tiny-image", prompt=prompt, size=f"{SIDE}x{SIDE}", extra_body={"seed": seed}
            )
        assert answer.data
        with Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))) as opened:
            pixels = torch.from_numpy(np.asarray(opened.convert("RGB")).copy())
        return pixels.permute(2, 0, 1).float() / 127.5 - 1


async def ask(deploy: str, most: int | None, console: Console) -> Answers:
    """Starts the deployment on free ports, asks everything, stops it."""
    made = Answers()
    pipelines = resolve(load_deploy(deploy))
    async with local_cluster(pipelines, grpc="127.0.0.1:0", http="127.0.0.1:0", echo=lambda _line: None) as cluster:
        await cluster.ready(READY_SECONDS)
        client = Client(cluster.http)
        with console.status("asking questions"):
            asked = language.held_out()[:most]
            made.texts = await asyncio.gather(*(client.text(each.question) for each in asked))
        with console.status("having sentences said"):
            said = HELD_OUT_SENTENCES[:most]
            made.sounds = await asyncio.gather(*(client.sound(f"say {each}") for each in said))
        for name, wanted in pictures.prompts().items():
            with console.status(f"having pictures drawn: {name}"):
                texts = [pictures.text_of(each, place) for place, each in enumerate(wanted[:most])]
                made.drawn[name] = await asyncio.gather(
                    *(client.picture(text, seed) for seed, text in enumerate(texts))
                )
    return made


def figures(made: Answers) -> dict[str, float]:
    """Shares of what is right, `speech_closed` too; `speech_length` is the departure that nine in ten keep within."""
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=get_context("spawn"), initializer=speech.single_thread
    ) as workers:
        teacher = [speech.teacher().say(text) for text in HELD_OUT_SENTENCES[: len(made.sounds)]]
        lengths = [len(sound) / len(other) for sound, other in zip(made.sounds, teacher, strict=True)]
        loudest = max(float(np.abs(sound).max(initial=0)) for sound in made.sounds)
        voice = voices.Voice({}, lengths, loudest, len(lengths))
        voices.judge(voice, made.sounds, workers)
    asked = language.held_out()[: len(made.texts)]
    found = {
        "thinker_exact": sum(text == each.answer for text, each in zip(made.texts, asked, strict=True)) / len(asked),
        "speech_closed": (voice.closed or 0) / len(made.sounds),
        "speech_wer": voice.wer or 0.0,
        "speech_length": voice.length_within,
        "speech_loudest": loudest,
    }
    wanted = pictures.prompts()
    for name, drawn in made.drawn.items():
        verdicts = [judge(picture, want) for picture, want in zip(drawn, wanted[name], strict=False)]
        found[f"image_{name}"] = pictures.share(verdicts)["every"]
        if name == "one":
            found |= {f"image_{part}": pictures.share(verdicts)[part] for part in ("background", "colour", "shape")}
    return {name: round(value, 3) for name, value in found.items()}


def sound_sheet(sounds: list[voices.Sound], path: Path) -> None:
    """Waveform and spectrogram of each sound."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

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
    """Prints a table of figures, and saves pictures and sounds side by side."""
    console = Console()
    made = asyncio.run(ask(deploy, most, console))
    found = figures(made)
    out.mkdir(parents=True, exist_ok=True)
    shown = [picture for drawn in made.drawn.values() for picture in drawn[:12]]
    pictures.contact_sheet(torch.stack(shown), out / "pictures.png")
    sound_sheet(made.sounds[:6], out / "sounds.png")
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
