"""What the command's options may be: looked at before anything is started, and refused under the option's own name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

import typer

from omni.rpc.address import check_address


def address(text: str | None) -> str | None:
    """HOST:PORT."""
    try:
        return text and check_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def writable_descriptor(number: int | None) -> int | None:
    """A descriptor that whoever started this process has opened for writing."""
    if number is None:
        return None
    try:
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError, OverflowError):
        raise typer.BadParameter(f"must be a descriptor that is open, got {number}") from None
    if mode == os.O_RDONLY:
        raise typer.BadParameter(f"must be a descriptor that is open for writing, got {number}, which is for reading")
    return number


def writable_folder(path: Path) -> Path:
    """A folder that files can be saved in, or that can be made. None is left behind that was not there before."""
    made: list[Path] = []
    try:
        for each in reversed([path, *path.parents]):
            if not each.exists():
                each.mkdir()
                made.append(each)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise typer.BadParameter(f"must be a folder that can be written, got {str(path)!r}: {error.strerror}") from None
    finally:
        for each in reversed(made):
            with contextlib.suppress(OSError):
                each.rmdir()
    return path


def modalities(names: list[str] | None) -> list[str] | None:
    """Names of modalities."""
    from omni.rpc.text import MODALITIES

    for name in names or ():
        if name not in MODALITIES:
            raise typer.BadParameter(f"must be any of {', '.join(MODALITIES)}, got {name!r}")
    return names


def log_format(name: str) -> str:
    """How logs are written."""
    if name not in ("console", "json"):
        raise typer.BadParameter(f"must be console or json, got {name!r}")
    return name


def log_level(name: str) -> str:
    """Least level of logs."""
    from omni.rpc import logs

    if name.upper() not in logs.LEVELS:
        raise typer.BadParameter(f"must be one of {', '.join(logs.LEVELS)}, got {name!r}")
    return name.upper()
