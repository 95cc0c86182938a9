"""StageService: translates between streams and sessions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc

from omni.rpc.errors import OmniError, Reason
from omni.rpc.spec import spec_hash
from omni.rpc.validation import validate
from omni.v1 import stage_pb2, stage_pb2_grpc
from stage_server.service.host import StageHost
from stage_server.service.session import Session
from stage_server.transport.reader import PIECE_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """Refuses everything until it is given its host."""

    def __init__(self) -> None:
        self.host: StageHost | None = None

    @property
    def _host(self) -> StageHost:
        if self.host is None:
            raise OmniError(Reason.NO_REPLICA, "this replica has not been told yet what to serve")
        return self.host

    async def Attach(
        self, request_iterator: AsyncIterator[stage_pb2.StageServiceAttachRequest], context: Context
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            session = Session(self._host, tasks)
            reader = tasks.create_task(_read_many(session, request_iterator))
            try:
                while (message := await session.take()) is not None:
                    await context.write(message)
            finally:
                session.close()
                reader.cancel()

    async def Execute(self, request_iterator: AsyncIterator[stage_pb2.ExecuteRequest], context: Context) -> None:
        async with asyncio.TaskGroup() as tasks:
            session = Session(self._host, tasks)
            started = asyncio.Event()
            reader = tasks.create_task(_read_one(session, request_iterator, started))
            try:
                await started.wait()
                while not session.idle and (message := await session.take()) is not None:
                    await context.write(
                        stage_pb2.ExecuteResponse(
                            events=message.events, credits=len(message.credits), releases=message.releases
                        )
                    )
                    # Under load others come first: what is made meanwhile goes out together.
                    await asyncio.sleep(0)
            finally:
                session.close()
                reader.cancel()

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Context) -> stage_pb2.DescribeResponse:
        host = self._host
        return stage_pb2.DescribeResponse(
            address=host.address, spec=host.spec, spec_hash=spec_hash(host.spec), load=host.load()
        )

    async def Fetch(self, request: stage_pb2.FetchRequest, context: Context) -> AsyncIterator[stage_pb2.FetchResponse]:
        memory = self._host.arena.bytes_of(request.handle)
        for start in range(0, memory.numel(), PIECE_BYTES):
            yield stage_pb2.FetchResponse(data=memory[start : start + PIECE_BYTES].numpy().tobytes())
            self._host.arena.bytes_of(request.handle)

    async def Drain(self, request: stage_pb2.DrainRequest, context: Context) -> stage_pb2.DrainResponse:
        await self._host.drain()
        return stage_pb2.DrainResponse()


async def _read_many(session: Session, requests: AsyncIterator[stage_pb2.StageServiceAttachRequest]) -> None:
    """Takes in the messages of a stream of many runs; the session ends with it."""
    async for message in requests:
        session.receive(message.commands, Counter(message.credits), message.releases, message.replicas)
    session.close()


async def _read_one(
    session: Session, requests: AsyncIterator[stage_pb2.ExecuteRequest], started: asyncio.Event
) -> None:
    """Takes in the messages of a single run, whose number is 0."""
    async for message in requests:
        for command in message.commands:
            validate(command)
            if command.run:
                raise OmniError(Reason.BAD_REQUEST, f"commands.run: must be 0 on Execute, is {command.run}")
        if not started.is_set() and not any(command.HasField("start") for command in message.commands):
            raise OmniError(Reason.BAD_REQUEST, "commands: the first message must hold the run's start")
        session.receive(message.commands, {0: message.credits}, message.releases, message.replicas)
        started.set()
    if not started.is_set():
        raise OmniError(Reason.BAD_REQUEST, "commands: the stream ended before the run's start")
