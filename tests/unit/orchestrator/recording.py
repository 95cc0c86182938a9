"""The orchestrator with everything around it recorded: replicas, clients, time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnid.orchestrator.core import Orchestrator
from omnid.orchestrator.leases import Tensor
from omnid.orchestrator.plan import EdgePlan, RequestPlan, RolePlan, StagePlan, Waits
from omnid.orchestrator.ports import Failure, RequestEnd, StageEnd
from omnid.orchestrator.request import Request
from omnid.orchestrator.run import Chunk, Run

WAITS = Waits(queue=5, first_output=10, gap=3, cancel=1)


@dataclass
class Timing:
    total: float = 0.0


class FakeLink:
    """A replica that remembers what it was told, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.runs: dict[int, Run] = {}
        self.credits: list[int] = []
        self.refusing = False
        self.told: list[tuple[Any, ...]] = []
        self.up = True

    def wake(self) -> None:
        pass

    def start(self, run: Run, timeout: float) -> None:
        self.told.append(("start", run.number, run.role.role))

    def input(self, run: Run, source: Run, chunk: Chunk, edge: EdgePlan) -> None:
        self.told.append(("input", run.number, source.name, chunk.first, chunk.count))

    def input_end(self, run: Run, source: Run, count: int, reason: int) -> None:
        self.told.append(("end", run.number, source.name, count))

    def cancel(self, number: int, reason: str) -> None:
        self.told.append(("cancel", number, reason))

    def kinds(self) -> list[str]:
        return [each[0] for each in self.told]


@dataclass
class FakeClient:
    """Remembers its events and checks their total order."""

    events: list[tuple[Any, ...]] = field(default_factory=list)

    def _add(self, index: int, *event: Any) -> None:
        assert index == len(self.events)
        self.events.append(event)

    def accepted(self, index: int, request_id: str) -> None:
        self._add(index, "accepted")

    def output(self, index: int, stage: str, payload: Any) -> None:
        self._add(index, "output", stage, payload)

    def stage_finished(self, index: int, end: StageEnd) -> None:
        self._add(index, "stage_finished", end.stage)

    def finished(self, index: int, end: RequestEnd) -> None:
        self._add(index, "finished", end.reason)

    def failed(self, index: int, failure: Failure) -> None:
        self._add(index, "failed", failure)

    @property
    def failure(self) -> Failure:
        kind, failure = self.events[-1]
        assert kind == "failed"
        found: Failure = failure
        return found

    def outputs(self) -> list[Any]:
        return [event[2] for event in self.events if event[0] == "output"]


@dataclass
class FakeObserver:
    """Counts late events."""

    fenced_events: int = 0

    def fenced(self, events: int) -> None:
        self.fenced_events += events

    def taken(self, edge: str, seconds: float) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


class Untraced:
    """The span of a request that nobody traces."""

    traceparent = ""

    def end(self, attributes: Mapping[str, str]) -> None:
        pass


class World:
    """An orchestrator, its replicas by stage, and the time."""

    def __init__(self, plan: RequestPlan) -> None:
        self.plan = plan
        self.links: dict[str, list[FakeLink]] = {stage.name: [FakeLink(f"m/{stage.name}/0")] for stage in plan.stages}
        self.released: list[tuple[str, int]] = []
        self.observer = FakeObserver()
        self.core = Orchestrator(self, self.observer)

    # the router

    def route(self, stage: StagePlan) -> FakeLink | None:
        up = [link for link in self.links[stage.name] if link.up and not link.refusing]
        return min(up, key=lambda link: len(link.runs), default=None)

    def release(self, owner: str, lease: int) -> None:
        self.released.append((owner, lease))

    def missing(self, stage: StagePlan) -> str:
        return "" if any(link.up for link in self.links[stage.name]) else f"m/{stage.name}/0 has not joined"

    # what tests do

    def ask(self, timeout: float | None = None) -> tuple[Request, FakeClient]:
        client = FakeClient()
        request = self.core.submit(self.plan, f"req-{id(client)}", None, client, trace=Untraced(), timeout=timeout)
        assert isinstance(request, Request)
        return request, client

    def link(self, stage: str) -> FakeLink:
        return self.links[stage][-1]

    def run(self, request: Request, stage: str, role: str = "") -> Run:
        return next(run for run in request.runs if run.stage.name == stage and run.role.role == role)

    def output(self, run: Run, first: int, count: int = 1, leases: tuple[int, ...] = ()) -> None:
        tensors = tuple(Tensor("rows", run.replica, lease) for lease in leases)
        run.request.output(run, first, count, f"{run.name}:{first}", tensors, visible=True)

    def finish(self, run: Run, count: int, reason: int = 1) -> None:
        run.request.finished(run, reason, count, None, Timing())

    def let_go(self, request: Request) -> None:
        """Every run that was told to let go says that it has."""
        for run in request.runs:
            if run.link is not None:
                self.finish(run, 0, reason=3)

    def advance(self, seconds: float) -> None:
        self.core.tick(self.core.now + seconds)
        self.core.expire()

    def lose(self, link: FakeLink) -> None:
        link.up = False
        self.core.lost(link)

    def report(self, link: FakeLink) -> None:
        """A replica says how it does."""
        link.refusing = False
        self.core.room_on(("m", link.name.split("/")[1]))

    def idle(self) -> bool:
        """Nothing is kept of any request."""
        kept = (self.core.requests, self.core.leases, self.core.timers)
        runs = any(link.runs for links in self.links.values() for link in links)
        return not any(len(each) for each in kept) and not runs


def chain(*names: str, at_end: bool = False, roles: tuple[str, ...] = (), shown: tuple[str, ...] = ()) -> RequestPlan:
    """A chain of stages; the first has companions `roles`. The client gets the output of `shown`, or of the last."""
    edges = [EdgePlan(source, to, at_end, frozenset({"rows"})) for source, to in itertools.pairwise(names)]
    stages = tuple(
        StagePlan(
            model="m",
            name=name,
            roles=(RolePlan(), *(RolePlan(role) for role in roles)) if place == 0 else (RolePlan(),),
            takes_prompt=place == 0,
            to_client=name in (shown or names[-1:]),
            modalities=frozenset({1}),
            tensors=("rows",) if place < len(names) - 1 else (),
            waits=WAITS,
            edges=tuple(edge for edge in edges if edge.producer == name),
            starts_at_end=at_end and place > 0,
        )
        for place, name in enumerate(names)
    )
    return RequestPlan("m", stages, total=100, queue=5, max_requests=2, max_queued=1)
