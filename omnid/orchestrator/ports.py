"""What the state machine needs from outside, and the plain types that pass between them.

Payloads, prompts, usage and timings are opaque here: they are handed on as they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from omnid.orchestrator.plan import EdgePlan, StagePlan
    from omnid.orchestrator.request import Request
    from omnid.orchestrator.run import Chunk, Run

STOP, LENGTH, CANCELLED = 1, 2, 3
"""Numbers of omni.v1.FinishReason."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed: a row of the error table, and where."""

    reason: str
    """Name of an `omni.rpc.errors.Reason`."""
    message: str
    stage: str = ""
    replica: str = ""
    cause: object = None
    """The stage's own error, opaque here."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """Whether a run of a cancelled request has let go."""

    stage: str
    role: str
    replica: str
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class StageEnd:
    """How a stage's main run ended."""

    stage: str
    reason: int
    usage: Any
    timings: Any


@dataclass(slots=True)
class Times:
    """By the coordinator's clock, in seconds; 0: has not happened."""

    created: float
    first_start: float = 0.0
    first_output: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended well, or was cancelled."""

    reason: int
    stages: Sequence[StageEnd]
    times: Times


class Link(Protocol):
    """A replica that takes commands. None of these calls blocks; order is kept."""

    name: str
    """Replica name, "tiny-omni/thinker/0"."""
    runs: dict[int, Run]
    """By number: those whose events are awaited. The request adds and removes its own."""
    credits: list[int]
    """Numbers of runs to be credited, one entry an output that was forwarded. `wake` sends them."""
    refusing: bool
    """It has turned a run away: it is not to be chosen before it says anew how it does."""

    def wake(self) -> None: ...
    def start(self, run: Run, timeout: float) -> None: ...
    def input(self, run: Run, source: Run, chunk: Chunk, edge: EdgePlan) -> None: ...
    def input_end(self, run: Run, source: Run, count: int, reason: int) -> None: ...
    def cancel(self, number: int, reason: str) -> None: ...


class Client(Protocol):
    """Who gets the events of a request, in their order; `index` counts them from 0."""

    def accepted(self, index: int, request_id: str) -> None: ...
    def output(self, index: int, stage: str, payload: Any) -> None: ...
    def stage_finished(self, index: int, end: StageEnd) -> None: ...
    def finished(self, index: int, end: RequestEnd) -> None: ...
    def failed(self, index: int, failure: Failure) -> None: ...


class Trace(Protocol):
    """The span of a request."""

    @property
    def traceparent(self) -> str:
        """W3C trace context for what is done for the request, or ""."""

    def end(self, attributes: Mapping[str, str]) -> None:
        """The request has ended."""


class Router(Protocol):
    """Finds replicas."""

    def route(self, stage: StagePlan) -> Link | None:
        """The replica that is to take the next run of `stage`; None: none can just now."""

    def release(self, owner: str, lease: int) -> None:
        """Tells the owner of a tensor that it may free it."""

    def missing(self, stage: StagePlan) -> str:
        """Why `route` has no answer, for people; "" when there are replicas but all are full."""


class Observer(Protocol):
    """Counts what happens, for metrics."""

    def fenced(self, events: int) -> None:
        """Events came for runs that are no longer awaited."""

    def taken(self, edge: str, seconds: float) -> None:
        """A consumer has taken a chunk this long after its producer handed it over."""

    def ended(self, request: Request) -> None:
        """A request has ended, with its failure or without."""
