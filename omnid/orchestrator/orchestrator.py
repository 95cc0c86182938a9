"""All requests of a coordinator: admission, numbers, leases, timers. Owns every `Request`; does no I/O itself."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from omni.rpc.context import new_request_id
from omni.rpc.errors import OmniError, Reason
from omni.v1 import generate_pb2, stage_pb2
from omnid.orchestrator.admission import check
from omnid.orchestrator.observer import Observer
from omnid.orchestrator.plan import Pipeline
from omnid.orchestrator.ports import Client, Replica
from omnid.orchestrator.request import Request
from omnid.orchestrator.run import NEVER, Run


class Clock(Protocol):
    def now(self) -> float:
        """Seconds of a monotonic clock."""

    def wake_at(self, due: float) -> None:
        """Calls `Orchestrator.expire` at `due`, or earlier; a later call replaces an earlier one."""


class Router(Protocol):
    def place(self, model: str, stage: str, avoid: frozenset[str]) -> Replica | None:
        """A replica that takes one more run of the stage, which is counted; None when there is none."""

    def unplace(self, replica: Replica) -> None:
        """A run on the replica has ended."""

    def find(self, name: str) -> Replica | None:
        """The replica of that name, if it is connected."""


@dataclass(slots=True)
class _Lease:
    owner: str
    readers: int
    request: Request


class _Admission:
    """Requests of one model: those at work are counted, further ones wait in line."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.active = 0
        self.line: deque[Request] = deque()


