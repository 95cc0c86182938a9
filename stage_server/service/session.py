"""The runs of one stream: commands in, events out. The same for a stream of many runs and for a stream of one.

Output goes out as the reader takes it: an output of a run with credit is in the next message; what the run makes while
it has none joins and goes out together. So nothing waits for a timer, and a slow run holds up no other.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterable

import torch

from omni.rpc import tracing
from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.rpc.params import overlay
from omni.v1 import content_pb2, stage_pb2, tensor_pb2
from stage_server.engines.base import Finished, Output, Run
from stage_server.service.host import StageHost
from stage_server.service.inbox import Inbox
from stage_server.service.runs import SessionRun
from stage_server.transport.arena import Holder

HOLD_BYTES = 4 << 20
"""A run with more than this in its outbox is held out of further steps, until half of it is gone."""
INLINE_BYTES = 1 << 20
"""Larger tensors are copied into the arena on another thread."""


class Session:
    """Owned by its stream's servicer, which sends what `take` returns and calls `close` at the end.

    `tasks` is the servicer's task group: fetches and large copies run in it.
    """

    def __init__(self, host: StageHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, SessionRun] = {}
        self._published = Holder()
        self._ready: list[SessionRun] = []
        self._starved: list[SessionRun] = []
        self._next = stage_pb2.StageServiceAttachResponse()
        self._filled = asyncio.Event()
        self._closed = False

    # From the reader of the stream.

    def receive(
        self,
        commands: Iterable[stage_pb2.RunCommand],
        credits_: Iterable[int],
        releases: Iterable[int],
        replicas: Iterable[tensor_pb2.ReplicaAddress],
    ) -> None:
        """Takes one message in."""
        for address in replicas:
            self._host.reader.learn(address)
        for command in commands:
            kind = command.WhichOneof("command")
            if kind == "start":
                self._start(command.run, command.start)
                continue
            run = self._runs.get(command.run)
            if run is None:
                continue  # It has ended, which its reader did not know yet.
            if kind == "input":
                run.inbox.put(command.input)
            elif kind == "input_end":
                run.inbox.put(command.input_end)
            elif kind == "cancel":
                run.cancelled = True
                self._let_go(run)
        for number in credits_:
            run = self._runs.get(number)
            if run is not None:
                run.credit += 1
                if run.outbox.count or run.finished:
                    self._queue(run)
        for lease in releases:
            self._host.arena.release(lease)

    def close(self) -> None:
        """The stream has ended: its runs are cancelled, and what they published is freed."""
        self._closed = True
        for run in list(self._runs.values()):
            run.cancelled = True
            self._let_go(run)
        self._host.arena.release_all(self._published)
        self._host.forget(self)

    @property
    def idle(self) -> bool:
        """No run is at work and nothing is left to send."""
        return not self._runs and not self._filled.is_set()

    # From the engine.

    def engine_output(self, run: SessionRun, output: Output) -> None:
        """One step's output of a run."""
        if run.cancelled or run.error is not None:
            return
        if not run.first_output:
            run.first_output = time.monotonic() - run.begun
        outbox = run.outbox
        outbox.put(output)
        if not run.held and outbox.size > HOLD_BYTES:
            run.held = True
            self._host.engine.hold(run.id, True)
        if run.credit > 0:
            self._queue(run)

    def engine_finished(self, run: SessionRun, finished: Finished) -> None:
        """The engine has let go of a run."""
        if run.error is not None:
            self._end(run, "failed")
        elif run.cancelled or finished.reason == content_pb2.FINISH_REASON_CANCELLED:
            run.finished = finished
            run.finished.reason = content_pb2.FINISH_REASON_CANCELLED
            self._end(run, "cancelled")
        else:
            run.finished = finished
            self._queue(run)

    def engine_failed(self, run: SessionRun, error: OmniError) -> None:
        """The engine has given up on a run."""
        if run.cancelled:
            self.engine_finished(run, Finished(run.id, content_pb2.FINISH_REASON_CANCELLED, content_pb2.Usage()))
            return
        run.error = run.error or self._located(error, run).to_status()
        self._end(run, "failed")

    def room(self) -> None:
        """The arena has memory again."""
        if self._starved:
            starved, self._starved = self._starved, []
            for run in starved:
                self._queue(run)

    # To the writer of the stream.

    async def take(self) -> stage_pb2.StageServiceAttachResponse:
        """Waits until there is something to send and returns it; may be empty."""
        await self._filled.wait()
        ready, self._ready = self._ready, []
        for run in ready:
            run.queued = False
            self._send(run)
        message, self._next = self._next, stage_pb2.StageServiceAttachResponse()
        if not self._ready:
            self._filled.clear()
        return message

    # Runs.

    def _start(self, number: int, start: stage_pb2.StartRun) -> None:
        if number in self._runs:  # A number has one end: that of the run at work says what is wrong.
            error = OmniError(Reason.BAD_REQUEST, f"run: {number} is at work on this stream and was started again")
            return self._break(self._runs[number], error)
        identity = self._host.new_id()
        run = SessionRun(
            number=number,
            id=identity,
            request_id=start.request_id,
            role=start.role,
            traceparent=start.traceparent,
            begun=time.monotonic(),
            credit=start.window or math.inf,
            inbox=Inbox(
                self._host,
                identity,
                [(each.stage, each.role) for each in start.sources],
                self._tasks,
                fail=lambda error: self._break(run, error),
                taken=lambda message: self._taken(run, message),
            ),
        )
        try:
            self._host.admit()
            self._host.add(self, run)
            self._runs[number] = run
            self._host.engine.submit(
                Run(
                    id=run.id,
                    request_id=start.request_id,
                    role=start.role,
                    prompt=start.prompt if start.HasField("prompt") else None,
                    params=overlay(self._host.spec.defaults, start.params),
                    tensors=frozenset(start.tensors),
                    output=start.output,
                    sources=run.inbox.sources,
                )
            )
        except OmniError as error:
            self._runs.pop(number, None)
            self._host.remove(run, "failed")
            return self._refuse(run, error)
        self._next.events.add(run=number).accepted.SetInParent()
        self._filled.set()
        if start.HasField("timeout"):
            run.timer = self._loop.call_later(start.timeout.ToNanoseconds() / 1e9, self._expire, run)
        return None

    def _refuse(self, run: SessionRun, error: OmniError) -> None:
        self._next.events.add(run=run.number, failed=self._located(error, run).to_status())
        self._filled.set()

    def _located(self, error: OmniError, run: SessionRun) -> OmniError:
        """The error with its place. An engine says `params.x`; a request has parameters for each of its stages."""
        stage = self._host.spec.stage
        if any(wrong.field.startswith("params.") for wrong in error.fields):
            named = [
                FieldViolation(re.sub(r"^params\.", f'params["{stage}"].', wrong.field), wrong.description)
                for wrong in error.fields
            ]
            error = invalid(*named, reason=error.reason)
        return error.located(request_id=run.request_id, stage=stage, replica=self._host.address.replica)

    def _expire(self, run: SessionRun) -> None:
        self._break(run, OmniError(Reason.DEADLINE, "the time of the request has passed"))

    def _break(self, run: SessionRun, error: OmniError) -> None:
        """Fails a run; it ends when the engine has let go of it."""
        if run.error is None and not run.cancelled and run.number in self._runs:
            run.error = self._located(error, run).to_status()
            self._let_go(run)

    def _let_go(self, run: SessionRun) -> None:
        """Ends a cancelled or broken run: at once when its engine has finished already, else when the engine has."""
        if run.finished is None:
            self._host.engine.cancel(run.id)
            return
        run.finished.reason = content_pb2.FINISH_REASON_CANCELLED
        self._end(run, "cancelled" if run.error is None else "failed")

    def _end(self, run: SessionRun, outcome: str) -> None:
        """Says a run's last word and forgets it."""
        del self._runs[run.number]
        run.inbox.close()
        if run.timer is not None:
            run.timer.cancel()
        self._host.remove(run, outcome)
        attributes = {"omni.request_id": run.request_id, "omni.role": run.role, "omni.outcome": outcome}
        tracing.record(f"run {self._host.spec.stage}", run.traceparent, run.begun, time.monotonic(), attributes)
        # What it has published stays until the coordinator gives it back: its readers' own cancels may still be on
        # their way, and memory that is gone would look like a fault to them.
        if self._closed:
            return
        if run.error is not None:
            event = stage_pb2.RunEvent(run=run.number, failed=run.error)
        else:
            finished = run.finished
            if finished is None:
                raise AssertionError("a run ends with an error or a finish")
            timings = content_pb2.Timings(
                queue=finished.queued, first_output=run.first_output, total=time.monotonic() - run.begun
            )
            event = stage_pb2.RunEvent(
                run=run.number,
                finished=stage_pb2.RunFinished(
                    reason=finished.reason, count=run.outbox.made, usage=finished.usage, timings=timings
                ),
            )
        self._emit(run, event)
        self._filled.set()

    # Outputs.

    def _queue(self, run: SessionRun) -> None:
        if not run.queued and not self._closed:
            run.queued = True
            self._ready.append(run)
            self._filled.set()

    def _send(self, run: SessionRun) -> None:
        """Adds to the next message what the run may send now."""
        outbox = run.outbox
        if run.publishing or run.cancelled or run.error is not None or run.number not in self._runs:
            return
        while outbox.count and run.credit > 0:
            event = stage_pb2.RunEvent(run=run.number)
            output = event.output
            tensors = outbox.joined_tensors() if outbox.tensors else {}
            if tensors and not self._reserve(run, tensors, output.payload):
                return
            output.range.first, output.range.count = outbox.take(output.payload)
            run.credit -= 1
            if run.held and outbox.size < HOLD_BYTES // 2:
                run.held = False
                self._host.engine.hold(run.id, False)
            if any(tensor.nbytes > INLINE_BYTES for tensor in tensors.values()):
                run.publishing = True
                self._tasks.create_task(self._send_large(run, list(tensors.values()), event))
                return
            for tensor, named in zip(tensors.values(), output.payload.tensors, strict=True):
                self._host.arena.copy(tensor, named.handle)
            self._emit(run, event)
        if run.finished is not None and not outbox.count:
            self._end(run, "finished")

    def _reserve(self, run: SessionRun, tensors: dict[str, torch.Tensor], payload: content_pb2.Payload) -> bool:
        """Room in the arena for the tensors, named in the payload; False when the run has to wait for it."""
        try:
            handles = self._host.arena.reserve(list(tensors.values()), self._published)
        except OmniError as error:
            self._break(run, error)
            return False
        if handles is None:
            self._starved.append(run)
            return False
        for name, handle in zip(tensors, handles, strict=True):
            payload.tensors.add(name=name, handle=handle)
        return True

    async def _send_large(self, run: SessionRun, tensors: list[torch.Tensor], event: stage_pb2.RunEvent) -> None:
        """Copies large tensors on another thread, so that the other runs go on, then sends the output."""
        arena = self._host.arena
        handles = [named.handle for named in event.output.payload.tensors]
        try:
            filled = await arena.fill(tensors, handles)
        finally:
            run.publishing = False
        if filled and run.number in self._runs and not (self._closed or run.cancelled or run.error is not None):
            self._emit(run, event)
            self._filled.set()
            self._queue(run)
            return
        for handle in handles:
            arena.release(handle.lease)

    def _taken(self, run: SessionRun, message: stage_pb2.RunInput) -> None:
        """The engine is done with an input: its reader's credit and the tensors go back."""
        if self._closed:
            return
        owners: dict[str, list[int]] = {}
        for named in message.payload.tensors:
            owners.setdefault(named.handle.owner, []).append(named.handle.lease)
        for owner, leases in owners.items():
            self._next.releases.add(owner=owner, leases=leases)
        if run.number in self._runs:
            self._next.credits.append(run.number)
        self._filled.set()

    def _emit(self, run: SessionRun, event: stage_pb2.RunEvent) -> None:
        wire = self._host.wire
        if wire is None:
            self._next.events.append(event)
        else:
            self._next.events.extend(wire.pass_on(run.id, event))
