"""Keeps a member attached: one Attach stream, made anew when it breaks, for as long as the member is there."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import grpc

from omni.rpc import logs
from omni.rpc.channel import make_channel
from omni.rpc.tls import ClientTls
from omni.v1.stage_pb2_grpc import StageServiceStub
from omnid.cluster.link import ReplicaLink
from omnid.cluster.member import Member
from omnid.cluster.membership import Cluster
from omnid.metrics import CoordinatorMetrics
from omnid.orchestrator.core import Orchestrator

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_LAST_WORDS_S = 1.0

_log = logs.get(__name__)


class Attachment:
    """Makes links for members."""

    def __init__(
        self,
        cluster: Cluster,
        core: Orchestrator,
        metrics: CoordinatorMetrics,
        clock: Callable[[], float],
        tls: ClientTls | None,
    ) -> None:
        self._cluster = cluster
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._tls = tls

    async def read_out(self, member: Member) -> None:
        """A member leaves: returns when what it said last on its Attach stream, which it ends before, has been read."""
        if member.link is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await member.link.ended.wait()

    async def keep(self, member: Member) -> None:
        """Attaches to `member` once it can take work, and again whenever the stream breaks; runs until cancelled."""
        await member.able.wait()
        backoff = _FIRST_BACKOFF_S
        async with make_channel(member.hello.address.target, tls=self._tls) as channel:
            stub = StageServiceStub(channel)
            while True:
                link = member.link = ReplicaLink(
                    member.name,
                    self._core,
                    addresses=self._cluster.address,
                    clock=self._clock,
                    handed_over=self._metrics.handed_over,
                )
                self._metrics.replica_runs.labels(member.name).set_function(link.runs.__len__)
                attached = False

                def up() -> None:
                    nonlocal attached
                    attached = True
                    self._cluster.notice()
                    self._core.tick(self._clock())
                    self._core.room_on(member.key)

                why = "it ended the stream"
                try:
                    await link.serve(stub.Attach(), up)
                except grpc.aio.AioRpcError as error:
                    why = error.details() or error.code().name
                finally:
                    member.link = None
                    member.trouble = f"not attached at {member.hello.address.target}: {why}"
                    self._cluster.notice()
                _log.warning("replica_detached", replica=member.name, why=why)
                backoff = _FIRST_BACKOFF_S if attached else min(_MAX_BACKOFF_S, backoff * 2)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
