"""What the orchestrator needs to know of a pipeline, looked up once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omni.v1 import config_pb2, content_pb2


@dataclass(frozen=True, slots=True)
class BoundSeconds:
    """`omni.v1.Bounds` in seconds."""

    queue: float
    first_output: float
    gap: float
    cancel: float
    total: float

    @classmethod
    def of(cls, bounds: config_pb2.Bounds) -> BoundSeconds:
        return cls(
            *(
                getattr(bounds, name).ToNanoseconds() / 1e9
                for name in ("queue", "first_output", "gap", "cancel", "total")
            )
        )


@dataclass(frozen=True, slots=True)
class Edge:
    producer: str
    consumer: str
    waits: bool
    """The consumer starts when the producer has finished."""
    tensors: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.producer}->{self.consumer}"


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    spec: config_pb2.StageSpec
    bounds: BoundSeconds
    inputs: tuple[Edge, ...]
    consumers: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A resolved pipeline, indexed."""

    resolved: config_pb2.ResolvedPipeline
    stages: dict[str, Stage]
    """By name, in the order of the pipeline."""

    @classmethod
    def of(cls, resolved: config_pb2.ResolvedPipeline) -> Pipeline:
        edges = [
            Edge(getattr(each, "from"), each.to, each.mode == config_pb2.EDGE_MODE_END, tuple(each.tensors))
            for each in resolved.edges
        ]
        return cls(
            resolved,
            {
                spec.stage: Stage(
                    name=spec.stage,
                    spec=spec,
                    bounds=BoundSeconds.of(spec.bounds),
                    inputs=tuple(edge for edge in edges if edge.consumer == spec.stage),
                    consumers=tuple(edge for edge in edges if edge.producer == spec.stage),
                )
                for spec in resolved.stages
            },
        )

    def output_stage(self, modality: content_pb2.Modality.ValueType) -> Stage | None:
        """The stage whose output of this modality goes to clients."""
        return next((stage for stage in self.stages.values() if modality in stage.spec.outputs), None)

    def needed(self, outputs: Iterable[content_pb2.Modality.ValueType]) -> frozenset[str]:
        """Names of the stages that take part when these outputs are wanted."""
        found: set[str] = set()
        open_ = [stage.name for modality in outputs if (stage := self.output_stage(modality))]
        while open_:
            name = open_.pop()
            if name not in found:
                found.add(name)
                open_.extend(edge.producer for edge in self.stages[name].inputs)
        return frozenset(found)
