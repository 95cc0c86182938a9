"""The interface between a session and an engine.

An engine knows no gRPC and no transport. It is given runs, feeds them inputs, and hands what a step made for all its
runs to one `deliver` call. Tensors in outputs are plain torch tensors: the session publishes them when the reader has
credit, so whatever is made meanwhile merges and is published once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from omni.rpc.errors import OmniError

if TYPE_CHECKING:
    import torch

    from omni.v1 import config_pb2, content_pb2


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine is told when a run begins."""

    id: int
    """Unique in this process, never used twice."""
    request_id: str
    role: str
    """Empty for the main run."""
    prompt: content_pb2.Prompt | None
    params: config_pb2.StageParams
    """The stage's defaults with the request's own laid over them."""
    tensors: frozenset[str] = frozenset()
    """Names of the tensors that somebody reads; an engine makes no others."""
    output: bool = True
    """Whether a client gets this run's text or media."""
    sources: tuple[tuple[str, str], ...] = ()
    """(stage, role) of each run that feeds this one."""


@dataclass(slots=True)
class Feed:
    """A chunk of another run's output, or its end.

    `tensors` are views of another process's memory: valid until `release()`, which the engine calls as soon as it has
    copied or consumed them, from any thread, once.
    """

    stage: str
    role: str
    token_ids: Sequence[int] = ()
    text: str = ""
    tensors: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    """By name, one for each publication, oldest first."""
    end: bool = False
    """The source has finished; nothing follows from it, and this feed holds no data."""
    release: Callable[[], None] = lambda: None
    """Gives the memory and the sender's credit back; raises OmniError TENSOR_LOST when what was read is not sound."""

    def discard(self) -> None:
        """Gives it back unread: then it does not matter whether the memory was still sound."""
        with contextlib.suppress(OmniError):
            self.release()


@dataclass(slots=True)
class Output:
    """What one step made for one run. Joined in order when several are merged."""

    run: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[content_pb2.TokenLogprobs] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Merged along the first axis; the engine never writes to them again."""
    media: list[content_pb2.MediaPiece] = field(default_factory=list)
    progress: content_pb2.Progress | None = None


@dataclass(slots=True)
class Finished:
    """A run's end. For a cancelled run: the engine has let go of it. Queue, first-output and total times are the
    session's to measure, except `queued`."""

    run: int
    reason: content_pb2.FinishReason.ValueType
    usage: content_pb2.Usage
    queued: float = 0.0
    """Seconds from submit to the first step that included the run."""


@dataclass(slots=True)
class Failed:
    """A run's end by an error of its own; the engine goes on with the others."""

    run: int
    error: OmniError


Event = Output | Finished | Failed
Deliver = Callable[[Sequence[Event]], None]
"""Takes the events of one step, from any thread, and never blocks."""


@dataclass(slots=True)
class Load:
    """An engine's counters; `steps` and `units` count from its start."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    units: int = 0
    busy: bool = False
    """Something can be done now. False: there is no run, or each waits for its input or for its reader."""
    voices: Sequence[str] = ()
    """Speakers of a model that is loaded."""


class Engine(Protocol):
    """Runs are submitted, fed and cancelled from the server's event loop; none of these calls blocks."""

    def start(self, deliver: Deliver) -> None:
        """Loads and warms the model (blocking; called in a worker thread), then starts stepping.

        Raises:
            OmniError: with what is wrong with the spec or the checkpoint.
        """

    def submit(self, run: Run) -> None:
        """Takes a run in.

        Raises:
            OmniError: INVALID_ARGUMENT with the field, when its parameters are not ones this engine takes.
        """

    def feed(self, run: int, feed: Feed) -> None:
        """Gives a run more input; for a run that has ended it only releases."""

    def cancel(self, run: int) -> None:
        """Ends a run: `Finished(CANCELLED)` follows when the engine has let go. Unknown runs are ignored."""

    def hold(self, run: int, held: bool) -> None:
        """Keeps a run out of further steps while its reader is too far behind, and lets it in again."""

    def load(self) -> Load:
        """Counters, for health and routing."""

    def stop(self) -> None:
        """Ends stepping and frees the model (blocking; called in a worker thread). Runs at work are dropped."""
