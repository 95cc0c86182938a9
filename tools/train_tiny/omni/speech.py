"""Spoken sentences as codes: hibari-tts speaks them on all cores, the codec's encoder writes them down on the GPU.

The teacher's voice is quiet, so it is doubled. What follows its last sound is cut, so that the talker learns to end.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.train_tiny.omni import language
from tools.train_tiny.omni.codec_encoder import FRAME, RATE, Quantizer
from tools.train_tiny.omni.sentences import sentence
from tools.train_tiny.omni.vocabulary import HELD_OUT_SENTENCES

GAIN = 2.0
SEED = 0
"""Of the teacher, for every sentence."""
_SILENCE = 0.01
_REST = 0.1
"""Seconds that are kept after the last sample louder than `_SILENCE`."""
LONGEST = 90
"""Frames; longer sentences are left out."""


def texts(shard: int, count: int) -> list[str]:
    """Sentences to be spoken, the same for the same shard: answers of all skills, templates, words in random order."""
    rng = random.Random(2_000_000 + shard)
    found: list[str] = []
    while len(found) < count:
        text = language.exchange(rng).answer if rng.random() < 0.35 else sentence(rng)
        if text not in HELD_OUT_SENTENCES:
            found.append(text)
    return found


class Teacher:
    """The voice."""

    def __init__(self) -> None:
        from hibari import Hibari

        self._voice = Hibari()

    def say(self, text: str) -> NDArray[np.float32]:
        """Sound at 24 kHz from -1 to 1, cut shortly after its end."""
        sound = np.clip(self._voice(text, seed=SEED) * GAIN, -0.999, 0.999).astype(np.float32)
        loud = np.flatnonzero(np.abs(sound) > _SILENCE)
        return sound[: int(loud[-1]) + int(_REST * RATE)] if len(loud) else sound


@cache
def teacher() -> Teacher:
    """The voice of this process, made once."""
    return Teacher()


def speak(shard: int, count: int, folder: Path) -> Path:
    """Speaks a shard into a file of 16-bit samples, one sentence after another, with their lengths."""
    sounds = [teacher().say(text) for text in texts(shard, count)]
    path = folder / f"{shard:04d}.npz"
    lengths = np.array([len(sound) for sound in sounds])
    np.savez(path, lengths=lengths, samples=(np.concatenate(sounds) * 32767).astype(np.int16))
    return path


def begin(workers: Executor, shards: int, count: int, folder: Path) -> list[Future[Path]]:
    """Starts speaking shards of `count` sentences; the files are there when the futures are done."""
    folder.mkdir(parents=True, exist_ok=True)
    return [workers.submit(speak, shard, count, folder) for shard in range(shards)]


def single_thread() -> None:
    """To be run first in each worker: threads of theirs would wait for one another, and the training for them all."""
    os.nice(5)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    torch.set_num_threads(1)


def recording(path: Path, seed: int = 0) -> Tensor:
    """A shard as one recording of 16-bit samples, with 50 to 150 ms of silence after each sentence."""
    rng = random.Random(seed)
    with np.load(path) as file:
        sounds = torch.from_numpy(file["samples"]).split(file["lengths"].tolist())
    gaps = [torch.zeros(rng.randint(1200, 3600), dtype=torch.int16) for _ in sounds]
    return torch.cat([part for pair in zip(sounds, gaps, strict=True) for part in pair])


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sentences and their frames of codes, [T, groups] int64 each."""

    texts: list[str]
    codes: list[Tensor]

    def save(self, path: Path) -> None:
        lengths = np.array([len(each) for each in self.codes], dtype=np.int16)
        codes = torch.cat(self.codes).numpy().astype(np.int16)
        np.savez_compressed(path, texts=np.array("\n".join(self.texts)), lengths=lengths, codes=codes)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        with np.load(path) as file:
            lengths, codes = file["lengths"].tolist(), torch.from_numpy(file["codes"].astype(np.int64))
            return cls(str(file["texts"]).split("\n"), list(codes.split(lengths)))

    @property
    def hours(self) -> float:
        return sum(len(each) for each in self.codes) * FRAME / RATE / 3600


def encode(sounds: Sequence[Tensor], quantizer: Quantizer, device: torch.device, batch: int = 256) -> list[Tensor]:
    """16-bit sounds of any length to codes on the CPU, one length at a time: padding would change the encoder's norms.

    Two frames of silence follow each sound, one of them is kept.
    """
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for place, sound in enumerate(sounds):
        by_length[-(-len(sound) // FRAME)].append(place)
    found: dict[int, Tensor] = {}
    for frames, places in by_length.items():
        for start in range(0, len(places), batch):
            chosen = places[start : start + batch]
            rows = torch.zeros(len(chosen), (frames + 2) * FRAME, dtype=torch.int16)
            for row, place in zip(rows, chosen, strict=True):
                row[: len(sounds[place])] = sounds[place]
            codes = quantizer.encode(rows.to(device).float() / 32767)[:, : frames + 1].cpu()
            found.update(zip(chosen, codes, strict=True))
    return [found[place] for place in range(len(sounds))]


def collect(spoken: Sequence[Future[Path]], count: int, quantizer: Quantizer, device: torch.device) -> Corpus:
    """Waits for the speakers and encodes what they said; each sentence once, files are removed."""
    said: dict[str, Tensor] = {}
    for shard, future in enumerate(spoken):
        path = future.result()
        with np.load(path) as file:
            sounds = torch.from_numpy(file["samples"]).split(file["lengths"].tolist())
        path.unlink()
        for text, sound in zip(texts(shard, count), sounds, strict=True):
            if len(sound) <= LONGEST * FRAME:
                said.setdefault(text, sound)
    return Corpus(list(said), encode(list(said.values()), quantizer, device))
