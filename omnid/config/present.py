"""What a deployment names and a host must have: looked for before anything is started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

from omni.v1 import config_pb2
from omnid.config.deploy import ASSET, DeployConfig
from omnid.config.errors import Problem


def absent_checkpoints(deploy: DeployConfig, pipelines: Sequence[config_pb2.ResolvedPipeline]) -> Mapping[str, Problem]:
    """What is wrong with the checkpoint folders on this host, by name of the model. What the folders must hold is
    known to the stages that load them.

    Args:
        deploy: where the folders are named.
        pipelines: what `deploy` resolves to.
    """
    found: dict[str, Problem] = {}
    for index, pipeline in enumerate(pipelines):
        written = next((spec.checkpoint for spec in pipeline.stages if spec.checkpoint), "")
        if not written or written.startswith(ASSET) or _is_folder(written):
            continue
        message = f"{written} is not a folder on this host"
        found[pipeline.model] = deploy.document.problem(("models", index, "checkpoint"), message)
    return found


def _is_folder(name: str) -> bool:
    with contextlib.suppress(OSError):  # Of names that no file system takes.
        return FilePath(name).is_dir()
    return False


def unread_arguments(deploy: DeployConfig) -> list[Problem]:
    """Keys that only a stage server can check, when it starts."""
    return [
        deploy.document.problem(
            ("models", index, "stages", name, "engine"),
            f"{', '.join(stage.engine)}: checked by the stage server when it starts, not here",
        )
        for index, model in enumerate(deploy.models)
        for name, stage in model.stages.items()
        if stage.engine
    ]
