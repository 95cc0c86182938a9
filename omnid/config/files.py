"""Finds pipeline and deploy files: shipped ones by name, others by path."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path as FilePath

from omni.rpc.text import shown
from omnid.config import document
from omnid.config.deploy import DeployConfig
from omnid.config.errors import ConfigError, Place, Problem, nearest
from omnid.config.pipeline import PipelineConfig, read_pipeline
from omnid.config.section import check

_PACKAGE = FilePath(__file__).resolve().parent.parent
_SUFFIXES = (".yaml", ".yml")


def shipped_pipelines() -> list[str]:
    return _shipped("pipelines")


def shipped_deploys() -> list[str]:
    return _shipped("deploys")


def shipped_assets() -> list[str]:
    """Models that come with the stage server, which is looked for and not imported."""
    found = find_spec("stage_server")
    folders = found.submodule_search_locations if found else None
    return sorted(each.name for folder in folders or () for each in FilePath(folder, "assets").iterdir())


def load_pipeline(name_or_path: str, folder: FilePath | None = None) -> PipelineConfig:
    """Reads a shipped pipeline, or one of your own; a relative path starts at `folder`, else at the current one.

    Raises:
        FileNotFoundError: there is none; the message says which are shipped.
        ConfigError: with every mistake in it.
    """
    return read_pipeline(document.read(_find("pipelines", name_or_path, folder)))


def load_deploy(name_or_path: str) -> DeployConfig:
    """Reads a shipped deployment, or one of your own.

    Raises:
        ConfigError: there is none, or with every mistake in it.
    """
    try:
        file = _find("deploys", name_or_path, None)
    except FileNotFoundError as error:
        raise ConfigError([Problem(Place(name_or_path), (), str(error))]) from None
    source = document.read(file)
    config = check(DeployConfig, source)
    config._document = source
    return config


def _shipped(kind: str) -> list[str]:
    return sorted(file.stem for file in (_PACKAGE / kind).glob("*.yaml"))


def _find(kind: str, name_or_path: str, folder: FilePath | None) -> FilePath:
    if "/" not in name_or_path and not name_or_path.endswith(_SUFFIXES):
        if name_or_path in (known := _shipped(kind)):
            return _PACKAGE / kind / f"{name_or_path}.yaml"
        hint = nearest(name_or_path, known)
        raise FileNotFoundError(f"got {shown(name_or_path)}, which is not shipped; {hint}, or the path of a YAML file")
    file = document.locate(folder or FilePath(), name_or_path)
    with contextlib.suppress(OSError):  # Of names that no file system takes.
        if file.is_file():
            return file
    raise FileNotFoundError(f"got {shown(name_or_path)}; no such file")
