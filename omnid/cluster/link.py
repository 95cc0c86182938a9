"""The coordinator's end of the Attach stream to one replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from omni.rpc import logs
from omni.rpc.channel import make_channel
from omni.rpc.tls import ClientTls
from omni.v1 import stage_pb2, stage_pb2_grpc, tensor_pb2
from omnid.orchestrator.ports import Replica

_log = logs.get(__name__)


class Link:
    """Buffers what the loop's turn wants to say to a replica and sends it as one message; implements `ports.Replica`.

    Owned by the replica's Join stream, in whose task `run` runs.
    """

    def __init__(self, address: tensor_pb2.ReplicaAddress, tls: ClientTls | None) -> None:
        self.name = address.replica
        self.address = address
        self._tls = tls
        self._next = stage_pb2.StageServiceAttachRequest()
        self._filled = asyncio.Event()
        self._introduced: dict[str, int] = {}

    def send(self, run: int, command: stage_pb2.RunCommand) -> None:
        self._next.commands.append(command)
        self._filled.set()

    def credit(self, run: int) -> None:
        self._next.credits.append(run)
        self._filled.set()

    def release(self, lease: int) -> None:
        self._next.releases.append(lease)
        self._filled.set()

    def introduce(self, replica: Replica) -> None:
        address = replica.address
        if self._introduced.get(address.replica) != address.epoch:
            self._introduced[address.replica] = address.epoch
            self._next.replicas.append(address)
            self._filled.set()

    async def run(
        self, opened: Callable[[], None], receive: Callable[[stage_pb2.StageServiceAttachResponse], None]
    ) -> None:
        """Holds the stream until it breaks or this is cancelled; `opened` is called when commands may be sent.

        Raises:
            grpc.aio.AioRpcError: when the stream broke.
        """
        async with make_channel(self.address.target, tls=self._tls) as channel:
            call = stage_pb2_grpc.StageServiceStub(channel).Attach(wait_for_ready=True)
            opened()
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(call))
                async for response in call:
                    receive(response)
                writer.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            message, self._next = self._next, stage_pb2.StageServiceAttachRequest()
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # The stream has ended; its reader says so.
