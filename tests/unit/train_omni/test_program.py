"""The programs run from begin to end on a few sentences, and transformers loads and speaks what they write."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration
from typer.testing import CliRunner

from tools.train_tiny.omni.__main__ import app
from tools.train_tiny.omni.codec_encoder import FRAME, Quantizer
from tools.train_tiny.omni.evaluate import word_errors
from tools.train_tiny.omni.tokenizer import chat


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A codec that has learned nothing."""
    folder = tmp_path_factory.mktemp("codec")
    run("codec", "--out", str(folder), "--toy", "--device", "cpu")
    return folder


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_trained_codec_reads_sound_into_codes(codec: Path) -> None:
    quantizer = Quantizer.load(codec / "encoder.safetensors", 4, torch.device("cpu"))
    codes = quantizer.encode(torch.randn(2, 5 * FRAME) * 0.1)
    assert codes.shape == (2, 5, 4)
    assert 0 <= int(codes.min()) <= int(codes.max()) < 512


@pytest.mark.timeout(300)
def test_a_toy_training_writes_a_model_that_transformers_speaks_with_and_is_taken_up(
    codec: Path, tmp_path: Path
) -> None:
    arguments = ("train", "--out", str(tmp_path), "--codec", str(codec), "--toy", "--device", "cpu", "--minutes", "5")
    run(*arguments)
    spoken = (tmp_path / "state" / "corpus.npz").stat().st_mtime_ns
    steps = len(torch.load(tmp_path / "state" / "talker.pt", weights_only=True)["curve"])
    run(*arguments)
    assert (tmp_path / "state" / "corpus.npz").stat().st_mtime_ns == spoken
    assert len(torch.load(tmp_path / "state" / "talker.pt", weights_only=True)["curve"]) > steps
    assert {"model", "state", "curves.png", "result.json"} <= {each.name for each in tmp_path.iterdir()}
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["gates"]) == {"thinker_exact", "speech_closed", "speech_wer", "length_within"}
    folder = tmp_path / "model"
    assert (folder / "model.safetensors").stat().st_size < 15_000_000
    tokens = AutoTokenizer.from_pretrained(folder)
    whole = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokens.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == chat("Who are you?")
    _, sound = whole.generate(
        tokens(prompt, return_tensors="pt").input_ids,
        speaker="tiny",
        thinker_max_new_tokens=4,
        thinker_eos_token_id=tokens.eos_token_id,
        talker_max_new_tokens=5,
    )
    assert np.isfinite(sound.numpy()).all()


@pytest.mark.parametrize(
    ("heard", "errors"), [("two plus two", 0), ("two plus", 1), ("two plus a two", 1), ("too plus two", 1), ("", 3)]
)
def test_word_errors_count_what_must_change(heard: str, errors: int) -> None:
    assert word_errors("two plus two", heard) == errors
