"""From resolved pipelines to the processes of this host. Pure: nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omni.v1 import config_pb2
from omnid.cluster.door import Door

STAGE_SERVER = "stage_server.server:main"
GATEWAY = "gateway.server:main"


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to keep alive."""

    name: str
    """Of the replica, "tiny-omni/thinker/0", or "gateway"."""
    target: str
    """What it runs, "module:function"."""
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Laid over the launcher's own environment."""
    copied: bool = False
    """May start as a copy of the nursery: its environment holds nothing that libraries read when they are loaded."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    here: tuple[ProcessPlan, ...]
    elsewhere: tuple[str, ...]
    """Commands for the replicas that belong on other hosts."""
    preload: tuple[str, ...]
    """Modules that several processes are going to import."""
    env: Mapping[str, str]
    """Environment of the nursery itself."""


def plan_stages(pipelines: Sequence[config_pb2.ResolvedPipeline], door: Door, logs: Sequence[str] = ()) -> ClusterPlan:
    """Every replica of the pipelines, for the launcher on the coordinator's host.

    `door` is where they join, `logs` the arguments of those on this host for how they log.
    """
    here: list[ProcessPlan] = []
    elsewhere: list[str] = []
    for pipeline in pipelines:
        for placement in pipeline.placements:
            for index in range(placement.replicas):
                name = f"{pipeline.model}/{placement.stage}/{index}"
                if door.is_here(placement, index):
                    own = dict(placement.env)
                    env = _device_env(placement.devices[index]) | own
                    copied = not own and env == _device_env("cpu")
                    arguments = (*door.arguments(pipeline.model, placement, index), *logs)
                    here.append(ProcessPlan(name, STAGE_SERVER, arguments, env, copied))
                else:
                    elsewhere.append(door.command(pipeline.model, placement, index))
    copies = any(plan.copied for plan in here)
    return ClusterPlan(
        here=tuple(here),
        elsewhere=tuple(elsewhere),
        preload=_preload(pipelines) if copies else (),
        env=_device_env("cpu") if copies else {},
    )


def _device_env(device: str) -> dict[str, str]:
    """The environment in which a process sees its devices and no others."""
    numbers = device.partition(":")[2]
    # More than one thread in each of many processes costs factors, not percents, whichever device the model is on; it
    # must be set before torch is loaded.
    return {"CUDA_VISIBLE_DEVICES": numbers, "OMP_NUM_THREADS": "1"}


def _preload(pipelines: Sequence[config_pb2.ResolvedPipeline]) -> tuple[str, ...]:
    families = {spec.family: None for pipeline in pipelines for spec in pipeline.stages}
    return ("stage_server.server", *(f"stage_server.models.{family}" for family in families))