class Orchestrator:
    """Takes requests in and events of runs, and keeps the two together."""

    def __init__(self, pipelines: Sequence[Pipeline], router: Router, clock: Clock, observer: Observer) -> None:
        self._models: dict[str, _Admission] = {each.resolved.model: _Admission(each) for each in pipelines}
        self._router = router
        self._clock = clock
        self._observer = observer
        self._requests: dict[str, Request] = {}
        self._runs: dict[int, tuple[Request, Run]] = {}
        self._numbers = itertools.count(1)
        self._leases: dict[int, _Lease] = {}
        self._timers: list[tuple[float, int, Request]] = []
        self._sequence = itertools.count()
        self._woken_at = NEVER
        self._waiting: dict[tuple[str, str], dict[Request, None]] = {}

    # Requests.

    @property
    def pipelines(self) -> Mapping[str, Pipeline]:
        return {name: each.pipeline for name, each in self._models.items()}

    @property
    def idle(self) -> bool:
        """No request is at work or waits."""
        return not self._requests

    def submit(
        self,
        asked: generate_pb2.GenerateRequest,
        client: Client,
        *,
        traceparent: str = "",
        timeout: float | None = None,
    ) -> Request:
        """Takes a request in; its events go to `client`, beginning before this returns.

        Raises:
            OmniError: when it asks for what the model does not have, or too many wait already.
        """
        admission = self._models.get(asked.model)
        check(asked, admission.pipeline if admission else None, sorted(self._models))
        if admission is None:
            raise AssertionError("check() refuses unknown models")
        resolved = admission.pipeline.resolved
        full = admission.active >= resolved.max_requests
        if full and len(admission.line) >= resolved.max_queued:
            raise OmniError(
                Reason.QUEUE_FULL,
                f"model {asked.model}: {admission.active} requests are at work and {len(admission.line)} wait; no more "
                "are taken",
            )
        request = Request(
            new_request_id(), asked, admission.pipeline, client, self, traceparent=traceparent, timeout=timeout
        )
        self._requests[request.id] = request
        self._observer.begun(request)
        request.accept()
        if full:
            admission.line.append(request)
        else:
            admission.active += 1
            request.start()
        return request

    def find(self, request_id: str) -> Request | None:
        """The request of that id while it is not over."""
        return self._requests.get(request_id)

    def cancel_all(self, reason: str) -> None:
        """Cancels every request."""
        for request in list(self._requests.values()):
            request.cancel(reason)

    # What replicas say.

    def receive(self, response: stage_pb2.StageServiceAttachResponse) -> None:
        """Events, credits and releases of one message of a replica's stream."""
        runs = self._runs
        for event in response.events:
            at = runs.get(event.run)
            if at is None:
                self._observer.fenced()
                self._drop_tensors(event)
                continue
            request, run = at
            kind = event.WhichOneof("event")
            if kind == "output":
                request.output(run, event.output)
            elif kind == "finished":
                request.finished(run, event.finished)
            elif kind == "failed":
                request.failed(run, event.failed)
            elif kind == "accepted":
                run.accepted = True
        for number in response.credits:
            if (at := runs.get(number)) is not None:
                at[0].input_taken(at[1])
        for release in response.releases:
            for lease in release.leases:
                self._release(lease)

    def replica_up(self, model: str, stage: str) -> None:
        """A replica of the stage has room for runs."""
        waiting = self._waiting.get((model, stage), {})
        for request in list(waiting):
            request.replica_ready(stage)
            if not any(run.wanted and run.stage.name == stage for run in request.runs):
                waiting.pop(request, None)

    def replica_down(self, replica: Replica) -> None:
        """The replica's stream has broken: its runs are lost."""
        for request, run in [at for at in self._runs.values() if at[1].replica is replica]:
            request.replica_lost(run)

    # Time.

    def expire(self) -> None:
        """Looks after every bound that has passed."""
        now = self._clock.now()
        self._woken_at = NEVER
        while self._timers and self._timers[0][0] <= now:
            due, _, request = heapq.heappop(self._timers)
            if due == request.armed:
                request.armed = NEVER
                request.check()
        self._wake()

    def _wake(self) -> None:
        if self._timers and self._timers[0][0] < self._woken_at:
            self._woken_at = self._timers[0][0]
            self._clock.wake_at(self._woken_at)

    # `ports.Surroundings`.

    def now(self) -> float:
        return self._clock.now()

    def place(self, model: str, stage: str, avoid: frozenset[str], request: Request) -> Replica | None:
        replica = self._router.place(model, stage, avoid)
        if replica is None:
            self._waiting.setdefault((model, stage), {})[request] = None
        return replica

    def unplace(self, replica: Replica) -> None:
        self._router.unplace(replica)

    def new_run(self, request: Request, run: Run) -> int:
        number = next(self._numbers)
        self._runs[number] = request, run
        return number

    def drop_run(self, number: int) -> None:
        self._runs.pop(number, None)

    def lease(self, request: Request, owner: str, lease: int, readers: int) -> None:
        if readers:
            self._leases[lease] = _Lease(owner, readers, request)
            request.leases.add(lease)
        else:
            self._free(owner, lease)

    def release_all(self, request: Request) -> None:
        for lease in request.leases:
            held = self._leases.pop(lease, None)
            if held is not None:
                self._free(held.owner, lease)
        request.leases.clear()

    def arm(self, request: Request, due: float) -> None:
        request.armed = due
        heapq.heappush(self._timers, (due, next(self._sequence), request))
        self._wake()

    def ended(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        for waiting in self._waiting.values():
            waiting.pop(request, None)
        self._observer.ended(request)
        for tell in request.on_over:
            tell()
        admission = self._models[request.model]
        if not request.started:
            admission.line.remove(request)
            return
        admission.active -= 1
        while admission.line and admission.active < admission.pipeline.resolved.max_requests:
            admission.active += 1
            admission.line.popleft().start()

    def _release(self, lease: int) -> None:
        held = self._leases.get(lease)
        if held is None:
            return
        held.readers -= 1
        if held.readers <= 0:
            del self._leases[lease]
            held.request.leases.discard(lease)
            self._free(held.owner, lease)

    def _free(self, owner: str, lease: int) -> None:
        replica = self._router.find(owner)
        if replica is not None:
            replica.release(lease)

    def _drop_tensors(self, event: stage_pb2.RunEvent) -> None:
        for tensor in event.output.payload.tensors:
            self._free(tensor.handle.owner, tensor.handle.lease)
