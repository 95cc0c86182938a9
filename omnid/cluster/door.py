"""Where stage servers join the coordinator, and with which arguments."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass, field

from omni.v1 import config_pb2

_EVERYWHERE = frozenset({"0.0.0.0", "[::]"})
_HERE = frozenset({"", "localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Door:
    """The coordinator as stage servers find it.

    Attributes:
        address: what it listens on, "host:port".
        tls: arguments of a stage server for its TLS files.
        host: name of the coordinator's host.
    """

    address: str
    tls: tuple[str, ...] = ()
    host: str = field(default_factory=socket.gethostname)

    def is_here(self, placement: config_pb2.Placement, index: int) -> bool:
        """Whether a replica belongs on the coordinator's host."""
        return _host(placement, index) in (*_HERE, self.host)

    def arguments(self, model: str, placement: config_pb2.Placement, index: int) -> tuple[str, ...]:
        """Of the stage server of a replica, on the host where it belongs."""
        place = ("--model", model, "--stage", placement.stage, "--index", str(index), *self.tls)
        if self.is_here(placement, index):
            return ("--coordinator", self._reached("127.0.0.1"), *place)
        reached = ("--listen", "0.0.0.0:0", "--advertise", _host(placement, index))
        return ("--coordinator", self._reached(self.host), *reached, *place)

    def command(self, model: str, placement: config_pb2.Placement, index: int) -> str:
        """The command line that starts a replica by hand."""
        return shlex.join(("stage-server", *self.arguments(model, placement, index)))

    def _reached(self, host: str) -> str:
        """An address to connect to: one that listens everywhere is reached by `host`."""
        listens, _, port = self.address.rpartition(":")
        return f"{host}:{port}" if listens in _EVERYWHERE else self.address


def _host(placement: config_pb2.Placement, index: int) -> str:
    return placement.hosts[index] if index < len(placement.hosts) else ""
