"""One OmniService.Attach stream to a coordinator, shared by all requests of this gateway.

The stream is written by one task, which puts everything that is waiting (starts, cancels, credits) into one message,
and read by one task, which hands each event to its request. A request's events wait in its own queue, which credits
keep short: the coordinator sends at most two outputs of a stage that were not yet credited, so a slow HTTP client
holds up its own request only.

A stream that breaks takes its requests with it: each gets an UNREACHABLE error. Then the stream is made anew.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeAlias

import grpc
from prometheus_client import Counter

from omni.rpc import logs
from omni.rpc.errors import OmniError, Reason
from omni.rpc.options import MAX_REQUEST_BYTES
from omni.v1 import generate_pb2
from omni.v1.generate_pb2_grpc import OmniServiceStub

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_CONNECT_BOUND_S = 10.0
# Small messages may be joined up to this size; a larger one goes alone.
_BATCH_BYTES = 1024 * 1024

Stream: TypeAlias = (
    "grpc.aio.StreamStreamCall[generate_pb2.OmniServiceAttachRequest, generate_pb2.OmniServiceAttachResponse]"
)

_log = logs.get(__name__)


class Call:
    """One request on the stream. Leaving the ``async with`` block before its last event cancels the request."""

    def __init__(self, upstream: "Upstream", number: int) -> None:
        self.request_id = ""
        """The coordinator's id, from its first event on; "" before."""
        self.ended = False
        """Whether the last event was taken from the queue."""
        self._upstream = upstream
        self._number = number
        self._events: deque[generate_pb2.RequestEvent] = deque()
        self._error: OmniError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._next_index = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._upstream.drop(self._number, cancel=not self.ended)

    async def events(self, within: float | None = None) -> list[generate_pb2.RequestEvent]:
        """All events that have come and were not taken, at least one; waits for it.

        Args:
            within: seconds after which an empty list is the answer; None: no bound but the coordinator's own.

        Raises:
            OmniError: the request has failed, or the coordinator was lost. Events that came before are given first.
        """
        if not self._events and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(within):
                    await self._waiter
            except TimeoutError:
                return []
            finally:
                self._waiter = None
        if not self._events:
            self.ended = True
            assert self._error is not None
            raise self._error
        taken = list(self._events)
        self._events.clear()
        if taken[-1].HasField("finished"):
            self.ended = True
        return taken

    def credit(self, outputs: int) -> None:
        """Says that `outputs` output events were taken by the client, so that as many more may come."""
        if outputs and not self.ended:
            self._upstream.credit(self._number, outputs)

    def deliver(self, event: generate_pb2.RequestEvent) -> bool:
        """Queues an event; called by the stream's reader. True: it was the last one."""
        if event.index != self._next_index:
            message = f"event {event.index} came where {self._next_index} was due, from the coordinator"
            self.fail(OmniError(Reason.SEQUENCE_BROKEN, message, request_id=self.request_id))
            return True
        self._next_index += 1
        kind = event.WhichOneof("event")
        if kind == "failed":
            self.fail(OmniError.from_status(event.failed).located(request_id=self.request_id))
            return True
        if kind == "accepted":
            self.request_id = event.accepted.request_id
        self._events.append(event)
        self._wake()
        return kind == "finished"

    def fail(self, error: OmniError) -> None:
        """Ends the request with `error`, after the events that have come."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class Upstream:
    """A coordinator as the gateway sees it: its models and one shared stream."""

    def __init__(
        self,
        target: str,
        channel: grpc.aio.Channel,
        *,
        fenced: Counter,
        changed: Callable[[], None],
    ) -> None:
        """
        Args:
            target: name of the coordinator in messages.
            channel: closed by the caller.
            fenced: counts events of requests that nobody waits for any more.
            changed: called whenever the stream comes up or breaks.
        """
        self.target = target
        self.stub = OmniServiceStub(channel)
        self.attached = False
        self.trouble = "not connected yet"
        """Why `attached` is false."""
        self.models: dict[str, generate_pb2.Model] = {}
        """As listed when the stream came up, or later by `list_models`."""
        self._fenced = fenced
        self._changed = changed
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._commands: deque[generate_pb2.RequestCommand] = deque()
        self._credits: list[int] = []
        self._to_write = asyncio.Event()

    @property
    def requests(self) -> int:
        """Requests at work on the stream."""
        return len(self._calls)

    def start(self, request: generate_pb2.GenerateRequest) -> Call:
        """Sends `request`; its events come through the answer.

        Raises:
            OmniError: UNREACHABLE while the stream is down, MESSAGE_TOO_LARGE for what no message can hold.
        """
        if not self.attached:
            raise self._unreachable(self.trouble)
        size = request.ByteSize()
        if size > MAX_REQUEST_BYTES:
            raise OmniError(
                Reason.MESSAGE_TOO_LARGE, f"the request is {size} bytes with its media; at most {MAX_REQUEST_BYTES}"
            )
        number = next(self._numbers)
        call = self._calls[number] = Call(self, number)
        self._commands.append(generate_pb2.RequestCommand(request=number, start=request))
        self._to_write.set()
        return call

    def credit(self, number: int, outputs: int) -> None:
        """Queues credits of a request that is at work."""
        if number in self._calls:
            self._credits.extend([number] * outputs)
            self._to_write.set()

    def drop(self, number: int, *, cancel: bool) -> None:
        """Forgets a request: its later events are fenced. With `cancel` the coordinator is told to end it."""
        if self._calls.pop(number, None) and cancel and self.attached:
            reason = generate_pb2.CancelReason(reason="the HTTP client went away")
            self._commands.append(generate_pb2.RequestCommand(request=number, cancel=reason))
            self._to_write.set()

    async def list_models(self, bound: float = _CONNECT_BOUND_S) -> list[generate_pb2.Model]:
        """The coordinator's models as they are now.

        Raises:
            OmniError: when it does not answer within `bound` seconds.
        """
        try:
            listed = await self.stub.ListModels(generate_pb2.ListModelsRequest(), timeout=bound)
        except grpc.aio.AioRpcError as error:
            raise self._unreachable(OmniError.from_rpc_error(error).message) from error
        self.models = {model.model: model for model in listed.models}
        return list(listed.models)

    async def run(self) -> None:
        """Keeps the stream up until cancelled, with growing pauses between attempts that fail at once."""
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                await self.list_models()
                await self._attach()
            except grpc.aio.AioRpcError as error:
                trouble = OmniError.from_rpc_error(error).message
            except OmniError as error:
                trouble = error.message
            except asyncio.CancelledError:
                self._detach("the gateway is stopping")
                raise
            was_up = self._detach(trouble)
            backoff = _FIRST_BACKOFF_S if was_up else min(backoff * 2, _MAX_BACKOFF_S)
            # A pause, not a poll: spread, so that gateways do not come back to a coordinator all at once.
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _attach(self) -> None:
        """One life of the stream.

        Raises:
            OmniError, grpc.aio.AioRpcError: why it has ended.
        """
        stream = self.stub.Attach()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(_CONNECT_BOUND_S):
                await stream.wait_for_connection()
            self.attached, self.trouble = True, ""
            _log.info("attached", coordinator=self.target, models=sorted(self.models))
            self._changed()
            # Tasks: cancelling a call does not wake its reader while the other side has said nothing yet.
            tasks = [asyncio.create_task(self._read(stream)), asyncio.create_task(self._write(stream))]
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
        except TimeoutError:
            raise self._unreachable(f"no stream within {_CONNECT_BOUND_S} s") from None
        finally:
            stream.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, stream: "Stream") -> None:
        """Hands events to their requests.

        Raises:
            OmniError, grpc.aio.AioRpcError: the stream has ended.
        """
        while isinstance(response := await stream.read(), generate_pb2.OmniServiceAttachResponse):
            for event in response.events:
                self._dispatch(event)
        code = await stream.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code, await stream.initial_metadata(), await stream.trailing_metadata(), await stream.details()
            )
        raise self._unreachable("it ended the stream")

    def _dispatch(self, event: generate_pb2.RequestEvent) -> None:
        call = self._calls.get(event.request)
        if call is None:
            self._fenced.inc()
        elif call.deliver(event):
            del self._calls[event.request]

    async def _write(self, stream: "Stream") -> None:
        """Sends what is waiting, joined; ends with the stream, whose reader says why.

        Raises:
            OmniError: it cannot go on: no request would ever start, and none would be cancelled.
        """
        try:
            await self._write_all(stream)
        except Exception as error:
            _log.error("writer failed", coordinator=self.target, exc_info=error)
            raise self._unreachable("the stream's writer has failed") from error

    async def _write_all(self, stream: "Stream") -> None:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            while self._commands or self._credits:
                message = generate_pb2.OmniServiceAttachRequest(credits=self._credits)
                self._credits.clear()
                size = 0
                while self._commands:
                    size += self._commands[0].ByteSize()
                    if message.commands and size > _BATCH_BYTES:
                        break
                    message.commands.append(self._commands.popleft())
                try:
                    await stream.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return

    def _detach(self, trouble: str) -> bool:
        """Fails what was on the stream; says whether it was up."""
        was_attached, self.attached = self.attached, False
        self.trouble = trouble
        calls, self._calls = self._calls, {}
        self._commands.clear()
        self._credits.clear()
        for call in calls.values():
            call.fail(self._unreachable(trouble).located(request_id=call.request_id))
        if was_attached:
            _log.warning("coordinator lost", coordinator=self.target, why=trouble, requests=len(calls))
            self._changed()
        return was_attached

    def _unreachable(self, why: str) -> OmniError:
        told = f"the coordinator at {self.target} cannot be reached: "
        return OmniError(Reason.UNREACHABLE, told + why.removeprefix(told))
