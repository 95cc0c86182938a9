"""A daemon and stage servers in one event loop, speaking the real protocol over loopback. The stages are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from omni.rpc.duration import duration_of
from omni.rpc.errors import OmniError, Reason
from omni.rpc.options import server_options
from omni.v1 import cluster_pb2, cluster_pb2_grpc, config_pb2, content_pb2, generate_pb2_grpc, stage_pb2, stage_pb2_grpc
from omnid.daemon import Daemon

BOUND_S = 10.0
Script = Callable[["Stage", stage_pb2.RunCommand], None]


def pipeline(*names: str, **bounds: float) -> config_pb2.ResolvedPipeline:
    """A chain of stages "m"; the first makes text, the last of several makes sound."""
    waits = {"queue": 5.0, "first_output": 5.0, "gap": 5.0, "cancel": 1.0, "total": 20.0} | bounds
    specs = []
    for place, name in enumerate(names):
        spec = config_pb2.StageSpec(
            stage=name,
            model="m",
            kind=config_pb2.STAGE_KIND_SYNTHETIC,
            family="synthetic",
            dtype="auto",
            max_running=64,
            stall=duration_of(30),
            sources=names[place - 1 : place],
            bounds=config_pb2.Bounds(**{key: duration_of(value) for key, value in waits.items()}),
            limits=config_pb2.MediaLimits(bytes=8, parts=1),
        )
        if place == 0:
            spec.outputs.append(content_pb2.MODALITY_TEXT)
        elif place == len(names) - 1:
            spec.outputs.append(content_pb2.MODALITY_AUDIO)
        specs.append(spec)
    edges = [
        config_pb2.EdgeSpec(to=to, mode=config_pb2.EDGE_MODE_STREAM, tensors=["rows"], **{"from": source})
        for source, to in itertools.pairwise(names)
    ]
    placements = [config_pb2.Placement(stage=name, replicas=1, devices=["cpu"]) for name in names]
    inputs = [content_pb2.MODALITY_TEXT, content_pb2.MODALITY_IMAGE]
    outputs = [content_pb2.MODALITY_TEXT] + ([content_pb2.MODALITY_AUDIO] if len(names) > 1 else [])
    return config_pb2.ResolvedPipeline(
        model="m",
        stages=specs,
        placements=placements,
        edges=edges,
        inputs=inputs,
        default_outputs=outputs,
        max_requests=64,
        max_queued=8,
    )


def handle(owner: str, lease: int) -> content_pb2.Payload:
    """A payload with one published tensor of 8 bytes."""
    payload = content_pb2.Payload()
    tensor = payload.tensors.add(name="rows").handle
    tensor.owner, tensor.epoch, tensor.lease, tensor.size = owner, 1, lease, 8
    return payload


class Stage(stage_pb2_grpc.StageServiceServicer):
    """A stage server whose answers a script decides, command by command."""

    def __init__(self, name: str, script: Script, voices: Sequence[str] = ()) -> None:
        self.name = name
        self.replica = f"m/{name}/0"
        self.commands: list[stage_pb2.RunCommand] = []
        self.released: list[int] = []
        self.replicas: list[str] = []
        self._script = script
        self._voices = voices
        self._events: asyncio.Queue[stage_pb2.StageServiceAttachResponse] = asyncio.Queue()
        self._seen = asyncio.Condition()

    def send(self, run: int, **event: Any) -> None:
        """Queues one event of a run."""
        self._events.put_nowait(stage_pb2.StageServiceAttachResponse(events=[stage_pb2.RunEvent(run=run, **event)]))

    def output(self, run: int, number: int, payload: content_pb2.Payload) -> None:
        span = stage_pb2.OutputRange(first=number, count=1)
        self.send(run, output=stage_pb2.RunOutput(range=span, payload=payload))

    def finish(self, run: int, count: int, reason: int = content_pb2.FINISH_REASON_STOP) -> None:
        self.send(run, finished=stage_pb2.RunFinished(reason=reason, count=count))

    def fail(self, run: int, message: str) -> None:
        self.send(run, failed=OmniError(Reason.INTERNAL, message).to_status())

    def took(self, run: int, owner: str, leases: list[int]) -> None:
        """Says that an input was taken, and that its tensors are no longer read."""
        released = [stage_pb2.Release(owner=owner, leases=leases)] if leases else []
        self._events.put_nowait(stage_pb2.StageServiceAttachResponse(credits=[run], releases=released))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until what the coordinator said makes `holds()` true."""
        async with asyncio.timeout(BOUND_S), self._seen:
            await self._seen.wait_for(holds)

    def kinds(self) -> list[str | None]:
        return [command.WhichOneof("command") for command in self.commands]

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                await context.write(await self._events.get())
        finally:
            reader.cancel()

    async def _read(self, messages: AsyncIterator[stage_pb2.StageServiceAttachRequest]) -> None:
        async for message in messages:
            self.replicas.extend(address.replica for address in message.replicas)
            self.released.extend(message.releases)
            for command in message.commands:
                self.commands.append(command)
                self._script(self, command)
            async with self._seen:
                self._seen.notify_all()

    async def Execute(self, request_iterator: Any, context: Any) -> None:
        raise AssertionError("the coordinator attaches")

    Describe = Fetch = Drain = Execute

    @contextlib.asynccontextmanager
    async def joined(self, coordinator: str) -> AsyncIterator[Stage]:
        """Serves and belongs to the cluster within the block."""
        server = grpc.aio.server(options=server_options())
        stage_pb2_grpc.add_StageServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(coordinator) as channel:
            call = cluster_pb2_grpc.ClusterServiceStub(channel).Join()
            hello = cluster_pb2.ReplicaHello(model="m", stage=self.name, index=0)
            hello.address.replica, hello.address.epoch = self.replica, 1
            hello.address.target = f"127.0.0.1:{port}"
            await call.write(cluster_pb2.JoinRequest(hello=hello))
            spec = await call.read()
            assert spec.spec.stage == self.name
            load = stage_pb2.ReplicaLoad(state=stage_pb2.REPLICA_STATE_READY, voices=self._voices)
            await call.write(cluster_pb2.JoinRequest(load=load))
            try:
                yield self
            finally:
                call.cancel()
                await server.stop(0)


class Cluster:
    """The daemon with its joined stages."""

    def __init__(self, daemon: Daemon, address: str, channel: grpc.aio.Channel) -> None:
        self.daemon = daemon
        self.address = address
        self.stub: Any = generate_pb2_grpc.OmniServiceStub(channel)


@contextlib.asynccontextmanager
async def cluster(served: config_pb2.ResolvedPipeline, *stages: Stage) -> AsyncIterator[Cluster]:
    """A daemon with the stages joined; every stage of `served` must be among them."""
    daemon = Daemon([served], listen="127.0.0.1:0")
    bound = await daemon.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(bound.grpc))
            for stage in stages:
                await stack.enter_async_context(stage.joined(bound.grpc))
            if stages:
                await daemon.cluster.wait_ready(BOUND_S)
            yield Cluster(daemon, bound.grpc, channel)
    finally:
        await daemon.stop(0)
