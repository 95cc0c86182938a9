"""The session of an OmniService.Attach stream: many requests of one caller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from omni.rpc import context as call_context
from omni.rpc.errors import FieldViolation, OmniError, invalid
from omni.rpc.validation import validate
from omni.v1 import generate_pb2
from omnid.cluster.batch import WriteBatch, write_out
from omnid.orchestrator.ports import Failure
from omnid.orchestrator.request import Request
from omnid.services.clients import StreamClient
from omnid.services.desk import Desk


class AttachSession:
    """Requests of one stream by the caller's numbers. Events of all of them share one pending message."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._requests: dict[int, Request] = {}
        self._batch = WriteBatch(generate_pb2.OmniServiceAttachResponse)
        self._listening = True
        """The caller may still send credits."""
        self._written = 0
        """Events that were sent, less the credits that came: a credit for what was not sent counts for nothing,
        or a caller that never reads could have everything made and kept here."""

    async def read(self, messages: AsyncIterator[generate_pb2.OmniServiceAttachRequest]) -> None:
        """Takes the caller's messages until it has said all. What is at work then goes on, and since no credit can
        come any more, what was written counts as taken."""
        async for message in messages:
            self._receive(message)
        self._listening = False
        self._batch.wake()

    async def write(self, context: Any) -> None:
        """Writes events until the caller has said all and everything that it asked for has ended."""

        async def write(message: generate_pb2.OmniServiceAttachResponse) -> None:
            # Counted before: a credit may come before this side hears that the message was written.
            self._written += len(message.events)
            if message.events:
                await context.write(message)
            if not self._listening:
                self._credit_all()

        await write_out(self._batch, "events", lambda: bool(self._listening or self._requests), write)

    def close(self) -> None:
        """The stream has ended: so have its requests."""
        self._desk.tick()
        for request in list(self._requests.values()):
            request.cancel("the caller's stream has ended")

    def _receive(self, message: generate_pb2.OmniServiceAttachRequest) -> None:
        self._desk.tick()
        requests = self._requests
        for number in message.credits:
            request = requests.get(number)
            if request is not None and self._written > 0:
                self._written -= 1
                request.credit()
        for command in message.commands:
            try:
                validate(command)
            except OmniError as error:
                self._refuse(command.request, error)
                continue
            if command.HasField("start"):
                self._start(command.request, command.start)
            elif (request := requests.get(command.request)) is not None:
                request.cancel(command.cancel.reason or "client cancelled")

    def _refuse(self, number: int, error: OmniError) -> None:
        """Fails the request of a command that is wrong; the others of the stream go on."""
        request = self._requests.get(number)
        if request is None:
            StreamClient(self._batch, number).refused(error)
        else:
            request.fail(Failure(error.reason, error.message, cause=error), "a command for it was wrong")

    def _start(self, number: int, start: generate_pb2.GenerateRequest) -> None:
        if number in self._requests:
            text = f"{number} is at work on this stream; a number is never used twice"
            self._refuse(number, invalid(FieldViolation("commands.request", text)))
            return
        client = StreamClient(self._batch, number)
        try:
            traceparent = start.traceparent if call_context.valid_traceparent(start.traceparent) else ""
            request = self._desk.submit(
                start,
                client,
                traceparent=traceparent or call_context.traceparent(),
                remaining=call_context.remaining(),
            )
        except OmniError as error:
            client.refused(error)
            return
        if not request.ended:
            self._requests[number] = request
            request.on_end(lambda _ended: self._end(number))

    def _end(self, number: int) -> None:
        del self._requests[number]
        self._batch.wake()

    def _credit_all(self) -> None:
        self._desk.tick()
        for request in list(self._requests.values()):
            request.credit_all()
