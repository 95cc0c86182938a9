"""What the state machine of a request needs from its surroundings. No I/O happens behind these calls: they fill
buffers that a writer sends at the end of the loop's turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from omni.rpc.errors import OmniError
from omni.v1 import content_pb2, generate_pb2, stage_pb2, tensor_pb2

if TYPE_CHECKING:
    from omnid.orchestrator.request import Request
    from omnid.orchestrator.run import Run


class Replica(Protocol):
    """The command side of one replica's stream."""

    name: str
    address: tensor_pb2.ReplicaAddress

    def send(self, run: int, command: stage_pb2.RunCommand) -> None:
        """Queues a command of the run."""

    def credit(self, run: int) -> None:
        """The run may send one more output."""

    def release(self, lease: int) -> None:
        """All readers are done with one of its tensors."""

    def introduce(self, replica: Replica) -> None:
        """Tells this replica how to reach another, before handles of the other appear."""


class Client(Protocol):
    """Whoever asked. The orchestrator keeps at most two outputs of a stage under way to it."""

    def output(self, index: int, run: Run, payload: content_pb2.Payload) -> None:
        """An output event; answered by `Request.client_taken(run)` when the client has it."""

    def event(self, event: generate_pb2.RequestEvent) -> None:
        """Any other event that is not the last; `index` is set."""

    def end(self, index: int, finished: generate_pb2.RequestFinished | None, error: OmniError | None) -> None:
        """The last event: one of the two is set."""


class Surroundings(Protocol):
    """What all requests of an orchestrator share."""

    def now(self) -> float:
        """Seconds of a monotonic clock."""

    def place(self, model: str, stage: str, avoid: frozenset[str], request: Request) -> Replica | None:
        """A replica that takes one more run of the stage, if there is one not in `avoid`; else the request is told by
        `replica_ready` when there may be one.
        """

    def unplace(self, replica: Replica) -> None:
        """A run on the replica has ended."""

    def new_run(self, request: Request, run: Run) -> int:
        """A number for a run that is about to start; its events are delivered to it under this number."""

    def drop_run(self, number: int) -> None:
        """From now on events of the run are late, and dropped."""

    def lease(self, request: Request, owner: str, lease: int, readers: int) -> None:
        """A published tensor that `readers` runs are going to release."""

    def release_all(self, request: Request) -> None:
        """Frees what is left of the request's published tensors."""

    def arm(self, request: Request, due: float) -> None:
        """Calls `request.check()` no later than `due`."""

    def ended(self, request: Request) -> None:
        """The request is over; every run of it has let go or was given up."""
