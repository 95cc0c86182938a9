"""One replica's StageService.Attach stream: commands out, events in, in one message for all runs each way.

Commands, credits and releases collect in a pending message. The writer sends all of it when it gets to run, so what
one turn of the event loop decides travels together, and what comes up during a slow write travels with the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from omni.rpc.duration import duration_of
from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2, generate_pb2, stage_pb2, tensor_pb2
from omnid.cluster.batch import WriteBatch, split
from omnid.orchestrator.core import Orchestrator
from omnid.orchestrator.leases import Tensor
from omnid.orchestrator.plan import EdgePlan
from omnid.orchestrator.ports import Failure
from omnid.orchestrator.run import WINDOW, Chunk, Run

Addresses = Callable[[str], tensor_pb2.ReplicaAddress | None]
"""The address of a replica by its name."""

EdgeCounter = Callable[[str, int], None]
"""Told of each chunk with tensors that was handed over: the edge's name and the tensors' bytes."""


class ReplicaLink:
    """A stream to a replica, from its begin to its end; a new stream is a new link.

    Owned by the event loop; `serve` is its only task pair, every other method returns at once.
    """

    def __init__(
        self,
        name: str,
        core: Orchestrator,
        *,
        addresses: Addresses,
        clock: Callable[[], float],
        handed_over: EdgeCounter,
    ) -> None:
        self.name = name
        self.runs: dict[int, Run] = {}
        self.credits: list[int] = []
        self.attached = False
        self.refusing = False
        self.ended = asyncio.Event()
        """Set when everything that the replica said on it has been read."""
        self._core = core
        self._addresses = addresses
        self._clock = clock
        self._handed_over = handed_over
        self._releases: list[int] = []
        self._known: dict[str, int] = {}
        """Epoch of each replica whose address was sent on this stream."""
        self._batch = WriteBatch(stage_pb2.StageServiceAttachRequest)

    # -- commands ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Lets the writer send what is pending."""
        self._batch.wake()

    def start(self, run: Run, timeout: float) -> None:
        """Begins `run`; the request has `timeout` seconds left."""
        request = run.request
        message: generate_pb2.GenerateRequest = request.message
        command = self._batch.message.commands.add(run=run.number)
        start = command.start
        start.request_id = request.id
        start.role = run.role.role
        if run.stage.takes_prompt:
            negative = negative_prompt(message) if run.role.negative_prompt else None
            start.prompt.CopyFrom(negative or message.prompt)
        if run.stage.name in message.params:
            start.params.CopyFrom(message.params[run.stage.name])
        start.tensors.extend(run.stage.tensors)
        start.output = run.to_client
        for source in run.sources:
            start.sources.add(stage=source.stage.name, role=source.role.role)
        # Its own clock is for when we are gone: ours tells it in time.
        start.timeout.CopyFrom(duration_of(timeout + run.stage.waits.cancel))
        start.traceparent = request.trace.traceparent
        start.window = WINDOW
        self._batch.wake()

    def input(self, run: Run, source: Run, chunk: Chunk, edge: EdgePlan) -> None:
        """Hands a chunk of `source` to `run`: tensors as handles, and of those the edge's own only."""
        given = self._batch.message.commands.add(run=run.number).input
        given.source.stage = source.stage.name
        given.source.role = source.role.role
        given.range.first = chunk.first
        given.range.count = chunk.count
        payload: content_pb2.Payload = chunk.payload
        given.payload.MergeFrom(payload)
        given.payload.ClearField("media")
        given.payload.ClearField("logprobs")
        if len(edge.tensors) != len(source.stage.tensors):
            del given.payload.tensors[:]
            given.payload.tensors.extend(each for each in payload.tensors if each.name in edge.tensors)
        size = 0
        for named in given.payload.tensors:
            handle = named.handle
            size += handle.size
            if self._known.get(handle.owner) != handle.epoch:
                address = self._addresses(handle.owner)
                if address is not None:
                    self._known[handle.owner] = address.epoch
                    self._batch.message.replicas.append(address)
        self._handed_over(edge.name, size)
        self._batch.wake()

    def input_end(self, run: Run, source: Run, count: int, reason: int) -> None:
        """`source` made `count` outputs in all."""
        end = self._batch.message.commands.add(run=run.number).input_end
        end.source.stage = source.stage.name
        end.source.role = source.role.role
        end.count = count
        end.reason = content_pb2.FinishReason.ValueType(reason)
        self._batch.wake()

    def cancel(self, number: int, reason: str) -> None:
        """Tells a run to let go."""
        self._batch.message.commands.add(run=number).cancel.reason = reason
        self._batch.wake()

    def release(self, lease: int) -> None:
        """A tensor of this replica has no readers left."""
        self._releases.append(lease)
        self._batch.wake()

    # -- the stream --------------------------------------------------------------------------------------------------

    async def serve(self, call: Any, attached: Callable[[], None]) -> None:
        """Writes and reads `call`, a fresh Attach call, until it ends; the runs that are left are then lost.

        Raises:
            grpc.aio.AioRpcError: why it ended.
        """
        writer = asyncio.create_task(self._write(call), name=f"write {self.name}")
        reader = asyncio.create_task(self._read(call, attached), name=f"read {self.name}")
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()  # Without a writer no run that is placed here would ever start.
            await reader
        finally:
            self.attached = False
            reader.cancel()
            writer.cancel()
            call.cancel()
            self._core.tick(self._clock())
            self._core.lost(self)
            self.ended.set()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, call: Any, attached: Callable[[], None]) -> None:
        await call.wait_for_connection()
        self.attached = True
        attached()
        async for response in call:
            self.receive(response)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                message = await self._batch.take()
                if self.credits:
                    message.credits.extend(self.credits)
                    self.credits.clear()
                if self._releases:
                    message.releases.extend(self._releases)
                    self._releases.clear()
                for part in split(message, "commands"):
                    await call.write(part)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # The stream has ended; the reader says so, when it has read what came last.

    def receive(self, response: stage_pb2.StageServiceAttachResponse) -> None:
        """Does what one message of the replica says. The hot path: one message an engine step, an event a run."""
        core = self._core
        core.tick(self._clock())
        runs = self.runs
        fenced = 0
        for event in response.events:
            run = runs.get(event.run)
            if run is None:
                fenced += 1
                for named in event.output.payload.tensors:
                    self.release(named.handle.lease)
            elif event.HasField("output"):
                output = event.output
                span = output.range
                payload = output.payload
                if run.stage.tensors:
                    tensors = tuple(
                        Tensor(named.name, named.handle.owner, named.handle.lease) for named in payload.tensors
                    )
                    run.request.output(run, span.first, span.count, payload, tensors, visible=_visible(payload))
                else:
                    run.request.output(run, span.first, span.count, payload, (), visible=True)
            elif event.HasField("finished"):
                end = event.finished
                run.request.finished(run, end.reason, end.count, end.usage, end.timings)
            elif event.HasField("failed"):
                run.request.failed(run, _failure(run, OmniError.from_status(event.failed)))
        for number in response.credits:
            run = runs.get(number)
            if run is not None:
                run.request.taken(run)
        for release in response.releases:
            core.released(release.leases)
        if fenced:
            core.observer.fenced(fenced)
        if self.credits:
            self._batch.wake()


def negative_prompt(request: generate_pb2.GenerateRequest) -> content_pb2.Prompt | None:
    """The negative prompt among a request's parameters, in the form that its prompt has; None: it has none."""
    for params in request.params.values():
        if text := params.diffusion.negative_prompt:
            prompt = content_pb2.Prompt()
            if request.prompt.HasField("conversation"):
                turn = prompt.conversation.messages.add(role=content_pb2.CHAT_ROLE_USER)
                turn.content.add(text=text)
            else:
                prompt.text = text
            return prompt
    return None


def _visible(payload: content_pb2.Payload) -> bool:
    """Whether there is anything but tensors in it."""
    return bool(payload.text or payload.token_ids or payload.media or payload.logprobs or payload.HasField("progress"))


def _failure(run: Run, error: OmniError) -> Failure:
    """What a stage says of its run, with the place filled in."""
    if error.reason in (Reason.INTERNAL, Reason.CANCELLED):
        error = OmniError(Reason.STAGE_FAILED, f"stage {run.name} failed: {error.message}")
    error.located(request_id=run.request.id, stage=run.stage.name, replica=run.replica)
    return Failure(error.reason, error.message, run.stage.name, run.replica, cause=error)
