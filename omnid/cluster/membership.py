"""Which replicas there are. A replica belongs to the cluster for as long as its Join stream is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from omni.rpc import logs
from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.rpc.text import shown
from omni.v1 import cluster_pb2, config_pb2, stage_pb2, tensor_pb2
from omnid.cluster.door import Door
from omnid.cluster.member import Member
from omnid.cluster.routing import least_loaded
from omnid.config.errors import nearest
from omnid.orchestrator.plan import StagePlan
from omnid.orchestrator.ports import Link

Key = tuple[str, str]

_log = logs.get(__name__)


class Cluster:
    """Places of the deployment and the members that fill them; the orchestrator's router. Owned by the event loop."""

    def __init__(self, pipelines: Sequence[config_pb2.ResolvedPipeline]) -> None:
        self.pipelines = {pipeline.model: pipeline for pipeline in pipelines}
        self._specs = {(spec.model, spec.stage): spec for pipeline in pipelines for spec in pipeline.stages}
        self._placements = {
            (pipeline.model, placement.stage): placement for pipeline in pipelines for placement in pipeline.placements
        }
        self.door: Door | None = None
        """Where replicas join, once it is known."""
        self._members: dict[Key, dict[int, Member]] = {key: {} for key in self._specs}
        self._by_name: dict[str, Member] = {}
        self._joins: dict[str, int] = {}
        self._been_ready: set[str] = set()
        self._choices = 0
        self._notices: set[asyncio.Future[None]] = set()
        self.on_room: Callable[[Key], None] = lambda _key: None
        """Called when a stage may have become able to take a run."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a replica came, went, or changed its state."""

    # -- membership --------------------------------------------------------------------------------------------------

    def enter(self, hello: cluster_pb2.ReplicaHello) -> Member:
        """Takes a replica in; one that held the same place is replaced.

        Raises:
            OmniError: there is no such model or stage.
        """
        key = (hello.model, hello.stage)
        if hello.model not in self.pipelines:
            told = f"no model {shown(hello.model)}; {nearest(hello.model, self.pipelines)}"
            raise invalid(FieldViolation("hello.model", told), reason=Reason.UNKNOWN_MODEL)
        if key not in self._specs:
            stages = [stage for model, stage in self._specs if model == hello.model]
            told = f"model {hello.model} has no stage {shown(hello.stage)}; {nearest(hello.stage, stages)}"
            raise invalid(FieldViolation("hello.stage", told), reason=Reason.NOT_FOUND)
        name = f"{hello.model}/{hello.stage}/{hello.index}"
        if hello.address.replica != name:
            told = f"must be {name!r}, got {shown(hello.address.replica)}"
            raise invalid(FieldViolation("hello.address.replica", told))
        self._joins[name] = self._joins.get(name, 0) + 1
        member = Member(hello, self._specs[key], self._joins[name])
        if (before := self._by_name.get(member.name)) is not None:
            before.replaced.set()
        self._members[key][hello.index] = self._by_name[member.name] = member
        _log.info("replica_joined", replica=member.name, target=hello.address.target, pid=hello.pid)
        self.notice()
        return member

    def report(self, member: Member, load: stage_pb2.ReplicaLoad) -> None:
        """A member says how it does."""
        before = member.load.state
        member.observe(load)
        if load.state == stage_pb2.REPLICA_STATE_READY:
            self._been_ready.add(member.name)
        if load.state != before:
            _log.info("replica_state", replica=member.name, condition=member.condition())
            self.notice()
        self.on_room(member.key)

    def leave(self, member: Member) -> None:
        """Its Join stream has ended."""
        if self._by_name.get(member.name) is member:
            del self._by_name[member.name]
            del self._members[member.key][member.hello.index]
            _log.info("replica_left", replica=member.name)
            self.notice()

    def notice(self) -> None:
        """Something about a replica has changed: who waits for readiness looks again."""
        for notice in self._notices:
            if not notice.done():
                notice.set_result(None)
        self.on_change()

    # -- the orchestrator's router -----------------------------------------------------------------------------------

    def route(self, stage: StagePlan) -> Link | None:
        member = least_loaded(self._members[stage.key].values())
        if member is None:
            return None
        self._choices += 1
        member.choose(self._choices)
        return member.link

    def release(self, owner: str, lease: int) -> None:
        member = self._by_name.get(owner)
        if member is not None and member.link is not None:
            member.link.release(lease)

    def missing(self, stage: StagePlan) -> str:
        return self._missing_stage(stage.key)

    def address(self, replica: str) -> tensor_pb2.ReplicaAddress | None:
        """How to reach a replica's tensors; None when it has left."""
        member = self._by_name.get(replica)
        return member.hello.address if member is not None else None

    # -- readiness ---------------------------------------------------------------------------------------------------

    def ready(self, model: str) -> bool:
        """Whether every stage of a model has a healthy replica."""
        return all(
            any(member.healthy() for member in members.values())
            for key, members in self._members.items()
            if key[0] == model
        )

    def voices(self, model: str) -> dict[str, Sequence[str]]:
        """Speakers of each stage of a model that has said them."""
        said = (
            (key[1], member.load.voices)
            for key, members in self._members.items()
            if key[0] == model
            for member in members.values()
        )
        return {stage: voices for stage, voices in said if voices}

    def has_been_ready(self, replica: str) -> bool:
        """Whether a replica of that name has ever said that it is ready."""
        return replica in self._been_ready

    def missing_replicas(self) -> str:
        """What `wait_ready` waits for, for people; "" when nothing is missing."""
        return "; ".join(filter(None, (self._missing_stage(key) for key in self._specs)))

    async def wait_ready(self, timeout: float) -> None:
        """Waits until every stage of every model has a healthy replica.

        Raises:
            OmniError: NO_REPLICA after `timeout` seconds, with what is missing and what it said last.
        """
        try:
            async with asyncio.timeout(timeout):
                while not all(self.ready(model) for model in self.pipelines):
                    notice = asyncio.get_running_loop().create_future()
                    self._notices.add(notice)
                    try:
                        await notice
                    finally:
                        self._notices.discard(notice)
        except TimeoutError as error:
            message = f"not ready after {timeout:g} s: {self.missing_replicas()}"
            raise OmniError(Reason.NO_REPLICA, message) from error

    def statuses(self) -> list[cluster_pb2.ReplicaStatus]:
        """Every place of the deployment, and every member beyond them, in the pipelines' order."""
        listed: list[cluster_pb2.ReplicaStatus] = []
        for (model, stage), members in self._members.items():
            for index in sorted({*range(self._placements[model, stage].replicas), *members}):
                if member := members.get(index):
                    listed.append(member.status())
                else:
                    joins = self._joins.get(f"{model}/{stage}/{index}", 0)
                    listed.append(cluster_pb2.ReplicaStatus(model=model, stage=stage, index=index, joins=joins))
        return listed

    def _missing_stage(self, key: Key) -> str:
        model, stage = key
        members = self._members[key]
        if any(member.healthy() for member in members.values()):
            return ""
        if members:
            return "; ".join(f"{member.name}: {member.condition()}" for member in members.values())
        went = any(name.startswith(f"{model}/{stage}/") for name in self._joins)
        what = "has left and not come back" if went else "has not joined"
        start = f" (start it with: {self.door.command(model, self._placements[key], 0)})" if self.door else ""
        return f"{model}/{stage}/0 {what}{start}"
