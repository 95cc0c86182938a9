"""One run of the training: what is done in which order, and what is kept so that it can be taken up again."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from tools.train_tiny import curves
from tools.train_tiny.omni import (
    codec,
    evaluate,
    language,
    model,
    network,
    packing,
    speech,
    talker,
    thinker,
    tokenizer,
)
from tools.train_tiny.omni.codec_encoder import RATE, Quantizer
from tools.train_tiny.omni.evaluate import Sound
from tools.train_tiny.omni.vocabulary import HELD_OUT_SENTENCES
from tools.train_tiny.optimize import Training, console

JUDGING = 40.0
"""Seconds that are left for writing the model and judging it."""
VOICES = {"default": model.TALKER_SAMPLING, "sampled": {"temperature": 0.4, "top_k": 10}}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is made and how much of it goes into a step."""

    conversations: int
    """Shards of them."""
    sentences: int
    """Shards of spoken sentences."""
    recordings: int
    """The same for the codec, which needs fewer."""
    shard: int
    """Sentences, and ten times as many conversations, in a shard."""
    rows: int
    length: int
    """Positions a row; a step has `rows` of them."""
    most_steps: int | None = None
    thinker_rate: float = 2e-3
    talker_rate: float = 2e-3
    judged: int = len(HELD_OUT_SENTENCES)
    """Held-out sentences that are spoken in the end."""
    frames: int = 120
    """After which such a sentence is cut, 9.6 s."""
    asked: int | None = None
    """Held-out questions that are asked in the end; all when none is said."""


FULL = Size(conversations=120, sentences=280, recordings=45, shard=250, rows=192, length=256)
TOY = Size(
    conversations=1, sentences=1, recordings=1, shard=12, rows=3, length=256, most_steps=3, judged=2, frames=8, asked=4
)


@dataclass(frozen=True, slots=True)
class Paths:
    """Where things lie."""

    out: Path
    codec: Path

    @property
    def model(self) -> Path:
        return self.out / "model"

    @property
    def state(self) -> Path:
        return self.out / "state"

    @property
    def corpus(self) -> Path:
        return self.state / "corpus.npz"

    @property
    def teacher(self) -> Path:
        return self.state / "teacher.npz"

    def load_teacher(self) -> list[Sound]:
        """The held-out sentences in the teacher's voice."""
        return _load_sounds(self.teacher)


def _save_sounds(path: Path, sounds: Sequence[Sound]) -> None:
    lengths = np.array([len(sound) for sound in sounds])
    samples = (np.clip(np.concatenate(sounds), -1, 1) * 32767).astype(np.int16)
    np.savez_compressed(path, lengths=lengths, samples=samples)


def _load_sounds(path: Path) -> list[Sound]:
    with np.load(path) as file:
        return np.split(file["samples"].astype(np.float32) / 32767, np.cumsum(file["lengths"])[:-1])


def _say_held_out() -> list[Sound]:
    return [speech.teacher().say(text) for text in HELD_OUT_SENTENCES]


