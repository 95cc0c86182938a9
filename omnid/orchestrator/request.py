"""The state machine of one request: runs, edges, order, credits, bounds, cancellation.

Pure: what happens comes in as calls, with the time in the orchestrator's `now`; what is to be done goes out to links
and the client. All state is touched by one thread, and no call waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omnid.orchestrator import failures
from omnid.orchestrator.flow import Flow
from omnid.orchestrator.leases import Tensor
from omnid.orchestrator.ports import (
    CANCELLED,
    STOP,
    Client,
    Failure,
    Link,
    RequestEnd,
    RunReport,
    StageEnd,
    Times,
    Trace,
)
from omnid.orchestrator.run import (
    CANCELLING,
    ENDED,
    IDLE,
    LOSSES,
    QUEUED,
    STARTED,
    WINDOW,
    Chunk,
    Input,
    Run,
    make_runs,
)
from omnid.orchestrator.timers import Timed

if TYPE_CHECKING:
    from omnid.orchestrator.core import Orchestrator
    from omnid.orchestrator.plan import RequestPlan

_REFUSALS = frozenset({"DRAINING", "QUEUE_FULL", "NO_REPLICA"})
"""Why a replica does not take a run in."""


class Request(Timed):
    """One request, from its admission to its last event."""

    __slots__ = (
        "_core",
        "_on_end",
        "begun",
        "cancelled",
        "client",
        "ended",
        "failure",
        "flow",
        "id",
        "index",
        "message",
        "open",
        "plan",
        "runs",
        "stopping",
        "timeout",
        "times",
        "trace",
    )

    def __init__(
        self,
        core: Orchestrator,
        plan: RequestPlan,
        request_id: str,
        message: Any,
        client: Client,
        *,
        trace: Trace,
        timeout: float | None,
    ) -> None:
        """`message` is the client's request, opaque here; links read prompt and parameters from it."""
        super().__init__()
        self._core = core
        self.plan = plan
        self.id = request_id
        self.message = message
        self.client = client
        self.timeout = plan.total if timeout is None else min(timeout, plan.total)
        self.trace = trace
        self.index = 0
        """Number of the client's next event."""
        self.begun = False
        self.stopping = False
        """Its runs are told to let go, for one of the two causes below."""
        self.ended = False
        self.failure: Failure | None = None
        self.cancelled = ""
        """Why it was cancelled, or ""."""
        self.times = Times(core.now)
        self.runs = make_runs(self)
        self.open = len(self.runs)
        """Runs that have not ended."""
        self.flow = Flow(core, self)
        self._on_end: list[Callable[[Request], None]] = []

    # -- its life ----------------------------------------------------------------------------------------------------

    @property
    def remaining(self) -> float:
        """Seconds that are left to it."""
        return max(0.0, self.times.created + self.timeout - self._core.now)

    def begin(self) -> None:
        """Its turn has come: starts the runs that take the prompt."""
        self.begun = True
        self._core.timers.set(self, self.times.created + self.timeout)
        for run in self.runs:
            if run.stage.takes_prompt and not self.stopping:
                self._core.place(run)

    def cancel(self, reason: str) -> None:
        """Nobody wants it any more."""
        if not self.stopping:
            self.cancelled = reason
            self._stop(reason)

    def fail(self, failure: Failure, why: str) -> None:
        """Ends it with `failure` once its runs have let go; `why` is what they are told."""
        if not self.stopping:
            self.failure = failure
            self._stop(why)

    def expire(self) -> None:
        """Its own deadline has passed."""
        if self.remaining > 0 and not self.begun:
            self.fail(failures.no_turn(self.plan), "its turn did not come")
        else:
            self.fail(failures.out_of_time(self.timeout), "deadline")

    def on_end(self, call: Callable[[Request], None]) -> None:
        """`call` is called when it has ended."""
        self._on_end.append(call)

    def reports(self) -> list[RunReport]:
        """Whether each run that was ever started has let go; complete once the request has ended."""
        return [
            RunReport(run.stage.name, run.role.role, run.replica, run.acknowledged) for run in self.runs if run.replica
        ]

    # -- what replicas say -------------------------------------------------------------------------------------------

    def output(
        self, run: Run, first: int, count: int, payload: Any, tensors: tuple[Tensor, ...], *, visible: bool
    ) -> None:
        """A run made the outputs `first` to `first + count - 1`.

        Args:
            run: of this request, on the link that says so.
            first: number of the first output in the message.
            count: how many it holds.
            payload: opaque.
            tensors: what it publishes.
            visible: whether it holds anything for a client.
        """
        core = self._core
        if run.state != STARTED:
            # Its cancel and its own end may have crossed: then the stage does not know that nobody reads these.
            for tensor in tensors:
                core.router.release(tensor.owner, tensor.lease)
            return
        if first != run.next or not count:
            for tensor in tensors:  # They go back with the request: a doubled one may be in a reader's hands.
                core.leases.add(self.id, tensor, 1)
            self.fail(failures.broken_sequence(run, first), f"output of stage {run.stage.name} was lost or doubled")
            return
        now = core.now
        run.next = first + count
        run.last_output = now
        if first == 0:
            self._first_output(run, now)
        run.deadline = now + run.wait
        if not run.routes:
            if not run.to_client or not visible:
                self.flow.credit(run)
                return
            if run.client_room and not run.client_queue:
                run.client_room -= 1
                self.flow.in_flight.append(run)
                self.client.output(self.index, run.stage.name, payload)
                self.index += 1
                link = run.link
                assert link is not None
                link.credits.append(run.number)
                return
        self.flow.spread(run, Chunk(run, first, count, payload, tensors), visible)

    def finished(self, run: Run, reason: int, count: int, usage: Any, timings: Any) -> None:
        """A run has ended, by itself or because it was told to."""
        if run.state == CANCELLING:
            self._let_go(run, acknowledged=True)
            return
        if count != run.next:
            self._fail_run(run, failures.wrong_count(run, count))
            return
        if reason == CANCELLED:
            self._fail_run(run, failures.cancelled_by_nobody(run))
            return
        run.acknowledged = True
        run.end = StageEnd(run.stage.name, reason, usage, timings)
        self._end_run(run)
        self.flow.drop_inputs(run)
        for edge, consumer in run.routes:
            if consumer.state != ENDED:
                consumer.inputs.append(Input(run, edge, None, held=False, arrived=self._core.now))
                self.flow.feed(consumer)
        if run.to_client and not self.stopping:
            run.client_queue.append(run.end)
            self.flow.flush(run)
        self._end_when_done()

    def failed(self, run: Run, failure: Failure) -> None:
        """A run has failed, and has let go."""
        if run.state == CANCELLING:
            self._let_go(run, acknowledged=True)
        elif failure.reason in _REFUSALS and run.sent is not None:
            self._refused(run, failure)
        else:
            self._fail_run(run, failure)

    def taken(self, run: Run) -> None:
        """A run has taken one of its input messages."""
        if run.state != STARTED or run.room >= WINDOW:
            return
        run.room += 1
        run.sent = None
        run.deadline = self._core.now + run.wait
        if run.handed:
            entry = run.handed.popleft()
            self._core.observer.taken(entry.edge.name, self._core.now - entry.arrived)
        self.flow.feed(run)

    def lost(self, run: Run) -> None:
        """The replica that it ran on has gone."""
        self._core.timers.clear(run)
        run.link = None
        if run.state == CANCELLING:
            self._let_go(run, acknowledged=False)
        elif run.sent is not None and run.losses < LOSSES:
            run.losses += 1
            run.replica = ""
            run.rewind()
            self._core.place(run)
        else:
            run.state = ENDED
            self.open -= 1
            self.fail(failures.lost(run, begun=run.losses < LOSSES), f"stage {run.stage.name} was lost")

    def started(self, run: Run, link: Link, number: int) -> None:
        """`run` goes to `link` under `number`."""
        core = self._core
        run.begin(link, number)
        self.times.first_start = self.times.first_start or core.now
        link.runs[number] = run
        link.start(run, self.remaining)
        core.timers.set(run, core.now + run.wait)
        self.flow.feed(run)

    def run_expired(self, run: Run) -> None:
        """A run's bound has passed."""
        core = self._core
        if run.state == CANCELLING:
            self._let_go(run, acknowledged=False)
        elif run.state == QUEUED:
            failure = failures.no_replica(run, core.router.missing(run.stage))
            self.fail(failure, f"stage {run.stage.name} has no replica")
        elif run.state == STARTED:
            if run.idle_by_right:
                core.timers.set(run, core.now + run.wait)
                return
            self.fail(failures.too_slow(run), f"stage {run.stage.name} is too slow")

    # -- what the client says ----------------------------------------------------------------------------------------

    def credit(self) -> None:
        """The client has taken its oldest output."""
        if not self.flow.in_flight:
            return
        run = self.flow.in_flight.popleft()
        run.client_room += 1
        if run.client_queue:
            self.flow.flush(run)
            self._end_when_done()

    def credit_all(self) -> None:
        """The client has taken every output that it was sent."""
        for _ in range(len(self.flow.in_flight)):
            self.credit()

    # -- within ------------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """The number of the client's next event, which is thereby given."""
        index = self.index
        self.index = index + 1
        return index

    def _refused(self, run: Run, failure: Failure) -> None:
        """The replica has not taken the run in: another one may, or the same one later, within the queue bound."""
        core, link = self._core, run.link
        assert link is not None
        if run.refused is None:
            run.refused = core.now
        elif core.now - run.refused >= run.stage.waits.queue:
            self._fail_run(run, failure)
            return
        core.timers.clear(run)
        link.runs.pop(run.number, None)
        link.refusing = True
        run.link = None
        run.rewind()
        core.place(run)

    def _first_output(self, run: Run, now: float) -> None:
        run.first_output = now
        run.sent = None
        run.wait = run.stage.waits.gap
        self._core.timers.set(run, now + run.wait)
        if run.to_client and not self.times.first_output:
            self.times.first_output = now

    def _let_go(self, run: Run, *, acknowledged: bool) -> None:
        """A run that was told to let go has said that it has, or nobody waits for that any more."""
        run.acknowledged = acknowledged
        self._end_run(run)
        self._end_when_done()

    def _fail_run(self, run: Run, failure: Failure) -> None:
        run.acknowledged = True
        self._end_run(run)
        self.fail(failure, f"stage {run.stage.name} failed")

    def _end_run(self, run: Run) -> None:
        """No event of the run is awaited any more."""
        run.state = ENDED
        self.open -= 1
        self._core.timers.clear(run)
        if run.link is not None:
            run.link.runs.pop(run.number, None)
            run.link = None
            self._core.room_on(run.stage.key)

    def _stop(self, why: str) -> None:
        self.stopping = True
        for run in self.runs:
            run.inputs.clear()
            run.client_queue.clear()
            if run.state == STARTED and run.link is not None:
                run.state = CANCELLING
                run.link.cancel(run.number, why)
                self._core.timers.set(run, self._core.now + run.stage.waits.cancel)
            elif run.state in (IDLE, QUEUED):
                if run.state == QUEUED:
                    self._core.unplace(run)
                    self._core.timers.clear(run)
                run.state = ENDED
                self.open -= 1
        self._end_when_done()

    def _end_when_done(self) -> None:
        if self.ended or self.open:
            return
        if not self.stopping and any(run.client_queue for run in self.runs):
            return
        self.ended = True
        self.times.ended = self._core.now
        self._core.timers.clear(self)
        self._core.leases.end(self.id)
        if self.failure is not None:
            self.client.failed(self.count(), self.failure)
        else:
            ends = [run.end for run in self.runs if run.end is not None and not run.role.role]
            shown = [run.end.reason for run in self.runs if run.to_client and run.end is not None]
            reason = CANCELLED if self.stopping else next(iter(shown), STOP)
            self.client.finished(self.count(), RequestEnd(reason, ends, self.times))
        self._core.ended(self)
        for call in self._on_end:
            call(self)
