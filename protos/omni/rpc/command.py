"""Options that the commands of several processes have: looked at before anything is started."""

import argparse
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from omni.rpc import logs
from omni.rpc.text import shown

T = TypeVar("T")


def argument(check: Callable[[str], T]) -> Callable[[str], T]:
    """`check` as argparse's ``type``: argparse itself hides what a ValueError says."""

    def checked(text: str) -> T:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """A check of whole numbers from `least` to `most`, both allowed."""

    def check(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 20 and least <= int(text) <= most):
            raise ValueError(f"must be a whole number from {least} to {most}, got {shown(text)}")
        return int(text)

    return check


def writable_descriptor(number: int | str) -> int:
    """The number of a descriptor that whoever started this process has opened for writing.

    Raises:
        ValueError: it is none.
    """
    try:
        mode = fcntl.fcntl(int(number), fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError, ValueError):
        raise ValueError(f"must be a descriptor that is open, got {shown(number)}") from None
    if mode == os.O_RDONLY:
        raise ValueError(f"must be a descriptor that is open for writing, got {number}, which is for reading")
    return int(number)


def add_tls(parser: argparse.ArgumentParser, ca: str) -> None:
    """Adds the options of TLS files; `ca` says what giving a CA means."""
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help=ca)
    parser.add_argument("--tls-cert", type=Path, metavar="FILE")
    parser.add_argument("--tls-key", type=Path, metavar="FILE")


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `logs.configure`."""
    parser.add_argument("--log-format", choices=logs.FORMATS, default="console")
    parser.add_argument("--log-level", default="INFO", type=str.upper, choices=logs.LEVELS)
