"""Events of requests as messages for those who asked, written into the pending message of their stream."""

from __future__ import annotations

from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2, generate_pb2
from omnid.cluster.batch import WriteBatch
from omnid.orchestrator.ports import Failure, RequestEnd, StageEnd


class StreamClient:
    """One request's client: its events go into the stream's pending message."""

    __slots__ = ("_batch", "_number", "outputs", "request_id")

    def __init__(
        self,
        batch: WriteBatch[generate_pb2.GenerateResponse] | WriteBatch[generate_pb2.OmniServiceAttachResponse],
        number: int,
    ) -> None:
        """`number` is the caller's number for the request on its stream, 0 on a stream of its own."""
        self._batch = batch
        self._number = number
        self.request_id = ""
        self.outputs = 0
        """Output events so far."""

    def accepted(self, index: int, request_id: str) -> None:
        self.request_id = request_id
        self._add(index).accepted.request_id = request_id

    def output(self, index: int, stage: str, payload: content_pb2.Payload) -> None:
        batch = self._batch
        event = batch.message.events.add()
        event.request = self._number
        event.index = index
        output = event.output
        output.stage = stage
        output.payload.MergeFrom(payload)
        if payload.tensors:
            output.payload.ClearField("tensors")
        self.outputs += 1
        batch.wake()

    def stage_finished(self, index: int, end: StageEnd) -> None:
        self._add(index).stage_finished.CopyFrom(stage_finished(end))

    def finished(self, index: int, end: RequestEnd) -> None:
        finished = self._add(index).finished
        finished.reason = content_pb2.FinishReason.ValueType(end.reason)
        finished.stages.extend(stage_finished(each) for each in end.stages)
        times = end.times
        timings = finished.timings
        timings.queue = max(0.0, times.first_start - times.created)
        timings.first_output = max(0.0, times.first_output - times.created)
        timings.total = times.ended - times.created

    def failed(self, index: int, failure: Failure) -> None:
        self._add(index).failed.CopyFrom(error_of(failure, self.request_id).to_status())

    def refused(self, error: OmniError) -> None:
        """The request was not taken in: its only event."""
        self._add(0).failed.CopyFrom(error.to_status())

    def _add(self, index: int) -> generate_pb2.RequestEvent:
        event = self._batch.message.events.add(request=self._number, index=index)
        self._batch.wake()
        return event


def stage_finished(end: StageEnd) -> generate_pb2.StageFinished:
    """How a stage ended, as clients see it."""
    reason = content_pb2.FinishReason.ValueType(end.reason)
    return generate_pb2.StageFinished(stage=end.stage, reason=reason, usage=end.usage, timings=end.timings)


def error_of(failure: Failure, request_id: str) -> OmniError:
    """The error of the table that a failure is."""
    if isinstance(failure.cause, OmniError):
        return failure.cause
    return OmniError(
        Reason(failure.reason), failure.message, request_id=request_id, stage=failure.stage, replica=failure.replica
    )
