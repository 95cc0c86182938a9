"""A pipeline file: what is computed, in which stages, and what flows between them."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from omnid.config.document import Document
from omnid.config.errors import ConfigError, Path, nearest
from omnid.config.section import ModalityName, Name, Section, check

StageKindName = Literal["autoregressive", "generation", "diffusion", "synthetic"]
EdgeModeName = Literal["stream", "end"]
TensorName = Annotated[str, Field(min_length=1, max_length=64)]

_MAKES: dict[StageKindName, frozenset[ModalityName]] = {
    "autoregressive": frozenset({"text", "image", "audio", "action"}),
    "generation": frozenset({"image", "audio", "video"}),
    "diffusion": frozenset({"image", "audio", "video", "action"}),
    "synthetic": frozenset({"text", "image", "audio", "video", "action"}),
}


class CompanionSection(Section):
    """One more run of the stage for the same request."""

    role: Name
    negative_prompt: bool = False
    """Takes the request's negative prompt; left out when the request has none."""


class StageTopology(Section):
    kind: StageKindName
    family: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Package of the stage server that knows the model, "qwen3_omni"."""
    component: str = ""
    """Part of the checkpoint, in the family's words."""
    outputs: list[ModalityName] = Field(default_factory=list)
    """What of its output goes to clients."""
    sources: list[Name] | None = None
    """Stages that it reads, in the order in which it wants them; left out: those whose edges lead to it."""
    companions: list[CompanionSection] = Field(default_factory=list)


class EdgeSection(Section):
    producer: Name = Field(alias="from")
    consumer: Name = Field(alias="to")
    mode: EdgeModeName
    """Whether the consumer starts with the first chunk or when its producers have finished."""
    tensors: list[TensorName] = Field(default_factory=list)
    """Names of the tensors that the producer publishes for it."""


class PipelineConfig(Section):
    """Topology only: nothing here says where a stage runs."""

    name: Name
    inputs: Annotated[list[ModalityName], Field(min_length=1)]
    """What clients may send."""
    default_outputs: Annotated[list[ModalityName], Field(min_length=1)]
    """What a request gets that does not say."""
    stages: Annotated[dict[Name, StageTopology], Field(min_length=1, max_length=64)]
    edges: list[EdgeSection] = Field(default_factory=list)

    _document: Document | None = PrivateAttr(default=None)

    def sources(self, stage: str) -> list[str]:
        """Stages that `stage` reads; empty: it reads the prompt."""
        declared = self.stages[stage].sources
        return list(declared) if declared else [edge.producer for edge in self.edges if edge.consumer == stage]

    def ordered(self) -> list[str]:
        """Stage names, producers before consumers, else as they were written."""
        rank = {name: index for index, name in enumerate(self.stages)}
        sorter = TopologicalSorter({name: set(self.sources(name)) for name in self.stages})
        sorter.prepare()
        order: list[str] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=rank.__getitem__)
            order += ready
            sorter.done(*ready)
        return order


def read_pipeline(document: Document) -> PipelineConfig:
    """Reads and checks a pipeline.

    Raises:
        ConfigError: with every mistake in it.
    """
    config = check(PipelineConfig, document)
    problems = [document.problem(path, message) for path, message in _mistakes(config)]
    if problems:
        raise ConfigError(problems)
    config._document = document
    return config


Mistake = tuple[Path, str]


def _mistakes(config: PipelineConfig) -> Iterator[Mistake]:
    edges = list(_edge_mistakes(config))
    yield from edges
    yield from _stage_mistakes(config)
    yield from _output_mistakes(config)
    for index, modality in enumerate(config.inputs):
        if modality == "action":
            yield ("inputs", index), "got 'action'; clients send text, image, audio or video"
    if not edges:
        yield from _cycle(config)


def _edge_mistakes(config: PipelineConfig) -> Iterator[Mistake]:
    seen: set[tuple[str, str]] = set()
    modes: dict[str, EdgeModeName] = {}
    for index, edge in enumerate(config.edges):
        path: Path = ("edges", index)
        for key, stage in (("from", edge.producer), ("to", edge.consumer)):
            if stage not in config.stages:
                yield (*path, key), f"got {stage!r}, which is no stage; {nearest(stage, config.stages)}"
        pair = (edge.producer, edge.consumer)
        if pair in seen:
            yield path, f"a second edge from {edge.producer} to {edge.consumer}; put its tensors into the first"
        seen.add(pair)
        mode = modes.setdefault(edge.consumer, edge.mode)
        if mode != edge.mode:
            yield (
                (*path, "mode"),
                f"got {edge.mode!r}; all edges to {edge.consumer} must have one mode, and others {mode}",
            )
        producer = config.stages.get(edge.producer)
        if producer and producer.companions and edge.mode != "end":
            yield (
                (*path, "mode"),
                f"got {edge.mode!r}; {edge.producer} has companions, so its consumers must wait: 'end'",
            )


def _cycle(config: PipelineConfig) -> Iterator[Mistake]:
    try:
        config.ordered()
    except CycleError as error:
        yield ("edges",), f"go in a circle: {' -> '.join(reversed(error.args[1]))}"


def _stage_mistakes(config: PipelineConfig) -> Iterator[Mistake]:
    for name, stage in config.stages.items():
        path: Path = ("stages", name)
        producers = {edge.producer for edge in config.edges if edge.consumer == name}
        if stage.sources is not None and set(stage.sources) != producers:
            got = ", ".join(stage.sources) or "none"
            yield (*path, "sources"), f"got {got}; its edges come from: {', '.join(sorted(producers)) or 'none'}"
        if stage.kind == "synthetic" and stage.family != "synthetic":
            yield (*path, "family"), f"got {stage.family!r}; a stage of kind synthetic is of family 'synthetic'"
        if stage.family == "synthetic" and stage.kind != "synthetic":
            yield (*path, "kind"), f"got {stage.kind!r}; a stage of family synthetic is of kind 'synthetic'"
        for index, modality in enumerate(stage.outputs):
            if modality not in _MAKES[stage.kind]:
                allowed = nearest(modality, _MAKES[stage.kind])
                yield (*path, "outputs", index), f"got {modality!r}, which no {stage.kind} stage makes; {allowed}"
        if not stage.outputs and not any(edge.producer == name for edge in config.edges):
            yield path, "has neither an output for clients nor an edge to another stage, so nothing would use it"
        roles: set[str] = set()
        for index, companion in enumerate(stage.companions):
            if companion.role in roles:
                yield (*path, "companions", index, "role"), f"got {companion.role!r} twice"
            roles.add(companion.role)
            if companion.negative_prompt and producers:
                yield (
                    (*path, "companions", index),
                    f"takes the negative prompt, but {name} reads other stages, no prompt",
                )


def _output_mistakes(config: PipelineConfig) -> Iterator[Mistake]:
    makers: dict[ModalityName, str] = {}
    for name, stage in config.stages.items():
        for index, modality in enumerate(stage.outputs):
            first = makers.setdefault(modality, name)
            if first != name:
                yield ("stages", name, "outputs", index), f"got {modality!r}, which {first} already gives to clients"
    for index, modality in enumerate(config.default_outputs):
        if modality not in makers:
            yield ("default_outputs", index), f"got {modality!r}, which no stage outputs; {nearest(modality, makers)}"
