"""A session on a real arena and reader, with an engine that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import torch
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry

from omni.rpc.errors import OmniError
from omni.v1 import config_pb2, content_pb2, stage_pb2, tensor_pb2
from stage_server.engines.base import Deliver, Event, Feed, Finished, Load, Output, Run
from stage_server.metrics import StageMetrics
from stage_server.service.host import StageHost
from stage_server.service.session import Session
from stage_server.transport.arena import Arena
from stage_server.transport.reader import Reader

ARENA = 8 << 20


class ScriptedEngine:
    """Remembers what it is told; steps when the test says."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.runs: list[Run] = []
        self.feeds: list[Feed] = []
        self.deliver: Deliver = lambda _events: None
        self.refusal: OmniError | None = None
        self.now = Load()
        """What it says of its load."""
        self._cancel = asyncio.Event()

    def start(self, deliver: Deliver) -> None:
        self.deliver = deliver

    def submit(self, run: Run) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.runs.append(run)

    def feed(self, run: int, feed: Feed) -> None:
        self.feeds.append(feed)

    def cancel(self, run: int) -> None:
        self.told.append(("cancel", run))
        self._cancel.set()

    async def cancelled(self, run: int) -> None:
        """Returns when the session has cancelled a run; a fetch may come first."""
        await asyncio.wait_for(self._cancel.wait(), 10)
        assert [told for told in self.told if told[0] == "cancel"] == [("cancel", run)]

    def hold(self, run: int, held: bool) -> None:
        self.told.append(("hold", run, held))

    def load(self) -> Load:
        return self.now

    def stop(self) -> None:
        pass


class Stand:
    """One stream of a stage server, without the stream."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        bounds = config_pb2.Bounds(first_output=Duration(seconds=60), gap=Duration(seconds=60))
        spec = config_pb2.StageSpec(stage="b", max_running=4, lease=Duration(seconds=60), bounds=bounds)
        self.arena = Arena("m/b/0", 1, ARENA, 60.0)
        self.reader = Reader(self.arena, CollectorRegistry())
        self.engine = ScriptedEngine()
        address = tensor_pb2.ReplicaAddress(replica="m/b/0", epoch=1)
        metrics = StageMetrics(CollectorRegistry(), "m", "b")
        self.host = StageHost(spec, address, self.engine, arena=self.arena, reader=self.reader, metrics=metrics)
        self.host.start()
        self.host.ready()
        self.session = Session(self.host, tasks)

    def receive(self, *commands: stage_pb2.RunCommand, credits_: tuple[int, ...] = ()) -> None:
        self.session.receive(commands, Counter(credits_), (), ())

    def start(self, number: int = 1, **fields: Any) -> int:
        """Starts a run and returns the engine's number of it."""
        self.receive(stage_pb2.RunCommand(run=number, start=stage_pb2.StartRun(request_id="req-1", **fields)))
        return self.engine.runs[-1].id

    async def step(self, *events: Event) -> None:
        """The engine makes a step, and the loop takes it in."""
        self.engine.deliver(events)
        await asyncio.sleep(0)

    async def take(self) -> stage_pb2.StageServiceAttachResponse:
        message = await asyncio.wait_for(self.session.take(), 10)
        assert message is not None
        return message

    async def events(self) -> list[stage_pb2.RunEvent]:
        return list((await self.take()).events)


@contextlib.asynccontextmanager
async def stand() -> AsyncIterator[Stand]:
    """A session for a test; nothing may be left of it."""
    async with asyncio.TaskGroup() as tasks:
        made = Stand(tasks)
        try:
            yield made
        finally:
            made.session.close()
            made.host.close()
    assert made.arena.load().leases == 0
    assert made.arena.load().used_bytes == 0
    await made.reader.close()
    made.arena.close()


def text(run: int, value: str) -> Output:
    return Output(run, text=value)


def rows(run: int, count: int, width: int = 8) -> Output:
    return Output(run, tensors={"rows": torch.ones(count, width)})


def stopped(run: int) -> Finished:
    return Finished(run, content_pb2.FINISH_REASON_STOP, content_pb2.Usage())


def let_go(run: int) -> Finished:
    return Finished(run, content_pb2.FINISH_REASON_CANCELLED, content_pb2.Usage())
