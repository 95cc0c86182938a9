"""A replica that has joined, as this coordinator knows it."""

from __future__ import annotations

import asyncio

from omni.v1 import cluster_pb2, config_pb2, stage_pb2
from omnid.cluster.link import ReplicaLink


class Member:
    """One membership of a replica: from its hello to the end of its Join stream.

    Attributes:
        name: replica name, "tiny-omni/thinker/0".
        key: (model, stage).
        link: its Attach stream while it is up.
        replaced: set when the same place was joined anew.
        able: set once it can be attached to: its engine is built.
        chosen: when it was last chosen for a run, counted in choices; see `choose`.
    """

    def __init__(self, hello: cluster_pb2.ReplicaHello, spec: config_pb2.StageSpec, joins: int) -> None:
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
        self._foreign = 0
        self._most = 0
        """Own runs, the most at a time since the last report."""
        self._capacity = spec.max_running + spec.max_waiting

    def observe(self, load: stage_pb2.ReplicaLoad) -> None:
        """A report of it has come."""
        self.load = load
        if self.link is not None:
            self.link.refusing = False
        # Made before it came: an own run that has ended meanwhile is in it, and is nobody else's.
        self._foreign = max(0, load.running + load.waiting - self._most)
        self._most = self._own
        if load.state not in (stage_pb2.REPLICA_STATE_UNSPECIFIED, stage_pb2.REPLICA_STATE_LOADING):
            self.able.set()

    def choose(self, count: int) -> None:
        """It is about to get a run, the coordinator's choice number `count`."""
        self.chosen = count
        self._most = max(self._most, self._own + 1)

    @property
    def _own(self) -> int:
        return len(self.link.runs) if self.link else 0

    @property
    def runs(self) -> int:
        """Runs on it: this coordinator's own and, by its last report, those of others."""
        return self._own + self._foreign

    def healthy(self) -> bool:
        """Whether it is attached and says that it is ready; it is the stage that judges its engine."""
        return self.link is not None and self.link.attached and self.load.state == stage_pb2.REPLICA_STATE_READY

    def takes_work(self) -> bool:
        """Whether it can take one more run."""
        return self.runs < self._capacity and self.healthy() and not (self.link and self.link.refusing)

    def condition(self) -> str:
        """What keeps it from taking work, for people; "ready" when nothing does."""
        if self.load.state != stage_pb2.REPLICA_STATE_READY:
            state = stage_pb2.ReplicaState.Name(self.load.state).removeprefix("REPLICA_STATE_").lower()
            return f"{state}: {self.load.detail}" if self.load.detail else state
        if self.link is None or not self.link.attached:
            return self.trouble or f"being connected to at {self.hello.address.target}"
        return "ready"

    def status(self) -> cluster_pb2.ReplicaStatus:
        """For listings: the report, with what this coordinator itself sees of its health."""
        status = cluster_pb2.ReplicaStatus(
            model=self.hello.model,
            stage=self.hello.stage,
            index=self.hello.index,
            address=self.hello.address,
            pid=self.hello.pid,
            load=self.load,
            joins=self.joins,
            runs=self._own,
        )
        if self.load.state == stage_pb2.REPLICA_STATE_READY and not self.healthy():
            status.load.state = stage_pb2.REPLICA_STATE_UNHEALTHY
            status.load.detail = self.condition()
        return status
