"""What the command's options may be: looked at before anything is started, and refused under the option's own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

from omni.rpc import command, logs
from omni.rpc.address import check_address

T = TypeVar("T")


def address(text: str | None) -> str | None:
    """HOST:PORT."""
    return _checked(check_address, text)


def writable_descriptor(number: int | None) -> int | None:
    """A descriptor that whoever started this process has opened for writing."""
    return _checked(command.writable_descriptor, number)


def modalities(names: list[str] | None) -> list[str] | None:
    """Names of modalities."""
    from omni.rpc.text import MODALITIES

    for name in names or ():
        if name not in MODALITIES:
            raise typer.BadParameter(f"must be any of {', '.join(MODALITIES)}, got {name!r}")
    return names


def log_format(name: str) -> str:
    """How logs are written."""
    if name not in logs.FORMATS:
        raise typer.BadParameter(f"must be one of {', '.join(logs.FORMATS)}, got {name!r}")
    return name


def log_level(name: str) -> str:
    """Least level of logs."""
    if name.upper() not in logs.LEVELS:
        raise typer.BadParameter(f"must be one of {', '.join(logs.LEVELS)}, got {name!r}")
    return name.upper()


def _checked(check: Callable[[T], T], given: T | None) -> T | None:
    """What `check` makes of an option that was given; its ValueError under the option's name."""
    try:
        return None if given is None else check(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
