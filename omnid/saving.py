"""Where answers are saved: a folder is tried before anything is asked, and a file is whole or is not there."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import typer


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


def save(path: Path, data: bytes | bytearray) -> None:
    """Writes a file, and its folder where there is none.

    Raises:
        OSError: with the file's name; nothing of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_bytes(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
