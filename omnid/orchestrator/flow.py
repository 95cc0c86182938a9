"""How output travels within a request: along edges to the runs that read it, and to the client.

An output is credited to its producer when it has been passed on along every route; where a reader has no room it waits
in a queue here, and the credit with it. So at most two outputs of a run are ever queued, and a slow reader slows its
own producers and nobody else.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from omnid.orchestrator.ports import StageEnd
from omnid.orchestrator.run import ENDED, IDLE, STARTED, Chunk, Input, Run

if TYPE_CHECKING:
    from omnid.orchestrator.core import Orchestrator
    from omnid.orchestrator.request import Request


class Flow:
    """Outputs of one request on their way. Its state machine calls; nothing here ends a run or the request."""

    __slots__ = ("_core", "_request", "in_flight")

    def __init__(self, core: Orchestrator, request: Request) -> None:
        self._core = core
        self._request = request
        self.in_flight: deque[Run] = deque()
        """Of each output that the client did not credit yet, the run, oldest first."""

    def credit(self, run: Run) -> None:
        if run.state == STARTED and run.link is not None:
            run.link.credits.append(run.number)
            run.link.wake()

    def spread(self, run: Run, chunk: Chunk, visible: bool) -> None:
        """Sends a chunk over all routes of its producer, or queues it where there is no room."""
        live = [(edge, consumer) for edge, consumer in run.routes if consumer.state != ENDED]
        for tensor in chunk.tensors:
            readers = sum(tensor.name in edge.tensors for edge, _ in live)
            self._core.leases.add(self._request.id, tensor, readers)
        chunk.waits = 1  # Held until all routes were tried, so that the credit is given once.
        run.held += 1
        for edge, consumer in live:
            held = not edge.at_end
            chunk.waits += held
            consumer.inputs.append(Input(run, edge, chunk, held=held, arrived=self._core.now))
            self.feed(consumer)
        if run.to_client and visible:
            chunk.waits += 1
            run.client_queue.append(chunk)
            self.flush(run)
        self.forwarded(chunk)

    def forwarded(self, chunk: Chunk) -> None:
        chunk.waits -= 1
        if chunk.waits == 0:
            producer = chunk.producer
            producer.held -= 1
            producer.deadline = self._core.now + producer.wait
            self.credit(producer)

    def flush(self, run: Run) -> None:
        """Sends the client what it has room for."""
        queue = run.client_queue
        while queue:
            entry = queue[0]
            if isinstance(entry, StageEnd):
                queue.popleft()
                self._request.client.stage_finished(self._request.count(), entry)
            elif run.client_room:
                queue.popleft()
                run.client_room -= 1
                self.in_flight.append(run)
                self._request.client.output(self._request.count(), run.stage.name, entry.payload)
                self.forwarded(entry)
            else:
                return

    def feed(self, run: Run) -> None:
        """Sends a consumer what it has room for; starts it when it is time."""
        if run.state == IDLE:
            if not run.stage.starts_at_end or all_ended(run):
                self._core.place(run)
            return
        link = run.link
        if run.state != STARTED or link is None:
            return
        while run.inputs:
            entry = run.inputs[0]
            chunk = entry.chunk
            if chunk is None:
                assert entry.source.end is not None
                run.open_sources -= 1
                link.input_end(run, entry.source, entry.source.next, entry.source.end.reason)
            elif run.room:
                run.room -= 1
                run.handed.append(entry)
                link.input(run, entry.source, chunk, entry.edge)
            else:
                return
            run.inputs.popleft()
            if run.sent is not None:
                run.sent.append(entry)
            run.deadline = self._core.now + run.wait
            if entry.held and chunk is not None:
                entry.held = False
                self.forwarded(chunk)

    def drop_inputs(self, run: Run) -> None:
        """The run has ended before it read all of its input: nobody else is to wait for it."""
        while run.inputs:
            entry = run.inputs.popleft()
            chunk = entry.chunk
            if chunk is None:
                continue
            for tensor in chunk.tensors:
                if tensor.name in entry.edge.tensors:
                    self._core.leases.done(tensor.lease)
            if entry.held:
                self.forwarded(chunk)


def all_ended(run: Run) -> bool:
    """Whether every source that the run waits for to the end has finished."""
    at_end = (source for source in run.sources if any(edge.at_end and to is run for edge, to in source.routes))
    return all(source.end is not None for source in at_end)
