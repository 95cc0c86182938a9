"""The state of one request: a state machine without I/O.

It is told what happened (an event of a run, a credit, a lost replica, a bound that may have passed) and answers by
filling the buffers of `ports`. Every method runs to its end on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from google.rpc import status_pb2

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, content_pb2, generate_pb2, stage_pb2
from omnid.orchestrator.run import NEVER, WINDOW, Lane, Pending, Run

if TYPE_CHECKING:
    from omnid.orchestrator.plan import Pipeline
    from omnid.orchestrator.ports import Client, Replica, Surroundings

_UNTOUCHED = frozenset({Reason.DRAINING, Reason.QUEUE_FULL})
"""Reasons with which a stage refuses a run that it has not begun."""


class Request:
    """One request, from its admission until its last run has let go."""

    def __init__(
        self,
        id_: str,
        asked: generate_pb2.GenerateRequest,
        pipeline: Pipeline,
        client: Client,
        around: Surroundings,
        *,
        traceparent: str,
        timeout: float | None,
    ) -> None:
        self.id = id_
        self.model = asked.model
        self.leases: set[int] = set()
        self.armed = NEVER
        self.runs: list[Run] = []
        self.first_outputs: dict[str, float] = {}
        """By stage: seconds from the request's begin to its first output for the client."""
        self.last_outputs: dict[str, float] = {}
        """By stage: the same to its end."""
        self.error: OmniError | None = None
        self.over = False
        self.on_over: list[Callable[[], None]] = []
        self._asked = asked
        self._pipeline = pipeline
        self._client = client
        self._around = around
        self._traceparent = traceparent
        self._index = 0
        self._cancelled = ""
        self.begun = around.now()
        self.queued = 0.0
        first = next(iter(pipeline.stages.values()))
        total = first.bounds.total
        self._deadline_reason = Reason.DEADLINE if timeout is not None and timeout <= total else Reason.STAGE_TIMEOUT
        self._total = total if timeout is None else min(total, timeout)
        self.due = self.begun + self._total
        self._queue_due = self.begun + first.bounds.queue
        self.started = False

    # What happens to it from outside.

    def accept(self) -> None:
        """Tells the client the request's id."""
        event = generate_pb2.RequestEvent(index=self._next_index())
        event.accepted.request_id = self.id
        self._client.event(event)
        self._arm(min(self.due, self._queue_due))

    def start(self) -> None:
        """Begins: makes its runs and starts those that read the prompt."""
        self.started = True
        self.queued = self._around.now() - self.begun
        self._make_runs()
        for run in self.runs:
            if not run.inputs:
                self._want(run)
        self._arm(self.due)

    def accepted(self, run: Run) -> None:
        run.accepted = True

    def output(self, run: Run, output: stage_pb2.RunOutput) -> None:
        """Takes an output of a run and passes it on."""
        span = output.range
        first, count = span.first, span.count
        if first != run.next or count == 0:
            kind = "doubled" if first < run.next else "lost"
            edge = ", ".join(lane.name for lane in run.outputs) or f"{run.title}->client"
            self._fail(
                OmniError(
                    Reason.SEQUENCE_BROKEN,
                    f"edge {edge}: an output was {kind}: number {run.next} was to come, {first} came",
                ),
                run,
            )
            return
        run.next = first + count
        if self._cancelled or self.error is not None:
            return
        payload = output.payload
        routes = len(run.outputs) + run.to_client
        if routes == 1 and run.to_client:
            pending = None
        else:
            pending = Pending(0)
            if payload.tensors:
                readers = len(run.outputs)
                for tensor in payload.tensors:
                    handle = tensor.handle
                    self._around.lease(self, handle.owner, handle.lease, readers)
            for lane in run.outputs:
                self._along(lane, output, pending)
        if run.to_client:
            pending = self._to_client(run, payload, pending)
        if pending is None or pending.routes == 0:
            run.replica.credit(run.number)  # type: ignore[union-attr] # a run with output has a replica
            self._bound_gap(run)
        else:
            run.withheld += 1
            if run.withheld >= WINDOW:
                run.wait("reader", NEVER)
            else:
                self._bound_gap(run)

    def finished(self, run: Run, finished: stage_pb2.RunFinished) -> None:
        """A run has ended by itself, or has let go after a cancel."""
        self._end_run(run)
        run.finished = finished
        self.last_outputs[run.stage.name] = self._around.now() - self.begun
        if self._cancelled or self.error is not None:
            self._end_if_over()
            return
        if finished.count != run.next:
            edge = ", ".join(lane.name for lane in run.outputs) or f"{run.title}->client"
            self._fail(
                OmniError(
                    Reason.COUNT_MISMATCH,
                    f"edge {edge}: {run.title} says that it made {finished.count} outputs, {run.next} came",
                ),
                run,
            )
            return
        for lane in run.outputs:
            lane.end = stage_pb2.RunInputEnd(
                source=stage_pb2.RunSource(stage=run.stage.name, role=run.role),
                count=finished.count,
                reason=finished.reason,
            )
            self._pump(lane)
        if not run.client_queue:
            self._show_end(run)
        self._end_if_over()

    def failed(self, run: Run, status: status_pb2.Status) -> None:
        """A run has failed, or its stage has refused it."""
        error = OmniError.from_status(status)
        replica = run.replica
        self._end_run(run)
        if self._cancelled or self.error is not None:
            self._end_if_over()
            return
        if error.reason in _UNTOUCHED and replica is not None and self._again(run, replica):
            return
        self._fail(error, run, replica)

    def replica_lost(self, run: Run) -> None:
        """The stream to the run's replica broke."""
        replica = run.replica
        self._end_run(run)
        if self._cancelled or self.error is not None:
            self._end_if_over()
            return
        if replica is not None and self._again(run, replica):
            return
        name = replica.name if replica else ""
        self._fail(OmniError(Reason.REPLICA_LOST, f"replica {name} went away during the request"), run, replica)

    def input_taken(self, run: Run) -> None:
        """The run's engine has taken its oldest input message."""
        for lane in run.inputs:
            if lane.sent:
                lane.sent.popleft()
                lane.taken += 1
                self._pump(lane)
                return

    def client_taken(self, run: Run) -> None:
        """The client has taken one output of the run."""
        run.client_in_flight -= 1
        if run.client_queue and not self._ending:
            payload, pending = run.client_queue.popleft()
            self._show(run, payload)
            self._passed(run, pending)
            if run.finished is not None and not run.client_queue:
                self._show_end(run)
                self._end_if_over()

    def cancel(self, reason: str) -> None:
        """Ends the request; over when every run has let go or its bound has passed."""
        if self.over or self._cancelled or self.error is not None:
            return
        self._cancelled = reason or "cancelled"
        self._let_go(self._cancelled)

    def replica_ready(self, stage: str) -> None:
        """There may be room for a run of the stage that waits."""
        for run in self.runs:
            if run.wanted and run.stage.name == stage:
                self._try_start(run)

    def check(self) -> None:
        """Looks whether a bound has passed."""
        if self.over:
            return
        now = self._around.now()
        if not self.started and not self._ending and now >= self._queue_due:
            self.error = OmniError(Reason.NO_REPLICA, "the request waited longer than its queue bound to begin")
            self._end_if_over()
            return
        late = min((run for run in self.runs if not run.ended), key=lambda run: run.due, default=None)
        if self._ending:
            for run in self.runs:
                if not run.ended and now >= run.due:
                    run.lost = True
                    self._end_run(run)
            self._end_if_over()
        elif late is not None and now >= late.due:
            seconds = getattr(late.stage.bounds, late.bound)
            reason = Reason.NO_REPLICA if late.bound == "queue" else Reason.STAGE_TIMEOUT
            self._fail(OmniError(reason, f"stage {late.title}: bound {late.bound} of {seconds:g} s has passed"), late)
        elif now >= self.due:
            what = "the request's deadline" if self._deadline_reason is Reason.DEADLINE else "bound total"
            self._fail(OmniError(self._deadline_reason, f"{what} of {self._total:g} s has passed"), late)
        if not self.over:
            dues = [run.due for run in self.runs if not run.ended]
            self._arm(min(dues if self._ending else [*dues, self.due], default=self.due))

    def cancellations(self) -> Sequence[generate_pb2.RunCancellation]:
        """Which of the runs that were started have let go."""
        return [
            generate_pb2.RunCancellation(
                stage=run.stage.name,
                role=run.role,
                replica=run.replica.name if run.replica else "",
                acknowledged=not run.lost,
            )
            for run in self.runs
            if run.number
        ]

    @property
    def outcome(self) -> str:
        """How it ended: "finished", "cancelled" or the error's reason."""
        return str(self.error.reason) if self.error else "cancelled" if self._cancelled else "finished"

    def now(self) -> float:
        """The clock by which it is timed, in seconds."""
        return self._around.now()

    # How it goes on.

    @property
    def _ending(self) -> bool:
        return bool(self._cancelled) or self.error is not None

    def _next_index(self) -> int:
        index = self._index
        self._index += 1
        return index

    def _arm(self, due: float) -> None:
        if due < self.armed:
            self._around.arm(self, due)

    def _make_runs(self) -> None:
        outputs = list(self._asked.outputs) or list(self._pipeline.resolved.default_outputs)
        needed = self._pipeline.needed(outputs)
        params: Mapping[str, config_pb2.StageParams] = self._asked.params
        by_stage: dict[str, list[Run]] = {}
        for name, stage in self._pipeline.stages.items():
            if name not in needed:
                continue
            own = params[name] if name in params else config_pb2.StageParams()
            tensors = tuple(
                dict.fromkeys(each for edge in stage.consumers if edge.consumer in needed for each in edge.tensors)
            )
            to_client = any(modality in stage.spec.outputs for modality in outputs)
            runs = [Run(stage, "", own, to_client, tensors)]
            runs.extend(
                Run(stage, companion.role, own, False, tensors)
                for companion in stage.spec.companions
                if not companion.negative_prompt or self._negative_prompt()
            )
            for edge in stage.inputs:
                for producer in by_stage.get(edge.producer, ()):
                    for run in runs:
                        lane = Lane(edge.name, edge.waits, producer, run)
                        producer.outputs.append(lane)
                        run.inputs.append(lane)
            by_stage[name] = runs
            self.runs.extend(runs)

    def _negative_prompt(self) -> str:
        return next(
            (
                each.diffusion.negative_prompt
                for each in self._asked.params.values()
                if each.diffusion.HasField("negative_prompt") and each.diffusion.negative_prompt
            ),
            "",
        )

    def _prompt(self, run: Run) -> content_pb2.Prompt | None:
        if run.inputs:
            return None
        companions = {each.role: each for each in run.stage.spec.companions}
        if run.role and companions[run.role].negative_prompt:
            return content_pb2.Prompt(text=self._negative_prompt())
        return self._asked.prompt

    def _want(self, run: Run) -> None:
        run.wanted = True
        run.created = self._around.now()
        run.wait("queue", run.created + run.stage.bounds.queue)
        self._try_start(run)
        self._arm(run.due)

    def _try_start(self, run: Run) -> None:
        replica = self._around.place(self.model, run.stage.name, run.avoid, self)
        if replica is None:
            return
        run.wanted = False
        run.replica = replica
        run.number = self._around.new_run(self, run)
        now = self._around.now()
        start = stage_pb2.StartRun(
            request_id=self.id,
            role=run.role,
            prompt=self._prompt(run),
            params=run.params,
            tensors=run.tensors,
            output=run.to_client,
            sources=[
                stage_pb2.RunSource(stage=lane.producer.stage.name, role=lane.producer.role) for lane in run.inputs
            ],
            traceparent=self._traceparent,
            window=WINDOW,
        )
        start.timeout.FromNanoseconds(max(1, round((self.due - now) * 1e9)))
        replica.send(run.number, stage_pb2.RunCommand(run=run.number, start=start))
        run.wait("first_output", now + run.stage.bounds.first_output)
        self._arm(run.due)
        for lane in run.inputs:
            self._pump(lane)

    def _again(self, run: Run, replica: Replica) -> bool:
        """Starts a run that has done nothing yet on another replica; False when it has."""
        if run.next or any(lane.taken for lane in run.inputs):
            return False
        for lane in run.inputs:
            lane.queue.extendleft((output, None) for output in reversed(lane.sent))
            lane.sent.clear()
            lane.end_sent = False
        run.ended = run.accepted = False
        run.number, run.replica = 0, None
        run.avoid |= {replica.name}
        self._want(run)
        return True

    def _along(self, lane: Lane, output: stage_pb2.RunOutput, pending: Pending) -> None:
        consumer = lane.consumer
        if lane.waits:
            lane.queue.append((output, None))
            return
        if consumer.number and not consumer.ended and len(lane.sent) < WINDOW and not lane.queue:
            self._send(lane, output)
            return
        pending.routes += 1
        lane.queue.append((output, pending))
        if not consumer.number and not consumer.wanted and consumer.can_start():
            self._want(consumer)

    def _send(self, lane: Lane, output: stage_pb2.RunOutput) -> None:
        consumer = lane.consumer
        replica = consumer.replica
        if replica is None:
            raise AssertionError("a lane is pumped only when its consumer has started")
        command = stage_pb2.RunCommand(run=consumer.number)
        message = command.input
        message.source.stage = lane.producer.stage.name
        message.source.role = lane.producer.role
        message.range.CopyFrom(output.range)
        message.payload.CopyFrom(output.payload)
        if lane.producer.replica is not None:
            replica.introduce(lane.producer.replica)
        replica.send(consumer.number, command)
        lane.sent.append(output)
        self._bound_gap(consumer)

    def _pump(self, lane: Lane) -> None:
        """Sends what the consumer may take now; starts it when it may start."""
        consumer = lane.consumer
        if self._ending:
            return
        if not consumer.number or consumer.ended or consumer.replica is None:
            if not consumer.ended and not consumer.wanted and not consumer.number and consumer.can_start():
                self._want(consumer)
            return
        while lane.queue and len(lane.sent) < WINDOW:
            output, pending = lane.queue.popleft()
            self._send(lane, output)
            if pending is not None:
                self._passed(lane.producer, pending)
        if lane.end is not None and not lane.queue and not lane.end_sent:
            lane.end_sent = True
            consumer.replica.send(consumer.number, stage_pb2.RunCommand(run=consumer.number, input_end=lane.end))
            self._bound_gap(consumer)

    def _to_client(self, run: Run, payload: content_pb2.Payload, pending: Pending | None) -> Pending | None:
        if run.client_in_flight < WINDOW and not run.client_queue:
            self._show(run, payload)
            return pending
        pending = pending or Pending(0)
        pending.routes += 1
        run.client_queue.append((payload, pending))
        return pending

    def _show(self, run: Run, payload: content_pb2.Payload) -> None:
        name = run.stage.name
        if name not in self.first_outputs and (payload.token_ids or payload.media):
            self.first_outputs[name] = self._around.now() - self.begun
        run.client_in_flight += 1
        self._client.output(self._next_index(), run, payload)

    def _show_end(self, run: Run) -> None:
        if run.to_client and run.finished is not None:
            event = generate_pb2.RequestEvent(index=self._next_index(), stage_finished=_stage_finished(run))
            self._client.event(event)

    def _passed(self, run: Run, pending: Pending) -> None:
        """One more route has been taken by an output that was withheld."""
        pending.routes -= 1
        if pending.routes == 0:
            run.withheld -= 1
            if not run.ended and run.replica is not None:
                run.replica.credit(run.number)
                self._bound_gap(run)

    def _bound_gap(self, run: Run) -> None:
        if run.ended:
            return
        bounds = run.stage.bounds
        due = self._around.now() + (bounds.gap if run.next else bounds.first_output)
        run.bound, run.due = "gap" if run.next else "first_output", due
        if due < self.armed:
            self._around.arm(self, due)

    def _end_run(self, run: Run) -> None:
        if not run.ended:
            run.ended = True
            run.due = NEVER
            if run.number:
                self._around.drop_run(run.number)
            if run.replica is not None:
                self._around.unplace(run.replica)

    def _fail(self, error: OmniError, run: Run | None, replica: Replica | None = None) -> None:
        at = replica or (run.replica if run else None)
        self.error = error.located(
            request_id=self.id, stage=run.stage.name if run else "", replica=at.name if at else ""
        )
        self._let_go(f"{self.error.reason} at stage {self.error.stage}" if self.error.stage else str(error.reason))

    def _let_go(self, reason: str) -> None:
        now = self._around.now()
        for run in self.runs:
            if run.ended:
                continue
            if run.number and run.replica is not None:
                command = stage_pb2.RunCommand(run=run.number, cancel=stage_pb2.CancelRun(reason=reason[:256]))
                run.replica.send(run.number, command)
                run.wait("cancel", now + run.stage.bounds.cancel)
                self._arm(run.due)
            else:
                run.ended = True
                run.wanted = False
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self.over:
            return
        if not all(run.ended for run in self.runs):
            return
        if not self._ending and (not self.started or any(run.client_queue for run in self.runs)):
            return
        self.over = True
        self._around.release_all(self)
        finished = None
        if self.error is None:
            finished = self._finish()
        self._client.end(self._next_index(), finished, self.error)
        self._around.ended(self)

    def _finish(self) -> generate_pb2.RequestFinished:
        shown = [run for run in self.runs if run.to_client and run.finished is not None]
        if self._cancelled:
            reason = content_pb2.FINISH_REASON_CANCELLED
        elif any(run.finished and run.finished.reason == content_pb2.FINISH_REASON_LENGTH for run in shown):
            reason = content_pb2.FINISH_REASON_LENGTH
        else:
            reason = content_pb2.FINISH_REASON_STOP
        timings = content_pb2.Timings(
            queue=self.queued,
            first_output=min(self.first_outputs.values(), default=0.0),
            total=self._around.now() - self.begun,
        )
        stages = [_stage_finished(run) for run in self.runs if run.finished is not None and not run.role]
        return generate_pb2.RequestFinished(reason=reason, stages=stages, timings=timings)


def _stage_finished(run: Run) -> generate_pb2.StageFinished:
    finished = run.finished or stage_pb2.RunFinished()
    return generate_pb2.StageFinished(
        stage=run.stage.name, reason=finished.reason, usage=finished.usage, timings=finished.timings
    )
