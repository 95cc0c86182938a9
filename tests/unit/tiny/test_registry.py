"""Tiny models are made once for each version of their recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.tiny.registry import Recipe, ensure, models_folder

built: list[Path] = []


def build(folder: Path) -> None:
    built.append(folder)
    (folder / "config.json").write_text(f'{{"build": {len(built)}}}')


def broken(folder: Path) -> None:
    (folder / "config.json").write_text("half")
    raise RuntimeError("no luck")


def test_a_model_is_made_once_and_again_when_its_recipe_changes(tmp_path: Path) -> None:
    built.clear()
    recipe = Recipe("toy", 1, f"{__name__}:build")
    assert ensure(recipe, tmp_path) == ensure(recipe, tmp_path) == tmp_path / "toy"
    assert len(built) == 1
    ensure(Recipe("toy", 2, f"{__name__}:build"), tmp_path)
    assert (tmp_path / "toy" / "config.json").read_text() == '{"build": 2}'
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no luck"):
        ensure(Recipe("toy", 1, f"{__name__}:broken"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_cache_folder_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNID_CACHE", str(tmp_path))
    assert models_folder() == tmp_path / "models"
