"""Addresses as people write them: host:port."""

import os
import re
import socket

from omni.rpc.text import shown


class ListenError(OSError):
    """An address that this process cannot listen on.

    Attributes:
        address: "host:port".
    """

    def __init__(self, address: str, why: OSError) -> None:
        # What asyncio says of a socket holds the address once more, in its own words.
        said = os.strerror(why.errno) if why.errno and why.errno > 0 else why.strerror
        super().__init__(f"cannot listen on {address}: {said or why}")
        self.address = address


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


def check_free(address: str) -> None:
    """Tries whether this process may listen on `address`: gRPC says why it cannot in its own log only. Of a name that
    stands for several addresses, one is enough.

    Raises:
        ListenError: it is taken, or none of this host.
    """
    host, port = split_address(address)
    why = OSError("no host has such a name")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(address, error) from error
    except UnicodeError as error:
        raise ListenError(address, why) from error
    for family, *_, bound in found:
        try:
            socket.create_server(bound[:2], family=family).close()
        except OSError as error:
            why = error
        else:
            return
    raise ListenError(address, why)
