"""Clients of the orchestrator behind gRPC streams: they buffer events until the stream's writer takes them."""

from __future__ import annotations

import asyncio
from collections import deque

from omni.rpc.errors import OmniError
from omni.v1 import content_pb2, generate_pb2
from omnid.orchestrator.request import Request
from omnid.orchestrator.run import Run


def fill(event: generate_pb2.RequestEvent, run: Run, payload: content_pb2.Payload) -> None:
    """Makes `event` an output event."""
    output = event.output
    output.stage = run.stage.name
    output.payload.CopyFrom(payload)
    if payload.tensors:
        output.payload.ClearField("tensors")


class SingleClient:
    """The one request of a Generate call."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.error: OmniError | None = None
        self.over = False
        self._next = generate_pb2.GenerateResponse()
        self._shown: list[Run] = []
        self._filled = asyncio.Event()

    def output(self, index: int, run: Run, payload: content_pb2.Payload) -> None:
        fill(self._next.events.add(index=index), run, payload)
        self._shown.append(run)
        self._filled.set()

    def event(self, event: generate_pb2.RequestEvent) -> None:
        self._next.events.append(event)
        self._filled.set()

    def end(self, index: int, finished: generate_pb2.RequestFinished | None, error: OmniError | None) -> None:
        self.error, self.over = error, True
        if finished is not None:
            self._next.events.add(index=index, finished=finished)
        self._filled.set()

    @property
    def pending(self) -> bool:
        """Whether there is something to take."""
        return bool(self._next.events)

    async def take(self) -> tuple[generate_pb2.GenerateResponse, list[Run]]:
        """Waits for events, or the end, and returns them with the runs of the outputs among them."""
        await self._filled.wait()
        self._filled.clear()
        message, self._next = self._next, generate_pb2.GenerateResponse()
        shown, self._shown = self._shown, []
        return message, shown


class SharedStream:
    """The requests of one Attach stream."""

    def __init__(self) -> None:
        self.requests: dict[int, StreamClient] = {}
        self.next = generate_pb2.OmniServiceAttachResponse()
        self.filled = asyncio.Event()

    async def take(self) -> generate_pb2.OmniServiceAttachResponse:
        """Waits for events and returns them."""
        await self.filled.wait()
        self.filled.clear()
        message, self.next = self.next, generate_pb2.OmniServiceAttachResponse()
        return message

    def fail(self, number: int, index: int, error: OmniError) -> None:
        """Tells of a request that failed."""
        self.next.events.add(request=number, index=index, failed=error.to_status())
        self.filled.set()


class StreamClient:
    """One request of an Attach stream."""

    def __init__(self, stream: SharedStream, number: int) -> None:
        self.request: Request | None = None
        self._stream = stream
        self._number = number
        self._in_flight: deque[Run] = deque()

    def output(self, index: int, run: Run, payload: content_pb2.Payload) -> None:
        stream = self._stream
        fill(stream.next.events.add(request=self._number, index=index), run, payload)
        self._in_flight.append(run)
        stream.filled.set()

    def event(self, event: generate_pb2.RequestEvent) -> None:
        event.request = self._number
        self._stream.next.events.append(event)
        self._stream.filled.set()

    def end(self, index: int, finished: generate_pb2.RequestFinished | None, error: OmniError | None) -> None:
        stream = self._stream
        stream.requests.pop(self._number, None)
        if error is not None:
            stream.fail(self._number, index, error)
        else:
            stream.next.events.add(request=self._number, index=index, finished=finished)
            stream.filled.set()

    def taken(self) -> None:
        """The client has taken the oldest output event under way."""
        if self._in_flight and self.request is not None:
            self.request.client_taken(self._in_flight.popleft())
