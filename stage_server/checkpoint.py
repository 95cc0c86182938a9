"""Finds the checkpoint that a stage's spec names."""

from __future__ import annotations

from pathlib import Path

from omni.rpc.errors import FieldViolation, OmniError, invalid
from omni.v1 import config_pb2

ASSET = "asset:"
ASSETS = Path(__file__).parent / "assets"


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
            raise _refused(f"there is no asset {name!r}; there are {', '.join(known)}")
        folder = ASSETS / name
    if not folder.is_dir():
        raise _refused(f"{folder} is not a folder on this host")
    found = config_pb2.StageSpec()
    found.CopyFrom(spec)
    found.checkpoint = str(folder)
    return found


def _refused(description: str) -> OmniError:
    return invalid(FieldViolation("checkpoint", description))
