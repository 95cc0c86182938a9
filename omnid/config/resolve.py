"""From what was written to omni.v1.ResolvedPipeline, once; everything after it reads only the message."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

from google.protobuf.struct_pb2 import Struct

from omni.rpc.duration import duration_of
from omni.rpc.text import MODALITIES
from omni.v1 import config_pb2
from omnid.config.contract import format_number
from omnid.config.deploy import (
    ASSET,
    BOUNDS,
    SETTINGS,
    BoundsSection,
    DefaultsSection,
    DeployConfig,
    ModelSection,
    RequestBoundsSection,
    StageSection,
)
from omnid.config.document import Document, locate
from omnid.config.errors import ConfigError, Path, Problem, nearest
from omnid.config.files import load_pipeline, shipped_assets
from omnid.config.pipeline import PipelineConfig


def resolve(deploy: DeployConfig) -> list[config_pb2.ResolvedPipeline]:
    """Every model of a deployment, with all defaults filled in.

    What is said of a stage goes before what is said of its model, wherever each was said.

    Raises:
        ConfigError: with every mistake of the deployment.
    """
    problems: list[Problem] = []
    resolved: list[config_pb2.ResolvedPipeline] = []
    names: set[str] = set()
    for index, model in enumerate(deploy.models):
        path: Path = ("models", index)
        if model.name in names:
            problems.append(deploy.document.problem((*path, "name"), f"got {model.name!r} twice"))
        names.add(model.name)
        try:
            pipeline = load_pipeline(model.pipeline, deploy.document.folder)
        except FileNotFoundError as error:
            problems.append(deploy.document.problem((*path, "pipeline"), str(error)))
            continue
        except ConfigError as error:
            problems += error.problems
            continue
        problems += _mistakes(model, pipeline, deploy.document, path)
        if not problems:
            resolved.append(_resolve_model(model, pipeline, deploy.document.folder))
    if problems:
        raise ConfigError(problems)
    return resolved


def _mistakes(model: ModelSection, pipeline: PipelineConfig, document: Document, path: Path) -> list[Problem]:
    found: list[Problem] = []
    for name, stage in model.stages.items():
        at = (*path, "stages", name)
        if name not in pipeline.stages:
            message = f"pipeline {pipeline.name} has no stage {name!r}; {nearest(name, pipeline.stages)}"
            found.append(document.problem(at, message))
        if len(stage.hosts) > stage.replicas:
            message = f"got {len(stage.hosts)} hosts for {stage.replicas} replica(s)"
            found.append(document.problem((*at, "hosts"), message))
    needs_checkpoint = any(stage.kind != "synthetic" for stage in pipeline.stages.values())
    if needs_checkpoint and not model.checkpoint:
        message = f"must be given: pipeline {pipeline.name} loads a checkpoint"
        found.append(document.problem((*path, "checkpoint"), message))
    asset = model.checkpoint.removeprefix(ASSET)
    if asset != model.checkpoint and asset not in (known := shipped_assets()):
        message = f"there is no asset {asset!r}; {nearest(asset, known)}"
        found.append(document.problem((*path, "checkpoint"), message))
    return found


def _resolve_model(model: ModelSection, pipeline: PipelineConfig, folder: FilePath) -> config_pb2.ResolvedPipeline:
    order = pipeline.ordered()
    settings = {name: model.stages.get(name, StageSection()) for name in order}
    return config_pb2.ResolvedPipeline(
        model=model.name,
        pipeline=pipeline.name,
        stages=[_stage_spec(model, pipeline, name, settings[name], folder) for name in order],
        edges=[
            config_pb2.EdgeSpec(
                to=edge.consumer,
                mode=config_pb2.EdgeMode.Value(f"EDGE_MODE_{edge.mode.upper()}"),
                tensors=edge.tensors,
                **{"from": edge.producer},
            )
            for edge in pipeline.edges
        ],
        inputs=[MODALITIES[name] for name in pipeline.inputs],
        default_outputs=[MODALITIES[name] for name in pipeline.default_outputs],
        placements=[
            config_pb2.Placement(
                stage=name,
                replicas=stage.replicas,
                hosts=stage.hosts,
                devices=[stage.devices[index % len(stage.devices)] for index in range(stage.replicas)],
                env={**model.env, **stage.env},
            )
            for name, stage in settings.items()
        ],
        max_requests=model.max_requests,
        max_queued=model.max_queued,
    )


def _stage_spec(
    model: ModelSection, pipeline: PipelineConfig, name: str, stage: StageSection, folder: FilePath
) -> config_pb2.StageSpec:
    topology = pipeline.stages[name]

    def setting(key: str) -> Any:
        for section in (stage, model):
            if (value := getattr(section, key)) is not None:
                return value
        return SETTINGS[key]

    return config_pb2.StageSpec(
        stage=name,
        model=model.name,
        kind=config_pb2.StageKind.Value(f"STAGE_KIND_{topology.kind.upper()}"),
        family=topology.family,
        component=topology.component,
        checkpoint="" if topology.kind == "synthetic" else _checkpoint(model.checkpoint, folder),
        dtype=setting("dtype"),
        trust_remote_code=model.trust_remote_code,
        max_running=setting("max_running"),
        max_waiting=setting("max_waiting"),
        engine=_struct(stage.engine),
        defaults=_params(stage.defaults),
        arena_bytes=setting("arena"),
        lease=duration_of(setting("lease")),
        checksum=setting("checksum"),
        stall=duration_of(setting("stall")),
        sources=pipeline.sources(name),
        outputs=[MODALITIES[modality] for modality in topology.outputs],
        companions=[
            config_pb2.Companion(role=companion.role, negative_prompt=companion.negative_prompt)
            for companion in topology.companions
        ],
        bounds=_bounds(stage.bounds, model.bounds),
        limits=config_pb2.MediaLimits(**model.limits.model_dump()),
    )


def _checkpoint(written: str, folder: FilePath) -> str:
    if written.startswith(ASSET):
        return written
    return str(locate(folder, written).resolve())


def _bounds(stage: BoundsSection, model: RequestBoundsSection) -> config_pb2.Bounds:
    chosen = BOUNDS | model.model_dump(exclude_none=True) | stage.model_dump(exclude_none=True)
    return config_pb2.Bounds(**{name: duration_of(seconds) for name, seconds in chosen.items()})


def _params(defaults: DefaultsSection) -> config_pb2.StageParams:
    params = config_pb2.StageParams(voice=defaults.voice)
    if defaults.sampling is not None:
        params.sampling.CopyFrom(config_pb2.SamplingParams(**defaults.sampling.model_dump(exclude_none=True)))
    if defaults.diffusion is not None:
        params.diffusion.CopyFrom(config_pb2.DiffusionParams(**defaults.diffusion.model_dump(exclude_none=True)))
    if defaults.format is not None:
        params.format = format_number(defaults.format)
    if defaults.extra:
        params.extra.CopyFrom(_struct(defaults.extra))
    return params


def _struct(arguments: dict[str, Any]) -> Struct:
    struct = Struct()
    struct.update(arguments)
    return struct
