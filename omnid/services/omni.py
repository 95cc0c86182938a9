"""OmniService: requests of clients and gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from omni.rpc import context as call_context
from omni.rpc.errors import OmniError, Reason
from omni.rpc.validation import validate
from omni.v1 import generate_pb2, generate_pb2_grpc
from omnid.cluster.cluster import Cluster
from omnid.orchestrator.orchestrator import Orchestrator
from omnid.orchestrator.plan import Pipeline
from omnid.services.clients import SharedStream, SingleClient, StreamClient


class OmniServicer(generate_pb2_grpc.OmniServiceServicer):
    """Translates between calls and the orchestrator."""

    def __init__(self, orchestrator: Orchestrator, cluster: Cluster) -> None:
        self._orchestrator = orchestrator
        self._cluster = cluster

    async def Generate(  # type: ignore[override] # writes its stream itself, which the stubs do not know
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        client = SingleClient()
        traceparent = call_context.traceparent() or request.traceparent
        admitted = client.request = self._orchestrator.submit(
            request, client, traceparent=traceparent, timeout=_timeout(request, call_context.remaining())
        )
        try:
            while client.pending or not client.over:
                message, shown = await client.take()
                if message.events:
                    await context.write(message)
                for run in shown:
                    admitted.client_taken(run)
        finally:
            admitted.cancel("client gone")
        if client.error is not None:
            raise client.error

    async def Attach(  # type: ignore[override] # as Generate
        self,
        request_iterator: AsyncIterator[generate_pb2.OmniServiceAttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        stream = SharedStream()

        async def write() -> None:
            while True:
                await context.write(await stream.take())

        async with asyncio.TaskGroup() as group:
            writer = group.create_task(write())
            try:
                async for message in request_iterator:
                    for command in message.commands:
                        self._obey(stream, command)
                    for number in message.credits:
                        if (client := stream.requests.get(number)) is not None:
                            client.taken()
            finally:
                for client in list(stream.requests.values()):
                    if client.request is not None:
                        client.request.cancel("client gone")
                writer.cancel()

    def _obey(self, stream: SharedStream, command: generate_pb2.RequestCommand) -> None:
        number = command.request
        if command.WhichOneof("command") == "cancel":
            client = stream.requests.get(number)
            if client is not None and client.request is not None:
                client.request.cancel(command.cancel.reason or "client cancelled")
            return
        client = StreamClient(stream, number)
        try:
            validate(command)
            if number in stream.requests:
                raise OmniError(Reason.BAD_REQUEST, f"request: {number} is at work on this stream already")
            stream.requests[number] = client
            asked = command.start
            client.request = self._orchestrator.submit(
                asked, client, traceparent=asked.traceparent, timeout=_timeout(asked, None)
            )
        except OmniError as error:
            if stream.requests.get(number) is client:
                del stream.requests[number]
            stream.fail(number, 0, error)

    async def Cancel(
        self, request: generate_pb2.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generate_pb2.CancelResponse:
        found = self._orchestrator.find(request.request_id)
        if found is None:
            return generate_pb2.CancelResponse(found=False)
        over = asyncio.Event()
        found.on_over.append(over.set)
        found.cancel("client cancelled")
        await over.wait()  # Bounded: a run that does not acknowledge is given up at its bound.
        return generate_pb2.CancelResponse(found=True, runs=found.cancellations())

    async def ListModels(
        self, request: generate_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generate_pb2.ListModelsResponse:
        models = [self._model(pipeline) for pipeline in self._orchestrator.pipelines.values()]
        return generate_pb2.ListModelsResponse(models=models)

    async def GetModel(
        self, request: generate_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generate_pb2.GetModelResponse:
        pipelines = self._orchestrator.pipelines
        if request.model not in pipelines:
            known = ", ".join(sorted(pipelines))
            raise OmniError(Reason.UNKNOWN_MODEL, f"model: there is no model {request.model!r}; there are {known}")
        return generate_pb2.GetModelResponse(model=self._model(pipelines[request.model]))

    def _model(self, pipeline: Pipeline) -> generate_pb2.Model:
        resolved = pipeline.resolved
        first = next(stage for stage in pipeline.stages.values() if not stage.inputs)
        return generate_pb2.Model(
            model=resolved.model,
            pipeline=resolved.pipeline,
            inputs=resolved.inputs,
            outputs=[
                generate_pb2.ModelOutput(
                    modality=modality, stage=stage.name, kind=stage.spec.kind, defaults=stage.spec.defaults
                )
                for stage in pipeline.stages.values()
                for modality in stage.spec.outputs
            ],
            default_outputs=resolved.default_outputs,
            stages=list(pipeline.stages),
            limits=first.spec.limits,
            ready=self._cluster.serves(resolved.model),
        )


def _timeout(asked: generate_pb2.GenerateRequest, remaining: float | None) -> float | None:
    """Seconds that the request has: the least of what it asks for and what the call leaves it."""
    own = asked.timeout.ToNanoseconds() / 1e9 if asked.HasField("timeout") else None
    return min((each for each in (own, remaining) if each is not None), default=None)
