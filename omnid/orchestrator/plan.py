"""Which stages of a pipeline take part in a request, and how they feed each other. Pure; made once for each choice of
outputs and shared by all requests that choose so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from omni.rpc.duration import seconds_of
from omni.v1 import config_pb2


@dataclass(frozen=True, slots=True)
class Waits:
    """Bounds of a stage's waits, in seconds; see omni.v1.Bounds."""

    queue: float
    first_output: float
    gap: float
    cancel: float


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """From one stage to the next."""

    producer: str
    consumer: str
    at_end: bool
    """The consumer starts when every producer of such an edge has finished."""
    tensors: frozenset[str]
    """Names that the producer publishes for this edge."""

    @property
    def name(self) -> str:
        """As errors and metrics call it."""
        return f"{self.producer}->{self.consumer}"


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One run of a stage: the main run ("") or a companion."""

    role: str = ""
    negative_prompt: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """A stage that takes part."""

    model: str
    name: str
    roles: tuple[RolePlan, ...]
    takes_prompt: bool
    to_client: bool
    """Its main run's output goes to the client."""
    modalities: frozenset[int]
    """Of that output, numbers of omni.v1.Modality."""
    tensors: tuple[str, ...]
    """What its runs publish: the union over the edges to stages that take part."""
    waits: Waits
    edges: tuple[EdgePlan, ...]
    """Outgoing."""
    starts_at_end: bool
    """It has an incoming edge of that mode."""
    key: tuple[str, str] = field(init=False)
    """(model, stage): what replicas are looked up by."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.model, self.name))


@dataclass(frozen=True, slots=True, eq=False)
class RequestPlan:
    """What a request runs."""

    model: str
    stages: tuple[StagePlan, ...]
    """In the order of the pipeline."""
    total: float
    """Seconds for a whole request, whatever time it asks for."""
    queue: float
    """Seconds that a request may wait for its turn."""
    max_requests: int
    max_queued: int


def make_plan(pipeline: config_pb2.ResolvedPipeline, outputs: Iterable[int], *, negative: bool) -> RequestPlan:
    """The stages that `outputs` need: those that make them and, up the edges, all that feed those.

    Args:
        pipeline: as resolved.
        outputs: wanted modalities; each must be the output of a stage.
        negative: whether the request has a negative prompt; without one, companions that take it are left out.
    """
    wanted = frozenset(outputs)
    to_client = {spec.stage for spec in pipeline.stages if wanted.intersection(spec.outputs)}
    part = set(to_client)
    frontier = list(part)
    while frontier:
        consumer = frontier.pop()
        for edge in pipeline.edges:
            if edge.to == consumer and (producer := _producer(edge)) not in part:
                part.add(producer)
                frontier.append(producer)
    edges = [
        EdgePlan(_producer(edge), edge.to, edge.mode == config_pb2.EDGE_MODE_END, frozenset(edge.tensors))
        for edge in pipeline.edges
        if edge.to in part
    ]
    stages = tuple(
        _stage(pipeline.model, spec, edges, spec.stage in to_client, negative)
        for spec in pipeline.stages
        if spec.stage in part
    )
    return RequestPlan(
        model=pipeline.model,
        stages=stages,
        total=max(seconds_of(spec.bounds.total) for spec in pipeline.stages),
        queue=max(stage.waits.queue for stage in stages),
        max_requests=pipeline.max_requests,
        max_queued=pipeline.max_queued,
    )


def _producer(edge: config_pb2.EdgeSpec) -> str:
    name: str = getattr(edge, "from")
    return name


def _stage(model: str, spec: config_pb2.StageSpec, edges: list[EdgePlan], to_client: bool, negative: bool) -> StagePlan:
    outgoing = tuple(edge for edge in edges if edge.producer == spec.stage)
    companions = (
        RolePlan(companion.role, companion.negative_prompt)
        for companion in spec.companions
        if negative or not companion.negative_prompt
    )
    return StagePlan(
        model=model,
        name=spec.stage,
        roles=(RolePlan(), *companions),
        takes_prompt=not spec.sources,
        to_client=to_client,
        modalities=frozenset(spec.outputs),
        tensors=tuple(sorted(frozenset().union(*(edge.tensors for edge in outgoing)))),
        waits=_waits(spec.bounds),
        edges=outgoing,
        starts_at_end=any(edge.at_end for edge in edges if edge.consumer == spec.stage),
    )


def _waits(bounds: config_pb2.Bounds) -> Waits:
    return Waits(
        queue=seconds_of(bounds.queue),
        first_output=seconds_of(bounds.first_output),
        gap=seconds_of(bounds.gap),
        cancel=seconds_of(bounds.cancel),
    )
