"""One run of a stage for a request: its numbers, its queues and what it waits for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from omnid.orchestrator.timers import Timed

if TYPE_CHECKING:
    from omnid.orchestrator.leases import Tensor
    from omnid.orchestrator.plan import EdgePlan, RolePlan, StagePlan
    from omnid.orchestrator.ports import Link, StageEnd
    from omnid.orchestrator.request import Request

WINDOW = 2
"""Messages on their way without a credit: outputs of a run, inputs of a run, outputs of a run to the client."""

LOSSES = 1
"""How often a run is begun anew when its replica is lost: what kills a second one is the run itself."""

# States of a run, in the order in which it goes through them. A run that is never started goes from one of the first
# two to the last.
IDLE = 0
"""Its inputs have not come yet."""
QUEUED = 1
"""No replica can take it just now."""
STARTED = 2
CANCELLING = 3
"""It was told to let go and has not said that it has."""
ENDED = 4


class Chunk:
    """An output on its way to those who read it. Its producer is credited when `waits` comes to 0."""

    __slots__ = ("count", "first", "payload", "producer", "tensors", "waits")

    def __init__(self, producer: Run, first: int, count: int, payload: Any, tensors: tuple[Tensor, ...]) -> None:
        self.producer = producer
        self.first = first
        self.count = count
        self.payload = payload
        self.tensors = tensors
        self.waits = 0


class Input:
    """A chunk in a consumer's queue or, without a chunk, the end of what its source sends."""

    __slots__ = ("arrived", "chunk", "edge", "held", "source")

    def __init__(self, source: Run, edge: EdgePlan, chunk: Chunk | None, *, held: bool, arrived: float) -> None:
        self.source = source
        self.edge = edge
        self.chunk = chunk
        self.held = held
        """The producer's credit waits for it."""
        self.arrived = arrived


class Run(Timed):
    """State of a run. Only its request and the link that it runs on touch it."""

    __slots__ = (
        "acknowledged",
        "client_queue",
        "client_room",
        "end",
        "first_output",
        "handed",
        "held",
        "inputs",
        "last_output",
        "link",
        "losses",
        "next",
        "number",
        "open_sources",
        "refused",
        "replica",
        "request",
        "role",
        "room",
        "routes",
        "sent",
        "sources",
        "stage",
        "state",
        "to_client",
        "wait",
    )

    def __init__(self, request: Request, stage: StagePlan, role: RolePlan) -> None:
        super().__init__()
        self.request = request
        self.stage = stage
        self.role = role
        self.state = IDLE
        self.number = 0
        """On its link's stream; a new one each time that it is started, so that nothing late is taken for new."""
        self.link: Link | None = None
        self.replica = ""
        """Name of the replica that it was last started on."""
        self.sources: list[Run] = []
        self.routes: list[tuple[EdgePlan, Run]] = []
        self.open_sources = 0
        """Sources whose end it was not told yet."""

        self.next = 0
        """Number of its next output."""
        self.held = 0
        """Outputs that came and were not credited yet, because a reader has no room for them."""
        self.to_client = stage.to_client and not role.role
        self.client_room = WINDOW
        self.client_queue: deque[Chunk | StageEnd] = deque()

        self.inputs: deque[Input] = deque()
        """Not sent yet."""
        self.room = WINDOW
        """Input messages that may be sent without a credit."""
        self.sent: list[Input] | None = []
        """What was sent, as long as nothing of it was taken and no output came: then the run can start anew elsewhere.
        None: it cannot."""
        self.losses = 0
        """Replicas that were lost with it before it made anything."""
        self.refused: float | None = None
        """When a replica first turned it away."""
        self.handed: deque[Input] = deque()
        """Sent and not taken yet; for metrics."""

        self.wait = stage.waits.first_output
        """Seconds that it may go on without a sign of life."""
        self.first_output = self.last_output = 0.0
        self.end: StageEnd | None = None
        self.acknowledged = False
        """It has said that it let go."""

    @property
    def name(self) -> str:
        """Stage and role, for people."""
        return f"{self.stage.name}[{self.role.role}]" if self.role.role else self.stage.name

    @property
    def readers(self) -> str:
        """The edges that its output goes over, for people: "thinker->talker, thinker->client"."""
        names = list(dict.fromkeys(edge.name for edge, _ in self.routes))
        if self.to_client:
            names.append(f"{self.stage.name}->client")
        return ", ".join(names) or f"{self.stage.name}->nobody"

    @property
    def idle_by_right(self) -> bool:
        """Nothing is due from it: it waits for us to credit its outputs, or for input that its sources did not make."""
        return self.held >= WINDOW or (self.open_sources > 0 and self.room == WINDOW)

    def begin(self, link: Link, number: int) -> None:
        """It starts on `link` under `number`."""
        self.state = STARTED
        self.link, self.number, self.replica = link, number, link.name
        self.room, self.sent = WINDOW, []

    def rewind(self) -> None:
        """Nothing of what was sent to its replica was taken, and it made nothing: all of it is to be sent anew."""
        for entry in reversed(self.sent or ()):
            if entry.chunk is None:
                self.open_sources += 1
            self.inputs.appendleft(entry)
        self.handed.clear()


def make_runs(request: Request) -> list[Run]:
    """The runs of a request in the order of the pipeline, joined by the edges.

    A consumer's run reads the producer's run of its own role; what has no counterpart reads, or feeds, the main run.
    """
    by_stage: dict[str, dict[str, Run]] = {}
    for stage in request.plan.stages:
        by_stage[stage.name] = {role.role: Run(request, stage, role) for role in stage.roles}
    for stage in request.plan.stages:
        for edge in stage.edges:
            producers, consumers = by_stage[stage.name], by_stage[edge.consumer]
            for role, producer in producers.items():
                _join(producer, consumers.get(role, consumers[""]), edge)
            for role, consumer in consumers.items():
                if role not in producers:
                    _join(producers[""], consumer, edge)
    return [run for runs in by_stage.values() for run in runs.values()]


def _join(producer: Run, consumer: Run, edge: EdgePlan) -> None:
    producer.routes.append((edge, consumer))
    consumer.sources.append(producer)
    consumer.open_sources += 1
