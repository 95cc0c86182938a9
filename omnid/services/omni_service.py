"""omni.v1.OmniService: what gateways and clients call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from omni.rpc import context as call_context
from omni.v1 import config_pb2, generate_pb2, generate_pb2_grpc
from omnid.cluster.batch import WriteBatch, write_out
from omnid.orchestrator.ports import Failure
from omnid.services.attach import AttachSession
from omnid.services.checks import find_model, limits_of
from omnid.services.clients import StreamClient, error_of
from omnid.services.desk import Desk


class _CallClient(StreamClient):
    """The client of a call of its own: when its request fails, the call's status says so, and no event does."""

    __slots__ = ()

    def failed(self, index: int, failure: Failure) -> None:
        self._batch.wake()


class OmniService(generate_pb2_grpc.OmniServiceServicer):
    """Translates between the service and the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Generate(  # type: ignore[override]  # It writes its responses itself.
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> None:
        batch = WriteBatch(generate_pb2.GenerateResponse)
        work = self._desk.submit(
            request,
            _CallClient(batch, 0),
            traceparent=call_context.traceparent(),
            remaining=call_context.remaining(),
        )

        async def write(message: generate_pb2.GenerateResponse) -> None:
            if message.events:
                await context.write(message)
            self._desk.tick()
            work.credit_all()

        try:
            await write_out(batch, "events", lambda: not work.ended, write)
            if work.failure is not None:
                raise error_of(work.failure, work.id)
        finally:
            if not work.ended:
                self._desk.tick()
                expired = call_context.remaining() == 0
                work.cancel("deadline" if expired else "client went away")

    async def Attach(  # type: ignore[override]  # It writes its responses itself.
        self, request_iterator: AsyncIterator[generate_pb2.OmniServiceAttachRequest], context: Any
    ) -> None:
        session = AttachSession(self._desk)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(session.write(context))
                await session.read(request_iterator)
        finally:
            session.close()

    async def Cancel(self, request: generate_pb2.CancelRequest, context: Any) -> generate_pb2.CancelResponse:
        reports = await self._desk.cancel(request.request_id, "client cancelled")
        runs = [
            generate_pb2.RunCancellation(
                stage=report.stage, role=report.role, replica=report.replica, acknowledged=report.acknowledged
            )
            for report in reports or ()
        ]
        return generate_pb2.CancelResponse(found=reports is not None, runs=runs)

    async def ListModels(
        self, request: generate_pb2.ListModelsRequest, context: Any
    ) -> generate_pb2.ListModelsResponse:
        models = [self._model(pipeline) for pipeline in self._desk.cluster.pipelines.values()]
        return generate_pb2.ListModelsResponse(models=models)

    async def GetModel(self, request: generate_pb2.GetModelRequest, context: Any) -> generate_pb2.GetModelResponse:
        pipeline = find_model(request.model, self._desk.cluster.pipelines)
        return generate_pb2.GetModelResponse(model=self._model(pipeline))

    def _model(self, pipeline: config_pb2.ResolvedPipeline) -> generate_pb2.Model:
        return generate_pb2.Model(
            model=pipeline.model,
            pipeline=pipeline.pipeline,
            inputs=pipeline.inputs,
            outputs=[
                generate_pb2.ModelOutput(modality=modality, stage=spec.stage, kind=spec.kind, defaults=spec.defaults)
                for spec in pipeline.stages
                for modality in spec.outputs
            ],
            default_outputs=pipeline.default_outputs,
            stages=[spec.stage for spec in pipeline.stages],
            limits=limits_of(pipeline),
            ready=self._desk.cluster.ready(pipeline.model),
            voices=[voice for voices in self._desk.cluster.voices(pipeline.model).values() for voice in voices],
        )
