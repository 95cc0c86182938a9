"""What a gateway is started with."""

from dataclasses import dataclass
from pathlib import Path

from omni.rpc.options import MIB
from omni.rpc.tls import ClientTls


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one gateway process; fixed while it runs."""

    coordinators: tuple[str, ...]
    """gRPC targets, "host:port"."""

    tls: ClientTls | None = None
    """Files for the connections to the coordinators; None: plain text."""

    api_keys: frozenset[str] = frozenset()
    """What ``Authorization: Bearer`` must hold for ``/v1``; empty: anybody is served."""

    allow_media_urls: bool = False
    """Whether http and https URLs in requests are fetched."""

    max_body_bytes: int = 64 * MIB
    """Longest request body."""

    heartbeat_s: float = 15.0
    """An event stream that has nothing to say sends a comment after so many seconds."""

    stalled_client_s: float = 120.0
    """A client that takes none of its stream for so many seconds has gone away."""

    first_event_s: float = 10.0
    """An event stream answers 200 after so many seconds at the latest; errors after that come as events."""


def read_api_keys(path: Path | None, env: str) -> frozenset[str]:
    """API keys of a file (one a line; blank lines and lines that begin with # do not count) and of a variable
    (separated by commas).

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no key.
    """
    keys = {key.strip() for key in env.split(",")} - {""}
    if path is not None:
        lines = {line.strip() for line in path.read_text().splitlines()}
        from_file = {line for line in lines if line and not line.startswith("#")}
        if not from_file:
            raise ValueError(f"{path} holds no API key")
        keys |= from_file
    return frozenset(keys)
