"""All requests of a coordinator: whose turn it is, which run waits for a replica, and what the time brings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from omnid.orchestrator import failures
from omnid.orchestrator.leases import Leases
from omnid.orchestrator.plan import RequestPlan
from omnid.orchestrator.ports import Client, Failure, Link, Observer, Router, RunReport, Trace
from omnid.orchestrator.request import Request
from omnid.orchestrator.run import CANCELLING, QUEUED, STARTED, Run
from omnid.orchestrator.timers import Timers


class Orchestrator:
    """Owns every request. One thread calls it, and sets the time with `tick` before it does.

    Attributes:
        now: the time of what is being told, in seconds of a monotonic clock.
        timers: deadlines of requests and runs.
        leases: published tensors that somebody still reads.
    """

    def __init__(self, router: Router, observer: Observer, earlier: Callable[[], None] = lambda: None) -> None:
        """`earlier` is called when `timers.first()` became an earlier one."""
        self.now = 0.0
        self.router = router
        self.observer = observer
        self.timers = Timers(earlier)
        self.leases = Leases(router.release)
        self.requests: dict[str, Request] = {}
        self._numbers = 0
        self._at_work: dict[str, int] = {}
        """Requests that have begun, by model."""
        self._turn: dict[str, OrderedDict[Request, None]] = {}
        """Requests that wait for their turn, by model, oldest first."""
        self._waiting: dict[tuple[str, str], OrderedDict[Run, None]] = {}
        """Runs that wait for a replica, by stage, oldest first."""

    def tick(self, now: float) -> None:
        """The time of the calls that follow."""
        self.now = now

    @property
    def idle(self) -> bool:
        """Nothing is kept of any request."""
        return not (self.requests or len(self.leases) or len(self.timers))

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        plan: RequestPlan,
        request_id: str,
        message: Any,
        client: Client,
        *,
        trace: Trace,
        timeout: float | None = None,
    ) -> Request | Failure:
        """Takes a request in; a failure when too many wait already, and then nothing was begun.

        Args:
            plan: what it runs.
            request_id: never used before.
            message: what the client sent; opaque.
            client: who gets the events.
            trace: its span, which the observer ends.
            timeout: seconds for the whole request; None: the deployment's bound.
        """
        at_work = self._at_work.get(plan.model, 0)
        turn = self._turn.setdefault(plan.model, OrderedDict())
        if at_work >= plan.max_requests and len(turn) >= plan.max_queued:
            return failures.too_many(plan, at_work, len(turn))
        request = Request(self, plan, request_id, message, client, trace=trace, timeout=timeout)
        self.requests[request_id] = request
        client.accepted(request.count(), request_id)
        if at_work < plan.max_requests:
            self._at_work[plan.model] = at_work + 1
            request.begin()
        else:
            turn[request] = None
            self.timers.set(request, self.now + min(plan.queue, request.timeout))
        return request

    def cancel(self, request_id: str, reason: str, done: Callable[[list[RunReport]], None]) -> bool:
        """Cancels a request; `done` gets what each of its runs said, once it has ended. False: there is none."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.on_end(lambda ended: done(ended.reports()))
        request.cancel(reason)
        return True

    def ended(self, request: Request) -> None:
        """Called by a request that has ended: the next one's turn has come."""
        del self.requests[request.id]
        self.observer.ended(request)
        model = request.plan.model
        turn = self._turn[model]
        if not request.begun:
            turn.pop(request, None)
            return
        self._at_work[model] -= 1
        if turn and self._at_work[model] < request.plan.max_requests:
            self._at_work[model] += 1
            turn.popitem(last=False)[0].begin()

    # -- replicas ----------------------------------------------------------------------------------------------------

    def place(self, run: Run) -> None:
        """Starts a run on the replica that is to take it, or lets it wait for one."""
        link = None if self._waiting.get(run.stage.key) else self.router.route(run.stage)
        if link is not None:
            self._start(run, link)
            return
        run.state = QUEUED
        waiting = self._waiting.setdefault(run.stage.key, OrderedDict())
        waiting[run] = None
        since = self.now
        if run.refused is not None:
            since = run.refused
            waiting.move_to_end(run, last=False)
        self.timers.set(run, since + run.stage.waits.queue)

    def unplace(self, run: Run) -> None:
        """A waiting run has ended."""
        self._waiting[run.stage.key].pop(run, None)

    def room_on(self, stage: tuple[str, str]) -> None:
        """A replica of `stage` (model, stage) can take a run, or one more: those that wait go first."""
        waiting = self._waiting.get(stage)
        while waiting:
            link = self.router.route(next(iter(waiting)).stage)
            if link is None:
                return
            self._start(waiting.popitem(last=False)[0], link)

    def lost(self, link: Link) -> None:
        """A replica is gone, with its runs and its tensors. `router.route` no longer answers with it."""
        runs = list(link.runs.values())
        link.runs.clear()
        self.leases.forget(link.name)
        for run in runs:
            if run.link is link and run.state in (STARTED, CANCELLING):
                run.request.lost(run)

    def released(self, leases: Iterable[int]) -> None:
        """A consumer is done with these tensors."""
        unknown = sum(not self.leases.done(lease) for lease in leases)
        if unknown:
            self.observer.fenced(unknown)

    # -- time --------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Does what is due at `now`."""
        while (target := self.timers.due(self.now)) is not None:
            if isinstance(target, Run):
                target.request.run_expired(target)
            elif isinstance(target, Request):
                target.expire()

    def _start(self, run: Run, link: Link) -> None:
        self._numbers += 1
        run.request.started(run, link, self._numbers)
