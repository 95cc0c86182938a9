"""The engine's own record of a run."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from omni.v1 import content_pb2
from stage_server.engines.ar.decoder import StateT
from stage_server.engines.ar.sampling import Seen

if TYPE_CHECKING:
    from stage_server.engines.base import Feed, Run


@dataclass(slots=True, eq=False)
class Entry(Generic[StateT]):
    """A run and where it stands. `state` is there once the run is prepared."""

    run: Run
    state: StateT | None = None
    preparation: Future[None] | None = None
    feeds: list[Feed] = field(default_factory=list)
    """Input that came before the state was there."""
    seen: Seen | None = None
    """Set for runs with a penalty."""
    held: bool = False
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    queued: float = 0.0
    """Seconds from submit to the first step with this run."""
    started: bool = False

    @property
    def ready_state(self) -> StateT:
        """The state of a run that is prepared."""
        assert self.state is not None
        return self.state

    def stepped(self) -> None:
        """Notes that a step with this run has been made."""
        if not self.started:
            self.started = True
            self.queued = time.monotonic() - self.submitted

    def release_feeds(self) -> None:
        """Gives unread input back."""
        feeds, self.feeds = self.feeds, []
        for feed in feeds:
            feed.discard()

    def usage(self) -> content_pb2.Usage:
        """What the run used so far."""
        if self.state is None:
            return content_pb2.Usage()
        return content_pb2.Usage(prompt_tokens=self.state.prompt or 0, completion_tokens=len(self.state.tokens))
