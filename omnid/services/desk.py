"""Where requests come in, from either of OmniService's streams: checked, planned, and handed to the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni.rpc import context as call_context
from omni.rpc import tracing
from omni.rpc.duration import seconds_of
from omni.rpc.errors import OmniError, Reason
from omni.rpc.options import MAX_REQUEST_BYTES
from omni.v1 import generate_pb2
from omnid.cluster.link import negative_prompt
from omnid.cluster.membership import Cluster
from omnid.orchestrator.core import Orchestrator
from omnid.orchestrator.plan import RequestPlan, make_plan
from omnid.orchestrator.ports import Failure, RunReport
from omnid.orchestrator.request import Request
from omnid.services.checks import check, find_model
from omnid.services.clients import StreamClient, error_of


class Desk:
    """Takes requests and cancels in. Owned by the event loop."""

    def __init__(self, core: Orchestrator, cluster: Cluster, clock: Callable[[], float]) -> None:
        self.core = core
        self.cluster = cluster
        self._clock = clock
        self._closed = False
        self._plans: dict[tuple[str, frozenset[int], bool], RequestPlan] = {}

    def tick(self) -> None:
        """Tells the orchestrator the time; before anything else that one turn tells it."""
        self.core.tick(self._clock())

    def submit(
        self,
        message: generate_pb2.GenerateRequest,
        client: StreamClient,
        *,
        traceparent: str = "",
        remaining: float | None = None,
    ) -> Request:
        """Begins a request that is sound by the contract; its events go to `client`.

        Args:
            message: what was asked.
            client: of this request only.
            traceparent: W3C trace context that its span belongs to, or "".
            remaining: seconds until the call's own deadline.

        Raises:
            OmniError: what is wrong with it, or QUEUE_FULL; then `client` got nothing.
        """
        request_id = call_context.new_request_id()
        if self._closed:
            raise OmniError(Reason.DRAINING, "the coordinator stops", request_id=request_id)
        try:
            if (size := message.ByteSize()) > MAX_REQUEST_BYTES:
                text = f"the request has {size} bytes; at most {MAX_REQUEST_BYTES} are taken"
                raise OmniError(Reason.MESSAGE_TOO_LARGE, text)
            pipeline = find_model(message.model, self.cluster.pipelines)
            outputs = check(message, pipeline, self.cluster.voices(pipeline.model))
        except OmniError as error:
            raise error.located(request_id=request_id) from None
        key = (message.model, outputs, negative_prompt(message) is not None)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(pipeline, outputs, negative=key[2])
        own = seconds_of(message.timeout) if message.HasField("timeout") else None
        given = [seconds for seconds in (own, remaining) if seconds is not None]
        trace = tracing.begin("request", traceparent)
        self.tick()
        request = self.core.submit(
            plan, request_id, message, client, trace=trace, timeout=min(given) if given else None
        )
        if isinstance(request, Failure):
            trace.end({"omni.request_id": request_id, "omni.model": plan.model, "omni.outcome": request.reason})
            raise error_of(request, request_id)
        return request

    async def cancel(self, request_id: str, reason: str) -> list[RunReport] | None:
        """Cancels a request and waits until each of its runs has let go or its bound has passed; None: no such
        request is at work."""
        reports: asyncio.Future[list[RunReport]] = asyncio.get_running_loop().create_future()

        def done(ended: list[RunReport]) -> None:
            if not reports.done():
                reports.set_result(ended)

        self.tick()
        return await reports if self.core.cancel(request_id, reason, done) else None

    async def close(self, within: float) -> None:
        """Takes no new request, ends those at work and waits until their runs have let go, at most `within` seconds."""
        self._closed = True
        self.tick()
        left = list(self.core.requests.values())
        for request in left:
            request.fail(Failure(Reason.DRAINING, "the coordinator stops"), "the coordinator stops")
        left = [request for request in left if not request.ended]
        if not left:
            return
        done = asyncio.get_running_loop().create_future()
        waiting = len(left)

        def ended(_request: Request) -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0 and not done.done():
                done.set_result(None)

        for request in left:
            request.on_end(ended)
        await asyncio.wait([done], timeout=within)
