"""The tiny image model's program: pictures, captions and judge agree, and the training of a toy runs to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tools.train_tiny.image import grammar as g
from tools.train_tiny.image import networks
from tools.train_tiny.image.__main__ import app
from tools.train_tiny.image.captions import LENGTH, Captions, make_tokenizer, tokenize
from tools.train_tiny.image.drawing import draw
from tools.train_tiny.image.judge import judge
from tools.train_tiny.image.sampling import sample

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", range(len(g.KINDS)), ids=g.KINDS)


@KINDS
def test_the_judge_finds_in_a_drawn_picture_what_was_drawn_and_nothing_else(kind: int) -> None:
    torch.manual_seed(kind)
    draws = sample(kind, 40, CPU)
    pictures = draw(draws, 128)
    assert all(judge(picture, draws.wanted(row)).every for row, picture in enumerate(pictures))
    strangers = [judge(pictures[row - 1], draws.wanted(row)).every for row in range(40)]
    assert sum(strangers) <= 4


@KINDS
@pytest.mark.parametrize("variant", range(3))
def test_captions_made_in_a_batch_are_those_that_the_tokenizer_makes(kind: int, variant: int) -> None:
    tokenizer = make_tokenizer()
    draws = sample(kind, 40, CPU)
    draws.variant = variant
    ids, valid = Captions(tokenizer, CPU)(draws, dropped=0)
    texts = [g.sentence(draws.wanted(row), g.TEMPLATES[kind][int(draws.template[row])], variant) for row in range(40)]
    expected, there = tokenize(tokenizer, texts, CPU)
    assert ids.equal(expected)
    assert valid.equal(there)


def test_held_out_pairs_are_on_no_picture_of_training() -> None:
    torch.manual_seed(0)
    for kind, pairs in ((g.TWO, [(0, 1)]), (g.THREE, [(0, 1), (0, 2), (1, 2)])):
        draws = sample(kind, 2000, CPU)
        for row in range(2000):
            wanted = draws.wanted(row)
            things = list(zip(wanted.colours, wanted.shapes, strict=True))
            assert not any(g.held_out(things[first], things[second]) for first, second in pairs)
    draws = sample(g.TWO, 100, CPU, held_out=True)
    for row in range(100):
        wanted = draws.wanted(row)
        assert g.held_out(*zip(wanted.colours, wanted.shapes, strict=True))


def test_the_forward_pass_of_training_is_the_models_own() -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    painter = networks.build(tokenizer, 32).painter.eval()
    for weights in painter.parameters():
        torch.nn.init.normal_(weights, std=0.1)
    texts = ["a red circle", "a small blue star above a green cross on a white background"]
    ids, valid = tokenize(tokenizer, texts, CPU)
    latents, sigma = torch.randn(2, networks.CHANNELS, 16, 16), torch.tensor([0.3, 0.8])
    with torch.no_grad():
        found = painter(latents, sigma, ids, valid)
        hidden = painter.text(input_ids=ids, attention_mask=valid.long(), output_hidden_states=True).hidden_states[-2]
        captions = [rows[there] for rows, there in zip(hidden, valid, strict=True)]
        own = painter.transformer([each[:, None] for each in latents], 1 - sigma, captions)[0]
    assert torch.allclose(found, -torch.stack(own)[:, :, 0], atol=1e-5)


def test_every_sentence_fits_and_is_made_of_known_words() -> None:
    tokenizer = make_tokenizer()
    for kind in range(len(g.KINDS)):
        draws = sample(kind, 50, CPU)
        for row in range(50):
            for template in g.TEMPLATES[kind]:
                _, valid = tokenize(tokenizer, [g.sentence(draws.wanted(row), template)], CPU)
                assert int(valid.sum()) <= LENGTH
                words = g.sentence(draws.wanted(row), template).replace(",", " ,").replace(".", " .").split()
                assert int(valid.sum()) == len(words) + 2


def test_a_toy_is_trained_saved_drawn_with_and_trained_on(tmp_path: Path) -> None:
    from diffusers import ZImagePipeline

    asked = ["train", "--out", str(tmp_path), "--toy", "--device", "cpu", "--minutes", "1", "--vae-seconds", "20"]
    for _ in range(2):
        ran = CliRunner().invoke(app, asked, catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
    figures = json.loads((tmp_path / "result.json").read_text())
    assert set(figures) >= {"one", "two", "unseen", "three", "count", "digit"}
    assert (tmp_path / "curves.png").stat().st_size > 0
    pipeline = ZImagePipeline.from_pretrained(tmp_path / "model", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline("a red circle", height=32, width=32, num_inference_steps=2, guidance_scale=1.0).images[0]
    assert picture.size == (32, 32)
