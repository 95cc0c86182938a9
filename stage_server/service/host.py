"""The replica: its engine, arena and reader, and which session each run of the engine belongs to."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from omni.rpc import logs
from omni.rpc.duration import seconds_of
from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, stage_pb2, tensor_pb2
from stage_server.engines.base import Engine, Event, Failed, Finished
from stage_server.transport.arena import Arena
from stage_server.transport.reader import Reader

if TYPE_CHECKING:
    from stage_server.metrics import StageMetrics
    from stage_server.service.runs import SessionRun
    from stage_server.service.session import Session

_log = logs.get(__name__)

_LOOKS = 4
"""How often in the stall bound the engine's progress is looked at, even when nobody asks."""


class Wire(Protocol):
    """May change what a session sends; the synthetic stage's way to play a faulty network."""

    def pass_on(self, run: int, event: stage_pb2.RunEvent) -> Sequence[stage_pb2.RunEvent]:
        """What goes out in place of an event of the engine's run."""


class StageHost:
    """Owned by the server. All methods run on the event loop, but `deliver`."""

    def __init__(
        self,
        spec: config_pb2.StageSpec,
        address: tensor_pb2.ReplicaAddress,
        engine: Engine,
        *,
        arena: Arena,
        reader: Reader,
        metrics: StageMetrics,
    ) -> None:
        self.spec = spec
        self.address = address
        self.engine = engine
        self.arena = arena
        self.reader = reader
        self.metrics = metrics
        self.wire: Wire | None = getattr(engine, "wire", None)
        self.draining = False
        self.state = stage_pb2.REPLICA_STATE_LOADING
        self.detail = ""
        self.on_state: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._runs: dict[int, tuple[Session, SessionRun]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._vacant = asyncio.Event()
        """Somebody who waits for the arena to be empty is to look again."""
        self._ended = False
        self._sessions: set[Session] = set()
        self._stall = seconds_of(spec.stall)
        self._steps = -1
        self._moved = time.monotonic()
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        """Next call of each method that is called again and again."""
        self._outcomes = {"finished": 0, "failed": 0, "cancelled": 0}
        arena.on_room = self._room

    def start(self) -> None:
        """Loads the model (blocking: called in a worker thread) and makes the engine step."""
        self.engine.start(self.deliver)

    def ready(self) -> None:
        """The engine has started; whoever drains meanwhile goes on."""
        if not self.draining:
            self.set_state(stage_pb2.REPLICA_STATE_READY)
        self._sweep()
        self._look()

    def set_state(self, state: stage_pb2.ReplicaState.ValueType, detail: str = "") -> None:
        """Changes what coordinators are told, and tells them."""
        if (state, detail) != (self.state, self.detail):
            self.state, self.detail = state, detail
            self.on_state()

    def admit(self) -> None:
        """Whether another run may begin.

        Raises:
            OmniError: DRAINING, NO_REPLICA while it is loading or unhealthy, QUEUE_FULL.
        """
        if self.draining:
            raise OmniError(Reason.DRAINING, f"replica {self.address.replica} takes no new work")
        if self.state != stage_pb2.REPLICA_STATE_READY:
            raise OmniError(
                Reason.NO_REPLICA, f"replica {self.address.replica} is not ready: {self.detail or 'loading'}"
            )
        room = self.spec.max_running + self.spec.max_waiting
        if len(self._runs) >= room:
            raise OmniError(Reason.QUEUE_FULL, f"replica {self.address.replica} has {room} runs and takes no more")

    def new_id(self) -> int:
        """A number for a run that is about to be submitted."""
        return next(self._ids)

    def join(self, session: Session) -> None:
        """A stream has begun."""
        self._sessions.add(session)
        if self._ended:
            session.end()

    def add(self, session: Session, run: SessionRun) -> None:
        """A run is about to be submitted to the engine."""
        self._runs[run.id] = session, run
        self._idle.clear()

    def remove(self, run: SessionRun, outcome: str) -> None:
        """A run has ended: "finished", "failed" or "cancelled"."""
        if self._runs.pop(run.id, None) is None:
            return
        self._outcomes[outcome] += 1
        self.metrics.run_ended(outcome, time.monotonic() - run.begun, run.first_output)
        if not self._runs:
            self._idle.set()

    def forget(self, session: Session) -> None:
        """The session is over; its runs end when the engine has let go of them."""
        self._sessions.discard(session)

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes the events of one step of the engine, from any thread."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: Sequence[Event]) -> None:
        runs = self._runs
        for event in events:
            at = runs.get(event.run)
            if at is None:
                continue
            session, run = at
            if type(event) is Finished:
                session.engine_finished(run, event)
            elif type(event) is Failed:
                session.engine_failed(run, event.error)
            else:
                session.engine_output(run, event)

    async def drain(self) -> None:
        """Takes no new run from now on. Returns when the last one has ended, its last word is written, and everything
        that was published has been given back: then nobody needs this process any more."""
        self.draining = True
        self.set_state(stage_pb2.REPLICA_STATE_DRAINING)
        await self.finish()
        while self.arena.load().leases:
            self._vacant.clear()
            await self._vacant.wait()

    async def finish(self) -> None:
        """Returns when no run is at work and all that runs have said is written."""
        await self._idle.wait()
        for session in list(self._sessions):
            await session.replies.written()

    def end_sessions(self) -> None:
        """Ends every stream, each after what is left to say on it, and those that begin from now on."""
        self._ended = True
        for session in list(self._sessions):
            session.end()

    def give_up(self) -> None:
        """Ends every run that draining has not seen the end of; those that have not begun can begin elsewhere."""
        for session, run in list(self._runs.values()):
            message = f"replica {self.address.replica} stops, and the run did not end in time"
            session.fail(run, OmniError(Reason.DRAINING, message))

    def load(self) -> stage_pb2.ReplicaLoad:
        """How the replica does. Health is progress: it is judged here, and nowhere else."""
        load = self.engine.load()
        now = time.monotonic()
        if load.steps != self._steps or not load.busy:
            self._steps, self._moved = load.steps, now
        if self.state == stage_pb2.REPLICA_STATE_READY and self._stall and now - self._moved > self._stall:
            self.set_state(stage_pb2.REPLICA_STATE_UNHEALTHY, f"has work and made no step for {self._stall:g} s")
        elif self.state == stage_pb2.REPLICA_STATE_UNHEALTHY and now == self._moved:
            self.set_state(stage_pb2.REPLICA_STATE_READY)
        return stage_pb2.ReplicaLoad(
            state=self.state,
            # An engine lets go of a run a moment before the run's end is said and counted: until then it is at work.
            running=max(load.running, len(self._runs) - load.waiting),
            waiting=load.waiting,
            steps=load.steps,
            units=load.units,
            finished_runs=self._outcomes["finished"],
            failed_runs=self._outcomes["failed"],
            cancelled_runs=self._outcomes["cancelled"],
            arena=self.arena.load(),
            detail=self.detail,
            voices=load.voices,
            fetched_bytes=self.reader.fetched_bytes(),
        )

    def close(self) -> None:
        """Stops its timers; the arena is the server's to close."""
        for timer in self._timers.values():
            timer.cancel()

    def _room(self) -> None:
        self._vacant.set()
        for session in self._sessions:
            session.starved.look_again()

    def _sweep(self) -> None:
        left = self.arena.expire()
        seconds = seconds_of(self.spec.lease)
        self._again(self._sweep, seconds if left is None else left)

    def _look(self) -> None:
        if self._stall:
            self.load()
            self._again(self._look, self._stall / _LOOKS)

    def _again(self, call: Callable[[], None], seconds: float) -> None:
        self._timers[call] = self._loop.call_later(seconds, call)
