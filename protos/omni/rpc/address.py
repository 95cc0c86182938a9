"""Addresses as people write them: host:port."""

import re

from omni.rpc.text import shown

_FORM = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+):(?P<port>\d+)")


def check_address(text: str) -> str:
    """The address itself; a port of 0 takes a free one.

    Raises:
        ValueError: it is none, with what is allowed.
    """
    found = _FORM.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"must be HOST:PORT with a port from 0 to 65535, got {shown(text)}")
    return text


def split_address(text: str) -> tuple[str, int]:
    """Host, without brackets, and port of an address.

    Raises:
        ValueError: as `check_address`.
    """
    host, _, port = check_address(text).rpartition(":")
    return host.strip("[]"), int(port)
