"""Deployments that are to run on this host."""

from __future__ import annotations

from collections.abc import Sequence

from omni.v1 import config_pb2
from omnid.cluster.door import Door
from omnid.config import ConfigError, DeployConfig, absent_checkpoints, load_deploy, override, resolve
from omnid.launcher.plan import plan_stages


def prepare(deploy: str, overrides: Sequence[str] = ()) -> tuple[DeployConfig, list[config_pb2.ResolvedPipeline]]:
    """Reads and resolves a deployment, and looks whether this host has the checkpoints of what it is to run.

    Args:
        deploy: name of a shipped deployment, or path of a file.
        overrides: as on the command line, "models.tiny-omni.stages.thinker.max_running=4".

    Raises:
        ConfigError: with every mistake that was found.
    """
    config = override(load_deploy(deploy), overrides)
    pipelines = resolve(config)
    here = {process.name.partition("/")[0] for process in plan_stages(pipelines, Door("127.0.0.1:0")).here}
    absent = [problem for model, problem in absent_checkpoints(config, pipelines).items() if model in here]
    if absent:
        raise ConfigError(absent)
    return config, pipelines
