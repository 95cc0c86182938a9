"""Judges a trained model by what transformers' own generate makes of it.

The thinker by exact answers to 200 held-out questions. The voice by 30 held-out sentences, which it is asked to say:
pocketsphinx must pick each from the closed list of all thirty, and its open recognition gives a word error rate.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

from tools.train_tiny.omni import language
from tools.train_tiny.omni.codec_encoder import RATE
from tools.train_tiny.omni.model import SPEAKER, TALKER_SAMPLING
from tools.train_tiny.omni.tokenizer import chat
from tools.train_tiny.omni.vocabulary import HELD_OUT_SENTENCES

GATES = {"thinker_exact": 0.95, "speech_closed": 27, "speech_wer": 0.30, "length_within": 0.30}
RECOGNIZER_RATE = 16_000

Sound = NDArray[np.float32]


@dataclass(slots=True)
class Voice:
    """What one way of sampling sounds like."""

    sampling: dict[str, float]
    lengths: list[float]
    """Of each sentence over the teacher's."""
    loudest: float
    """Largest sample; 1 is where sound is clipped."""
    said: int
    """Sentences that the thinker gave to the talker word for word."""
    closed: int | None = None
    wer: float | None = None
    heard: list[str] = field(default_factory=list)

    @property
    def length_within(self) -> float:
        """The departure from the teacher's length that nine in ten sentences keep within."""
        departures = sorted(abs(length - 1) for length in self.lengths)
        return departures[int(0.9 * (len(departures) - 1))]


def load(folder: Path, device: torch.device) -> tuple[Qwen3OmniMoeForConditionalGeneration, Any]:
    """A model in float32 and its tokenizer."""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder, padding_side="left")


def _prompts(tokenizer: Any, questions: Sequence[str], device: torch.device) -> dict[str, torch.Tensor]:
    found = tokenizer([chat(question) for question in questions], return_tensors="pt", padding=True)
    return {name: found[name].to(device) for name in ("input_ids", "attention_mask")}


