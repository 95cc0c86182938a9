"""Membership, health and routing: which replicas there are, how they do, and which one takes the next run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from omni.rpc import logs
from omni.rpc.errors import FieldViolation, OmniError, Reason
from omni.v1 import cluster_pb2, config_pb2, stage_pb2
from omnid.cluster.link import Link
from omnid.orchestrator.ports import Replica

REPORT_SECONDS = 1.0
"""Longest time between two load reports of a replica."""
_SILENCE = 5 * REPORT_SECONDS
"""After this time without a report a replica whose stream is up counts as unhealthy."""

_log = logs.get(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One place for a replica in the deployment, and the replica that has taken it."""

    model: str
    spec: config_pb2.StageSpec
    index: int
    hello: cluster_pb2.ReplicaHello | None = None
    load: stage_pb2.ReplicaLoad = field(default_factory=stage_pb2.ReplicaLoad)
    link: Link | None = None
    joins: int = 0
    runs: int = 0
    """Runs of this coordinator on it."""
    steps: int = -1
    moved: float = 0.0
    """When `steps` last changed, or it was idle, by the monotonic clock."""
    reported: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.model}/{self.spec.stage}/{self.index}"

    @property
    def healthy(self) -> bool:
        """Whether it makes progress, as far as its reports tell."""
        now = time.monotonic()
        stall = self.spec.stall.ToNanoseconds() / 1e9
        return now - self.reported < _SILENCE and now - self.moved < (stall or now)

    @property
    def usable(self) -> bool:
        """Whether it takes runs."""
        return self.link is not None and self.load.state == stage_pb2.REPLICA_STATE_READY and self.healthy

    @property
    def work(self) -> int:
        """Runs on it, of every coordinator."""
        return max(self.runs, self.load.running + self.load.waiting)

    def report(self, load: stage_pb2.ReplicaLoad) -> None:
        """Takes a load report in."""
        now = self.reported = time.monotonic()
        if load.steps != self.steps or not (load.running or load.waiting):
            self.steps, self.moved = load.steps, now
        self.load = load

    def status(self) -> cluster_pb2.ReplicaStatus:
        """What `omnid ps` shows."""
        status = cluster_pb2.ReplicaStatus(
            model=self.model, stage=self.spec.stage, index=self.index, joins=self.joins, runs=self.runs
        )
        if self.hello is not None:
            status.address.CopyFrom(self.hello.address)
            status.pid = self.hello.pid
            status.load.CopyFrom(self.load)
            if self.load.state == stage_pb2.REPLICA_STATE_READY and not self.healthy:
                status.load.state = stage_pb2.REPLICA_STATE_UNHEALTHY
                status.load.detail = "has work and makes no progress, or does not report"
        return status


class Cluster:
    """All places of the deployment; implements `orchestrator.Router`."""

    def __init__(self, pipelines: Sequence[config_pb2.ResolvedPipeline]) -> None:
        self._stages: dict[tuple[str, str], list[Member]] = {}
        for pipeline in pipelines:
            replicas = {each.stage: each.replicas for each in pipeline.placements}
            for spec in pipeline.stages:
                self._stages[pipeline.model, spec.stage] = [
                    Member(pipeline.model, spec, index) for index in range(replicas.get(spec.stage, 1))
                ]
        self._links: dict[str, Link] = {}
        self._watchers: set[asyncio.Event] = set()
        self.on_up: Callable[[str, str], None] = lambda _model, _stage: None
        """Called when a replica of (model, stage) may have room for a run."""
        self.on_down: Callable[[Replica], None] = lambda _replica: None
        """Called when a replica's stream has ended."""

    def __iter__(self) -> Iterator[Member]:
        return (member for members in self._stages.values() for member in members)

    # `orchestrator.Router`.

    def place(self, model: str, stage: str, avoid: frozenset[str]) -> Replica | None:
        """The usable replica with the least work, its new run counted; None when all are full, away or to avoid."""
        best: Member | None = None
        for member in self._stages[model, stage]:
            room = member.spec.max_running + member.spec.max_waiting
            free = member.usable and member.runs < room and member.name not in avoid
            if free and (best is None or member.work < best.work):
                best = member
        if best is None:
            return None
        best.runs += 1
        return best.link

    def unplace(self, replica: Replica) -> None:
        """A run on the replica has ended."""
        for member in self:
            if member.link is replica:
                member.runs -= 1
                if member.usable:
                    self.on_up(member.model, member.spec.stage)
                return

    def find(self, name: str) -> Replica | None:
        """The connected replica of that name."""
        return self._links.get(name)

    # Membership.

    def admit(self, hello: cluster_pb2.ReplicaHello) -> Member:
        """The place that a joining replica takes.

        Raises:
            OmniError: NOT_FOUND when the deployment has no such place, BAD_REQUEST when it is taken.
        """
        members = self._stages.get((hello.model, hello.stage))
        if members is None:
            known = ", ".join(f"{model}/{stage}" for model, stage in self._stages)
            raise OmniError(Reason.NOT_FOUND, f"there is no stage {hello.model}/{hello.stage}; there are {known}")
        if hello.index >= len(members):
            raise OmniError(
                Reason.NOT_FOUND, f"{hello.model}/{hello.stage} has {len(members)} replicas; {hello.index} is none"
            )
        member = members[hello.index]
        if hello.address.replica != member.name:
            text = f"must be {member.name!r}, is {hello.address.replica!r}"
            raise OmniError(
                Reason.BAD_REQUEST,
                f"address.replica: {text}",
                fields=[FieldViolation("hello.address.replica", text)],
            )
        if member.hello is not None:
            raise OmniError(Reason.BAD_REQUEST, f"{member.name} has joined already, from pid {member.hello.pid}")
        member.hello = hello
        member.joins += 1
        member.steps = -1
        member.reported = member.moved = time.monotonic()
        return member

    def connected(self, member: Member, link: Link) -> None:
        """Commands can be sent to the replica."""
        member.link = link
        member.runs = 0
        self._links[member.name] = link
        self._tell(member)

    def reported(self, member: Member, load: stage_pb2.ReplicaLoad) -> None:
        """The replica says how it does."""
        state = member.load.state
        member.report(load)
        if load.state != state:
            _log.info("replica", replica=member.name, state=stage_pb2.ReplicaState.Name(load.state), detail=load.detail)
        self._tell(member)

    def left(self, member: Member) -> None:
        """The replica's Join stream, or its Attach stream, has ended."""
        link, member.link, member.hello = member.link, None, None
        member.load = stage_pb2.ReplicaLoad()
        self._links.pop(member.name, None)
        if link is not None:
            self.on_down(link)
        member.runs = 0
        self._tell(member)

    def _tell(self, member: Member) -> None:
        if member.usable:
            self.on_up(member.model, member.spec.stage)
        for watcher in self._watchers:
            watcher.set()

    # Readiness.

    def missing(self) -> list[str]:
        """Names of the replicas that do not take runs."""
        return [member.name for member in self if not member.usable]

    def serves(self, model: str) -> bool:
        """Whether every stage of the model has a replica that takes runs."""
        return all(
            any(member.usable for member in members) for (name, _), members in self._stages.items() if name == model
        )

    async def wait_ready(self, timeout: float) -> None:
        """Returns when every replica takes runs.

        Raises:
            TimeoutError: after `timeout` seconds, with the names of those that are missing.
        """
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            async with asyncio.timeout(timeout):
                while self.missing():
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            raise TimeoutError(f"not ready after {timeout:g} s: {', '.join(self.missing())}") from None
        finally:
            self._watchers.discard(changed)
