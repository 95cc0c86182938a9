"""From resolved pipelines to the processes of this host. Pure: nothing is started here."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omni.v1 import config_pb2

STAGE_SERVER = "stage_server.server:main"
GATEWAY = "gateway.server:main"

_EVERYWHERE = frozenset({"0.0.0.0", "[::]"})
_HERE = frozenset({"", "localhost", "127.0.0.1", "::1"})


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


def plan_stages(
    pipelines: Sequence[config_pb2.ResolvedPipeline],
    coordinator: str,
    host: str = "",
    tls: Sequence[str] = (),
    logs: Sequence[str] = (),
) -> ClusterPlan:
    """Every replica of the pipelines, for the launcher on `host` (empty: this machine's own name).

    `coordinator` is the gRPC target that the stage servers join, `tls` their arguments for its files, `logs` those for
    how they log on this host.
    """
    host = host or socket.gethostname()
    here: list[ProcessPlan] = []
    elsewhere: list[str] = []
    for pipeline in pipelines:
        for placement in pipeline.placements:
            for index in range(placement.replicas):
                arguments = ("--model", pipeline.model, "--stage", placement.stage, "--index", str(index), *tls)
                name = f"{pipeline.model}/{placement.stage}/{index}"
                where = placement.hosts[index] if index < len(placement.hosts) else ""
                if where in _HERE or where == host:
                    own = dict(placement.env)
                    env = _device_env(placement.devices[index]) | own
                    copied = not own and env == _device_env("cpu")
                    own_arguments = ("--coordinator", _reached(coordinator, "127.0.0.1"), *arguments, *logs)
                    here.append(ProcessPlan(name, STAGE_SERVER, own_arguments, env, copied))
                else:
                    joins = (
                        "--coordinator",
                        _reached(coordinator, host),
                        "--listen",
                        "0.0.0.0:0",
                        "--advertise",
                        where,
                    )
                    elsewhere.append(" ".join(("stage-server", *joins, *arguments)))
    copies = any(plan.copied for plan in here)
    return ClusterPlan(
        here=tuple(here),
        elsewhere=tuple(elsewhere),
        preload=_preload(pipelines) if copies else (),
        env=_device_env("cpu") if copies else {},
    )


def _reached(address: str, host: str) -> str:
    """An address to connect to: one that listens everywhere is reached by `host`."""
    listens, _, port = address.rpartition(":")
    return f"{host}:{port}" if listens in _EVERYWHERE else address


def _device_env(device: str) -> dict[str, str]:
    """The environment in which a process sees its devices and no others."""
    kind, _, numbers = device.partition(":")
    if kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": numbers}
    # More than one thread a process on few cores costs factors, not percents; it must be set before torch is loaded.
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _preload(pipelines: Sequence[config_pb2.ResolvedPipeline]) -> tuple[str, ...]:
    families = {spec.family: None for pipeline in pipelines for spec in pipeline.stages}
    return ("stage_server.server", *(f"stage_server.models.{family}" for family in families))