def answers(model: Qwen3OmniMoeForConditionalGeneration, tokenizer: Any, questions: Sequence[str]) -> list[str]:
    """The thinker's greedy answers."""
    prompts = _prompts(tokenizer, questions, model.device)
    ids = model.generate(
        **prompts,
        return_audio=False,
        thinker_max_new_tokens=48,
        thinker_eos_token_id=tokenizer.eos_token_id,
        thinker_pad_token_id=tokenizer.pad_token_id,
        thinker_do_sample=False,
    )
    ids = getattr(ids, "sequences", ids)[:, prompts["input_ids"].shape[1] :]
    return [str(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def speak(
    model: Qwen3OmniMoeForConditionalGeneration,
    tokenizer: Any,
    questions: Sequence[str],
    sampling: dict[str, float],
    frames: int,
) -> tuple[list[str], list[Sound]]:
    """Answers with their sound of at most so many frames; greedy where the temperature is 0.

    One by one: in a batch, generate hands what pads a shorter answer to the talker too, which says it.
    """
    how: dict[str, Any] = {"talker_repetition_penalty": sampling.get("repetition_penalty", 1.0)}
    if sampling["temperature"] > 0:
        names = ("temperature", "top_k", "top_p")
        how |= {"talker_do_sample": True} | {f"talker_{name}": sampling[name] for name in names if name in sampling}
    else:
        how |= {"talker_do_sample": False}
    torch.manual_seed(0)
    texts, sounds = [], []
    for question in questions:
        prompt = _prompts(tokenizer, [question], model.device)
        ids, made = model.generate(
            **prompt,
            speaker=SPEAKER,
            thinker_max_new_tokens=48,
            thinker_eos_token_id=tokenizer.eos_token_id,
            thinker_pad_token_id=tokenizer.pad_token_id,
            thinker_do_sample=False,
            talker_max_new_tokens=frames,
            **how,
        )
        texts.append(str(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)))
        sounds.append(made[0].reshape(-1).float().cpu().numpy())
    return texts, sounds


def thinker_exact(
    model: Qwen3OmniMoeForConditionalGeneration, tokenizer: Any, most: int | None = None
) -> tuple[float, list[dict[str, str]]]:
    """Share of held-out questions (the first `most`) answered word for word, and the others."""
    asked = language.held_out()[:most]
    given = answers(model, tokenizer, [each.question for each in asked])
    wrong = [
        {"skill": each.skill, "question": each.question, "answer": answer, "wanted": each.answer}
        for each, answer in zip(asked, given, strict=True)
        if answer != each.answer
    ]
    return 1 - len(wrong) / len(asked), wrong


def voice(
    model: Qwen3OmniMoeForConditionalGeneration,
    tokenizer: Any,
    teacher: Sequence[Sound],
    sampling: dict[str, float],
    frames: int,
) -> tuple[Voice, list[Sound]]:
    """The first held-out sentences, as many as the teacher has, as the model says them, each after "say"."""
    sentences = HELD_OUT_SENTENCES[: len(teacher)]
    texts, sounds = speak(model, tokenizer, [f"say {text}" for text in sentences], sampling, frames)
    lengths = [len(sound) / len(other) for sound, other in zip(sounds, teacher, strict=True)]
    said = sum(text == wanted for text, wanted in zip(texts, sentences, strict=True))
    loudest = max(float(np.abs(sound).max(initial=0)) for sound in sounds)
    return Voice(sampling, lengths, loudest, said), sounds


def can_listen() -> bool:
    """Whether the recognizer is installed."""
    return importlib.util.find_spec("pocketsphinx") is not None and importlib.util.find_spec("soxr") is not None


@cache
def _recognizers() -> tuple[Any, Any]:
    """Free recognition, and the choice among the held-out sentences."""
    from pocketsphinx import Config, Decoder

    free = Decoder(Config(loglevel="FATAL", samprate=RECOGNIZER_RATE))
    closed = Decoder(Config(loglevel="FATAL", samprate=RECOGNIZER_RATE))
    grammar = f"#JSGF V1.0;\ngrammar held;\npublic <sentence> = {' | '.join(HELD_OUT_SENTENCES)} ;\n"
    closed.add_jsgf_string("held", grammar)
    closed.activate_search("held")
    return free, closed


def listen(sound: Sound) -> tuple[str, str]:
    """What is heard freely, and which held-out sentence it is taken for."""
    import soxr

    resampled = soxr.resample(sound.astype(np.float64), RATE, RECOGNIZER_RATE)
    padded = np.concatenate([np.zeros(4000), resampled, np.zeros(4000)])
    samples = (np.clip(padded / max(1e-9, np.abs(padded).max()) * 0.7, -1, 1) * 32767).astype(np.int16).tobytes()
    heard = []
    for recognizer in _recognizers():
        recognizer.start_utt()
        recognizer.process_raw(samples, no_search=False, full_utt=True)
        recognizer.end_utt()
        found = recognizer.hyp()
        heard.append(" ".join(word.partition("(")[0] for word in found.hypstr.split()) if found else "")
    return heard[0], heard[1]


def word_errors(wanted: str, heard: str) -> int:
    """Words to insert, leave out or exchange."""
    target = heard.split()
    row = list(range(len(target) + 1))
    for place, word in enumerate(wanted.split(), 1):
        above, row[0] = row[:], place
        for column, other in enumerate(target, 1):
            row[column] = min(above[column] + 1, row[column - 1] + 1, above[column - 1] + (word != other))
    return row[-1]


def judge(found: Voice, sounds: Sequence[Sound], workers: Executor) -> None:
    """Listens to the held-out sentences and writes down how well they are understood."""
    sentences = HELD_OUT_SENTENCES[: len(sounds)]
    heard = list(workers.map(listen, sounds))
    found.heard = [free for free, _ in heard]
    found.closed = sum(closed == wanted for (_, closed), wanted in zip(heard, sentences, strict=True))
    errors = sum(word_errors(wanted, free) for (free, _), wanted in zip(heard, sentences, strict=True))
    found.wer = errors / sum(len(wanted.split()) for wanted in sentences)


def report(folder: Path, exact: float, wrong: list[dict[str, str]], voices: dict[str, Voice]) -> dict[str, Any]:
    """Writes result.json; the stage's defaults, `TALKER_SAMPLING`, count for the gates."""
    chosen = voices["default"]
    found: dict[str, Any] = {
        "thinker_exact": exact,
        "speech_closed": chosen.closed,
        "speech_wer": chosen.wer,
        "length_within": chosen.length_within,
        "clipped": chosen.loudest >= 0.999,
        "gates": GATES,
        "sampling": TALKER_SAMPLING,
        "voices": {name: asdict(each) | {"length_within": each.length_within} for name, each in voices.items()},
        "wrong": wrong,
    }
    (folder / "result.json").write_text(json.dumps(found, indent=2) + "\n")
    return found