def train(
    paths: Paths,
    size: Size,
    workers: Executor,
    device: torch.device,
    *,
    begin: float,
    seconds: float,
    thinker_seconds: float,
) -> None:
    """Trains all, `seconds` from `begin` on, and judges the result."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    paths.state.mkdir(parents=True, exist_ok=True)
    tokens = tokenizer.make()
    whole = model.build(tokens).to(device)
    model.load_code2wav(whole, paths.codec / "code2wav")
    with tempfile.TemporaryDirectory(prefix="speech-") as scratch:
        asked = 0 if (paths.state / "thinker.pt").exists() else size.conversations
        made = workers.map(partial(thinker.conversations, count=10 * size.shard), range(asked))
        held_out = None if paths.teacher.exists() else workers.submit(_say_held_out)
        shards = 0 if paths.corpus.exists() else size.sentences
        spoken = speech.begin(workers, shards, size.shard, Path(scratch))
        _train_thinker(paths, size, whole, tokens, made, time.monotonic() + thinker_seconds, device)
        if not paths.corpus.exists():
            quantizer = Quantizer.load(paths.codec / "encoder.safetensors", model.CODE_GROUPS, device)
            corpus = speech.collect(spoken, size.shard, quantizer, device)
            corpus.save(paths.corpus)
            console.print(
                f"speech: {len(corpus.texts)} sentences, {corpus.hours:.1f} h, {time.monotonic() - begin:.0f} s"
            )
        if held_out is not None:
            _save_sounds(paths.teacher, held_out.result())
    until = begin + seconds - JUDGING
    _train_talker(paths, size, whole, tokens, speech.Corpus.load(paths.corpus), until, device)
    model.save(whole, tokens, paths.model)
    _draw(paths)
    judge(paths, workers, device, size)


def train_codec(out: Path, size: Size, workers: Executor, device: torch.device, seconds: float) -> None:
    """Speaks sentences, trains the codec on them and draws its curve."""
    with tempfile.TemporaryDirectory(prefix="speech-") as scratch:
        paths = [future.result() for future in speech.begin(workers, size.recordings, size.shard, Path(scratch))]
        samples = torch.cat([speech.recording(path) for path in paths]).to(device)
    console.print(f"codec: {len(samples) / RATE / 3600:.2f} h")
    plan = codec.Plan(seconds=seconds)
    if size.most_steps:
        plan = replace(plan, batch=2, frames=12, crop=6_000, latents=600, most_steps=size.most_steps)
    curves.draw({"codec": codec.train(samples, plan, out)}, out / "codec.png")


def _train_thinker(
    paths: Paths,
    size: Size,
    whole: Qwen3OmniMoeForConditionalGeneration,
    tokens: Any,
    made: Any,
    until: float,
    device: torch.device,
) -> None:
    part = whole.thinker
    for encoder in (part.audio_tower, part.visual):  # nothing is seen or heard in training
        encoder.requires_grad_(False)
    training = Training("thinker", part, rate=size.thinker_rate)
    if not training.resume(paths.state):
        conversations = list(itertools.chain.from_iterable(made))
        data = thinker.data(tokens, conversations, device)
        console.print(f"thinker: {len(conversations)} conversations, {int(data.lengths.sum())} tokens")
        asked = [thinker.Conversation(tokenizer.chat(each.question), each.answer) for each in language.held_out()]
        batches = packing.batches(data, size.rows, size.length, seed=0)
        judged = packing.whole(thinker.data(tokens, asked, device), 128)
        layer = network.fastest(device, lambda one: training.attempt(next(batches), thinker.ThinkerLoss(one)))
        training.run(
            batches,
            thinker.ThinkerLoss(layer),
            until=until,
            most_steps=size.most_steps,
            check=lambda averaged: {"held_out": thinker.exact(averaged, judged)},
        )
        training.save(paths.state)
    part.load_state_dict(training.average.state_dict())
    part.requires_grad_(False)
    for weights in part.parameters():  # the talker shall learn the embeddings that will be in the checkpoint
        weights.copy_(weights.bfloat16())


def _train_talker(
    paths: Paths,
    size: Size,
    whole: Qwen3OmniMoeForConditionalGeneration,
    tokens: Any,
    corpus: speech.Corpus,
    until: float,
    device: torch.device,
) -> None:
    part = whole.talker
    part.hidden_projection.requires_grad_(False)  # for pictures and recordings only
    training = Training("talker", part, rate=size.talker_rate)
    training.resume(paths.state)
    layout = talker.Layout(whole.config, tokens)
    questions = talker.prompts_for(corpus.texts, seed=0)
    kept = max(1, len(corpus.texts) // 100)  # the last hundredth is watched, not learned
    data = talker.data(layout, corpus.texts[:-kept], questions[:-kept], corpus.codes[:-kept], device)
    watched = talker.data(layout, corpus.texts[-kept:], questions[-kept:], corpus.codes[-kept:], device)
    console.print(f"talker: {len(data.lengths)} sentences, {int(data.lengths.sum())} positions")
    words = whole.thinker.get_input_embeddings().weight.detach()
    batches = packing.batches(data, size.rows, size.length, seed=1 + training.step)
    check = packing.whole(watched, size.length)
    loss = partial(talker.TalkerLoss, words, seed=training.step)
    layer = network.fastest(device, lambda one: training.attempt(next(batches), loss(one)))

    @torch.no_grad()
    def measure(averaged: Any) -> dict[str, float]:
        _, parts = talker.TalkerLoss(words, network.decoder_layer, noise=0.0)(averaged, check)
        return {f"watched_{name}": float(value) for name, value in parts.items() if name.startswith("code")}

    training.run(batches, loss(layer), until=until, most_steps=size.most_steps, check=measure)
    training.save(paths.state)
    part.load_state_dict(training.average.state_dict())


def _draw(paths: Paths) -> None:
    found = {}
    for name in ("thinker", "talker"):
        found[name] = torch.load(paths.state / f"{name}.pt", map_location="cpu", weights_only=True)["curve"]
    curves.draw(found, paths.out / "curves.png")


def judge(paths: Paths, workers: Executor, device: torch.device, size: Size = FULL) -> None:
    """Judges the written checkpoint and writes result.json and what it said."""
    begin = time.monotonic()
    whole, tokens = evaluate.load(paths.model, device)
    exact, wrong = evaluate.thinker_exact(whole, tokens, size.asked)
    teacher = paths.load_teacher()[: size.judged]
    voices: dict[str, evaluate.Voice] = {}
    for name, sampling in VOICES.items():
        voices[name], sounds = evaluate.voice(whole, tokens, teacher, sampling, size.frames)
        _save_sounds(paths.out / f"said-{name}.npz", sounds)
        if evaluate.can_listen():
            evaluate.judge(voices[name], sounds, workers)
    found = evaluate.report(paths.out, exact, wrong, voices)
    shown = {name: value for name, value in found.items() if name not in ("wrong", "voices", "sampling")}
    console.print(json.dumps(shown))
    for name, each in voices.items():
        mean = sum(each.lengths) / len(each.lengths)
        console.print(
            f"{name}: closed {each.closed}, wer {each.wer}, said {each.said}, mean length {mean:.2f}, "
            f"within {each.length_within:.2f}, loudest {each.loudest:.2f}"
        )
    for each in wrong[:15]:
        console.print(each)
    console.print(f"judged in {time.monotonic() - begin:.0f} s")
