"""The runs of one stream: commands in, events out. The same for a stream of many runs and for a stream of one.

Output goes out as the reader takes it: an output of a run with credit is in the next message; what the run makes while
it has none joins and goes out together. So nothing waits for a timer, and a slow run holds up no other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from google.rpc import status_pb2

from omni.rpc import tracing
from omni.rpc.duration import seconds_of
from omni.rpc.errors import OmniError, Reason
from omni.rpc.options import MAX_MESSAGE_BYTES
from omni.rpc.params import overlay
from omni.rpc.validation import validate
from omni.v1 import content_pb2, stage_pb2, tensor_pb2
from stage_server.engines.base import Finished, Output, Run
from stage_server.service.host import StageHost
from stage_server.service.inbox import Inbox
from stage_server.service.outbox import Taken
from stage_server.service.replies import Replies
from stage_server.service.runs import SessionRun, located, meant
from stage_server.service.starved import Starved
from stage_server.transport.arena import Holder, lost

HOLD_BYTES = 4 << 20
"""A run with more than this in its outbox is held out of further steps, until half of it is gone."""
ARENA_SHARE = 16
"""The part of the arena that tensors of a message, or in an outbox, may fill; those of a single step may be larger."""
INLINE_BYTES = 1 << 20
"""Larger tensors, and those of a device, are copied into the arena on another thread."""
LATE_SECONDS = 1.0
"""A deadline that is noticed later than this was slept through by the process: a cancel may wait to be read."""
_EVENT_BYTES = 64
"""Upper bound of what the wire adds to a payload."""


class Session:
    """Owned by its stream's servicer, which sends what `take` returns and calls `close` at the end.

    `tasks` is the servicer's task group: fetches and large copies run in it.
    """

    def __init__(self, host: StageHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, SessionRun] = {}
        self._addresses: dict[str, tensor_pb2.ReplicaAddress] = {}
        self._published = Holder()
        self._ready: deque[SessionRun] = deque()
        """Runs that may have something to send, those that wait longest first."""
        self.replies = Replies()
        """What is left to send, beside what the ready runs have."""
        self._tensor_bytes = min(HOLD_BYTES, host.arena.largest // ARENA_SHARE)
        self.starved = Starved(host, again=self._queue, fail=self.fail)
        self._ending = False
        self._closed = False
        host.join(self)

    # From the reader of the stream.

    def receive(
        self,
        commands: Iterable[stage_pb2.RunCommand],
        credits_: Mapping[int, int],
        releases: Iterable[int],
        replicas: Iterable[tensor_pb2.ReplicaAddress],
    ) -> None:
        """Takes one message in; `credits_` are outputs that were taken, by the number of their run."""
        for address in replicas:
            self._addresses[address.replica] = address
        for command in commands:
            kind = command.WhichOneof("command")
            run = self._runs.get(command.run)
            if kind == "start":
                self._start(command)
            elif run is None:
                continue  # It has ended, which its reader did not know yet.
            elif kind == "input":
                run.inbox.put(command.input)
            elif kind == "input_end":
                run.inbox.put(command.input_end)
            elif kind == "cancel":
                run.cancelled = True
                self._let_go(run)
        for number, count in credits_.items():
            run = self._runs.get(number)
            if run is not None:
                run.credit = min(run.credit + count, run.window)
                if run.outbox.count or run.finished:
                    self._queue(run)
        for lease in releases:
            self._host.arena.release(lease)

    def close(self) -> None:
        """The stream has ended: its runs are cancelled, and what they published is freed."""
        if self._closed:
            return
        self._closed = True
        self.replies.close()
        for run in list(self._runs.values()):
            run.cancelled = True
            self._let_go(run)
        self._host.arena.release_all(self._published)
        self._host.forget(self)

    @property
    def idle(self) -> bool:
        """No run is at work and nothing is left to send."""
        return not self._runs and self.replies.empty

    def end(self) -> None:
        """The replica stops: the stream ends when all that is left to say is said."""
        self._ending = True
        self.replies.wake()

    # From the engine.

    def engine_output(self, run: SessionRun, output: Output) -> None:
        """One step's output of a run."""
        if run.cancelled or run.error is not None:
            return
        if not run.first_output:
            run.first_output = time.monotonic() - run.begun
        outbox = run.outbox
        outbox.put(output)
        if not run.held and (outbox.size > HOLD_BYTES or outbox.tensor_bytes > self._tensor_bytes):
            run.held = True
            self._host.engine.hold(run.id, True)
        if run.credit > 0:
            self._queue(run)

    def engine_finished(self, run: SessionRun, finished: Finished) -> None:
        """The engine has let go of a run."""
        if run.error is not None:
            self._end(run, "failed")
        elif run.cancelled or finished.reason == content_pb2.FINISH_REASON_CANCELLED:
            finished.reason = content_pb2.FINISH_REASON_CANCELLED
            run.finished = finished
            self._end(run, "cancelled")
        else:
            run.finished = finished
            self._queue(run)

    def engine_failed(self, run: SessionRun, error: OmniError) -> None:
        """The engine has given up on a run."""
        if run.cancelled:
            self.engine_finished(run, Finished(run.id, content_pb2.FINISH_REASON_CANCELLED, content_pb2.Usage()))
            return
        run.error = run.error or self._located(error, run)
        self._end(run, "failed")

    # To the writer of the stream.

    async def take(self) -> stage_pb2.StageServiceAttachResponse | None:
        """Waits until there is something to send and returns it; may be empty. None: the stream is to end."""
        await self.replies.wait()
        if self._closed:
            return None
        while self._ready and not self.replies.full:
            run = self._ready.popleft()
            run.queued = False
            try:
                self._send(run)
            except Exception as error:
                self.fail(run, error, "its output could not be sent")
        message = self.replies.take()
        if self._ready:
            self.replies.wake()
        elif self._ending and self.replies.empty:
            self.replies.wake()
            return message if message.ByteSize() else None
        return message

    # Runs.

    def _start(self, command: stage_pb2.RunCommand) -> None:
        number, start = command.run, command.start
        if number in self._runs:  # A number has one end: that of the run at work says what is wrong.
            wrong = OmniError(Reason.BAD_REQUEST, f"run: {number} is at work on this stream and was started again")
            return self.fail(self._runs[number], wrong)
        identity, window = self._host.new_id(), start.window or math.inf
        run = SessionRun(
            number,
            identity,
            request_id=start.request_id,
            role=start.role,
            traceparent=start.traceparent,
            begun=time.monotonic(),
            window=window,
            credit=window,
            published=Holder(self._published),
            inbox=Inbox(
                self._host,
                identity,
                [(each.stage, each.role) for each in start.sources],
                self._tasks,
                addresses=self._addresses,
                fail=lambda what, error: self.fail(run, error, what),
                taken=lambda message: self._taken(run, message),
            ),
        )
        try:
            validate(command)
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
        except Exception as error:
            self._runs.pop(number, None)
            self._host.remove(run, "failed")
            failed = self._located(meant(run, "it could not be started", error), run)
            return self._say(stage_pb2.RunEvent(run=number, failed=failed))
        self._say(stage_pb2.RunEvent(run=number, accepted=stage_pb2.RunAccepted()))
        if start.HasField("timeout"):
            seconds = seconds_of(start.timeout)
            run.timer = self._loop.call_later(seconds, self._expire, run, run.begun + seconds)
        return None

    def _located(self, error: OmniError, run: SessionRun) -> status_pb2.Status:
        return located(error, run, stage=self._host.spec.stage, replica=self._host.address.replica).to_status()

    def _expire(self, run: SessionRun, due: float) -> None:
        if time.monotonic() - due > LATE_SECONDS:
            run.timer = self._loop.call_later(LATE_SECONDS, self._expire, run, math.inf)
        else:
            self.fail(run, OmniError(Reason.DEADLINE, "the time of the request has passed"))

    def fail(self, run: SessionRun, error: Exception, what: str = "") -> None:
        """Fails a run that is not over, for whatever went wrong with it (`what`); it ends when the engine has let go.
        No fault of one run ends the others of its stream."""
        if run.error is None and not run.cancelled and run.number in self._runs:
            run.error = self._located(meant(run, what, error), run)
            self._let_go(run)

    def _let_go(self, run: SessionRun) -> None:
        """Ends a cancelled or broken run: at once when its engine has finished already, else when the engine has."""
        run.inbox.close()
        if run.finished is None:
            self._host.engine.cancel(run.id)
            return
        run.finished.reason = content_pb2.FINISH_REASON_CANCELLED
        self._end(run, "cancelled" if run.error is None else "failed")

    def _end(self, run: SessionRun, outcome: str) -> None:
        """Says a run's last word and forgets it."""
        del self._runs[run.number]
        self.starved.drop(run)
        run.inbox.close()
        if run.timer is not None:
            run.timer.cancel()
        self._host.remove(run, outcome)
        attributes = {"omni.request_id": run.request_id, "omni.role": run.role, "omni.outcome": outcome}
        tracing.record(f"run {self._host.spec.stage}", run.traceparent, run.begun, time.monotonic(), attributes)
        # What it has published stays until it is given back: to readers whose own cancels are still on their way,
        # memory that is gone would look like a fault.
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
        self._emit(run, event, event.ByteSize())

    # Outputs.

    def _queue(self, run: SessionRun) -> None:
        if not run.queued and not self._closed:
            run.queued = True
            self._ready.append(run)
            self.replies.wake()

    def _send(self, run: SessionRun) -> None:
        """Says what one message of the run holds; when there is more that it may send, its turn comes again."""
        outbox = run.outbox
        if run.publishing or run.cancelled or run.error is not None or run.number not in self._runs:
            return
        if outbox.count and run.credit > 0:
            event = stage_pb2.RunEvent(run=run.number)
            output = event.output
            taken = self._reserve(run, output.payload)
            if taken is None:
                return
            taken.fill(output.payload)
            output.range.first, output.range.count = outbox.drop(taken)
            run.credit -= 1
            if run.held and outbox.size < HOLD_BYTES // 2 and outbox.tensor_bytes < self._tensor_bytes // 2:
                run.held = False
                self._host.engine.hold(run.id, False)
            if taken.tensors:
                tensors = taken.joined()
                if any(tensor.nbytes > INLINE_BYTES or tensor.device.type != "cpu" for tensor in tensors):
                    run.publishing = True
                    self._tasks.create_task(self._send_later(run, tensors, event, taken.wire))
                    return
                for tensor, named in zip(tensors, output.payload.tensors, strict=True):
                    self._host.arena.copy(tensor, named.handle)
            self._emit(run, event, taken.wire + _EVENT_BYTES)
        if outbox.count and run.credit > 0:
            self._queue(run)
        elif run.finished is not None and not outbox.count:
            self._end(run, "finished")

    def _reserve(self, run: SessionRun, payload: content_pb2.Payload) -> Taken | None:
        """What the run's next message holds, with room in the arena for its tensors, named in the payload; None when
        the run has to wait for room."""
        taken = run.outbox.look(self._tensor_bytes)
        if taken.wire > MAX_MESSAGE_BYTES - _EVENT_BYTES:
            raise OmniError(Reason.MESSAGE_TOO_LARGE, f"one output of {taken.wire} bytes fits into no message")
        if not taken.tensors:
            return taken
        arena = self._host.arena
        handles = arena.reserve(taken.outlines(), run.published)
        if handles is None and len(taken.entries) > 1:
            taken = run.outbox.look(0)
            handles = arena.reserve(taken.outlines(), run.published)
        if handles is None:
            self.starved.add(run)
            return None
        self.starved.drop(run)
        for name, handle in zip(taken.tensors, handles, strict=True):
            payload.tensors.add(name=name, handle=handle)
        return taken

    async def _send_later(
        self, run: SessionRun, tensors: list[torch.Tensor], event: stage_pb2.RunEvent, wire: int
    ) -> None:
        """Copies tensors on another thread, so that the other runs go on, then sends the output."""
        arena = self._host.arena
        handles = [named.handle for named in event.output.payload.tensors]
        filled = False
        try:
            filled = await arena.fill(tensors, handles)
            if not filled:
                self.fail(run, lost(handles[0]))
        except Exception as error:
            self.fail(run, error, "its tensors could not be published")
        finally:
            run.publishing = False
        if filled and run.number in self._runs and not (self._closed or run.cancelled or run.error is not None):
            self._emit(run, event, wire + _EVENT_BYTES)
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
            self.replies.release(owner, leases)
        if run.number in self._runs:
            self.replies.credit(run.number)

    def _emit(self, run: SessionRun, event: stage_pb2.RunEvent, wire: int) -> None:
        """Says an event of the engine's run, as the network lets it pass."""
        faulty = self._host.wire
        for each in faulty.pass_on(run.id, event) if faulty else (event,):
            self.replies.say(each, wire)

    def _say(self, event: stage_pb2.RunEvent) -> None:
        """Says an event of the session itself."""
        self.replies.say(event, event.ByteSize())
