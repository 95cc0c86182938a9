"""``omnid demo`` from nothing to its answers: the text is right, the speech is understood, the picture shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile
import torch
from PIL import Image

from omnid.demo import PICTURE, QUESTION
from tools.train_tiny.image import grammar as g
from tools.train_tiny.image.judge import judge
from tools.train_tiny.omni.codec_encoder import RATE
from tools.train_tiny.omni.evaluate import listen

BOUND_S = 90
ANSWER = "two plus three equals five"
WANTED = g.Wanted(g.TWO, shapes=(0, 1), colours=(g.COLOURS.index("red"), g.COLOURS.index("blue")), sizes=(0, 0))


def test_the_demo_leaves_a_right_answer_its_speech_and_the_picture(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "omnid.cli", "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"asked: {QUESTION}\nheard: {ANSWER} (" in ended.stdout
    assert (tmp_path / "answer.txt").read_text() == f"{ANSWER}\n"
    sound, rate = soundfile.read(tmp_path / "answer.wav", dtype="float32")
    assert rate == RATE
    assert listen(sound)[1] == ANSWER
    assert g.sentence(WANTED) == PICTURE
    pixels = torch.from_numpy(np.asarray(Image.open(tmp_path / "picture.png").convert("RGB")).copy())
    assert judge(pixels.permute(2, 0, 1).float() / 127.5 - 1, WANTED).every
