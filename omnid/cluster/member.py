"""A replica that has joined, as this coordinator knows it."""

from __future__ import annotations

import asyncio

from omni.rpc.duration import seconds_of
from omni.v1 import cluster_pb2, config_pb2, stage_pb2
from omnid.cluster.health import Progress
from omnid.cluster.link import ReplicaLink


class Member:
    """One membership of a replica: from its hello to the end of its Join stream.

    Attributes:
        name: replica name, "tiny-omni/thinker/0".
        key: (model, stage).
        link: its Attach stream while it is up.
        replaced: set when the same place was joined anew.
        able: set once it can be attached to: its engine is built.
        chosen: when it was last chosen for a run, counted in choices.
    """

    def __init__(self, hello: cluster_pb2.ReplicaHello, spec: config_pb2.StageSpec, joins: int, now: float) -> None:
        self.hello = hello
        self.spec = spec
        self.joins = joins
        self.name = f"{hello.model}/{hello.stage}/{hello.index}"
        self.key = (hello.model, hello.stage)
        self.load = stage_pb2.ReplicaLoad(state=stage_pb2.REPLICA_STATE_LOADING)
        self.link: ReplicaLink | None = None
        self.trouble = ""
        """Why there is no Attach stream, as far as it is known."""
        self.replaced = asyncio.Event()
        self.able = asyncio.Event()
        self.chosen = 0
        self._progress = Progress(seconds_of(spec.stall), now)
        self._foreign = 0
        self._capacity = spec.max_running + spec.max_waiting

    def observe(self, load: stage_pb2.ReplicaLoad, now: float) -> None:
        """A report of it has come."""
        self.load = load
        if self.link is not None:
            self.link.refusing = False
        self._progress.observe(load, now)
        own = len(self.link.runs) if self.link else 0
        self._foreign = max(0, load.running + load.waiting - own)
        if load.state not in (stage_pb2.REPLICA_STATE_UNSPECIFIED, stage_pb2.REPLICA_STATE_LOADING):
            self.able.set()

    @property
    def runs(self) -> int:
        """Runs on it: this coordinator's own and, by its last report, those of others."""
        return (len(self.link.runs) if self.link else 0) + self._foreign

    def healthy(self, now: float) -> bool:
        """Whether it is attached, says that it is ready, and makes progress when it has work."""
        link = self.link
        return (
            link is not None
            and link.attached
            and self.load.state == stage_pb2.REPLICA_STATE_READY
            and not self._progress.stalled(now)
        )

    def takes_work(self, now: float) -> bool:
        """Whether it can take one more run."""
        return self.runs < self._capacity and self.healthy(now) and not (self.link and self.link.refusing)

    def condition(self, now: float) -> str:
        """What keeps it from taking work, for people; "ready" when nothing does."""
        if stalled := self._progress.stalled(now):
            return f"has work and made no step for {stalled:.0f} s"
        if self.load.state != stage_pb2.REPLICA_STATE_READY:
            state = stage_pb2.ReplicaState.Name(self.load.state).removeprefix("REPLICA_STATE_").lower()
            return f"{state}: {self.load.detail}" if self.load.detail else state
        if self.link is None or not self.link.attached:
            return self.trouble or f"being connected to at {self.hello.address.target}"
        return "ready"

    def status(self, now: float) -> cluster_pb2.ReplicaStatus:
        """For listings: the report, with what this coordinator itself sees of its health."""
        status = cluster_pb2.ReplicaStatus(
            model=self.hello.model,
            stage=self.hello.stage,
            index=self.hello.index,
            address=self.hello.address,
            pid=self.hello.pid,
            load=self.load,
            joins=self.joins,
            runs=len(self.link.runs) if self.link else 0,
        )
        if self.load.state == stage_pb2.REPLICA_STATE_READY and not self.healthy(now):
            status.load.state = stage_pb2.REPLICA_STATE_UNHEALTHY
            status.load.detail = self.condition(now)
        return status
