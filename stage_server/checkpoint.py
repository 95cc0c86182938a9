"""Finds the checkpoint that a stage's spec names, and says what is wrong with one that cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from omni.rpc.errors import FieldViolation, OmniError, invalid
from omni.v1 import config_pb2

ASSET = "asset:"
ASSETS = Path(__file__).parent / "assets"
WEIGHTS = "*.safetensors"
"""The only form in which weights are read: it holds no code."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By their names in a spec; the name that is not here, "auto", is the checkpoint's own or the device's best."""


def located(spec: config_pb2.StageSpec) -> config_pb2.StageSpec:
    """The spec with its checkpoint as a folder of this host: "asset:NAME" is one that is shipped.

    Raises:
        OmniError: BAD_REQUEST, when there is no such folder.
    """
    if not spec.checkpoint:
        return spec
    folder = Path(spec.checkpoint).expanduser()
    if spec.checkpoint.startswith(ASSET):
        name = spec.checkpoint.removeprefix(ASSET)
        known = sorted(each.name for each in ASSETS.iterdir())
        if name not in known:
            raise refused(f"there is no asset {name!r}; there are {', '.join(known)}")
        folder = ASSETS / name
    if not folder.is_dir():
        raise refused(f"{folder} is not a folder on this host")
    found = config_pb2.StageSpec()
    found.CopyFrom(spec)
    found.checkpoint = str(folder)
    return found


def require(folder: Path, *patterns: str) -> None:
    """Looks whether a checkpoint is whole, before libraries do, which say it in their own words.

    Args:
        folder: of the checkpoint.
        patterns: of names in it; at least one file must match each. Shards that an index of the weights names must be
            there too.

    Raises:
        OmniError: BAD_REQUEST, with the folder and what it lacks.
    """
    missing = [pattern for pattern in patterns if not any(folder.glob(pattern))]
    for index in folder.glob(f"{WEIGHTS}.index.json"):
        with readable(index):
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing += sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise refused(f"{folder} is not a whole checkpoint of this kind: it lacks {', '.join(missing)}")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what is raised over a file or folder of a checkpoint into an error that names it.

    Several libraries read the parts, and each has errors of its own.
    """
    try:
        yield
    except OmniError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())  # Some explain themselves over many lines.
        raise refused(f"{path} cannot be loaded: {type(error).__name__}: {said}") from error


def refused(description: str) -> OmniError:
    """The error of a spec with the wrong checkpoint."""
    return invalid(FieldViolation("checkpoint", description))
