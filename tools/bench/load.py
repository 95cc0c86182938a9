"""A client that drives many requests and times each token by the stamp that its source gave it.

A stamp is the source's monotonic clock in nanoseconds, twenty digits; source and client run on one machine. Text that
was merged on its way holds several stamps, so every token is timed however few messages carried it.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from google.protobuf import struct_pb2

from omni.v1 import config_pb2, content_pb2, generate_pb2, generate_pb2_grpc, stage_pb2, stage_pb2_grpc

STAMP = 20


@dataclass(frozen=True, slots=True)
class Target:
    """What to ask: a coordinator (or the bare relay) and a stage that stamps its tokens."""

    address: str
    model: str
    stage: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn. Rates in tokens a second, latencies in seconds."""

    offered: float
    delivered: float
    p50: float
    p95: float
    messages: int


def _script(tokens: int, rate: float) -> config_pb2.StageParams:
    script = struct_pb2.Struct()
    script.update({"tokens": tokens, "rate": rate, "stamp": True})
    return config_pb2.StageParams(extra=script)


def _request(target: Target, tokens: int, rate: float) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        model=target.model, prompt=content_pb2.Prompt(text="load"), params={target.stage: _script(tokens, rate)}
    )


class _Meter:
    """Collects stamps."""

    def __init__(self, offered: float, expected: int) -> None:
        self._offered = offered
        self._expected = expected
        self._latencies: list[int] = []
        self._first = self._last = 0
        self.messages = 0

    def take(self, text: str) -> None:
        now = time.monotonic_ns()
        self._first = self._first or now
        self._last = now
        self._latencies.extend(now - int(text[at : at + STAMP]) for at in range(0, len(text), STAMP))

    def sample(self) -> Sample:
        if len(self._latencies) != self._expected:
            raise RuntimeError(f"{len(self._latencies)} tokens of {self._expected} arrived")
        cuts = statistics.quantiles(self._latencies, n=20)
        seconds = max(1, self._last - self._first) / 1e9
        return Sample(self._offered, self._expected / seconds, cuts[9] / 1e9, cuts[18] / 1e9, self.messages)


Drive = Callable[[Target, int, float, int], Awaitable[Sample]]
"""Runs a load: target, requests at once, tokens a second and request, tokens a request."""


async def attach(target: Target, runs: int, rate: float, tokens: int) -> Sample:
    """All requests on one stream; `rate` in tokens a second and run."""
    meter = _Meter(rate * runs, runs * tokens)
    async with grpc.aio.insecure_channel(target.address) as channel:
        call = generate_pb2_grpc.OmniServiceStub(channel).Attach()
        request = _request(target, tokens, rate)
        commands = [generate_pb2.RequestCommand(request=run, start=request) for run in range(1, runs + 1)]
        await call.write(generate_pb2.OmniServiceAttachRequest(commands=commands))
        live = runs
        async for response in call:
            meter.messages += 1
            taken: list[int] = []
            for event in response.events:
                kind = event.WhichOneof("event")
                if kind == "output":
                    meter.take(event.output.payload.text)
                    taken.append(event.request)
                elif kind == "finished":
                    live -= 1
                elif kind == "failed":
                    raise RuntimeError(event.failed.message)
            if not live:
                break
            if taken:
                await call.write(generate_pb2.OmniServiceAttachRequest(credits=taken))
        call.cancel()
    return meter.sample()


async def generate(target: Target, runs: int, rate: float, tokens: int) -> Sample:
    """A stream for each request."""
    meter = _Meter(rate * runs, runs * tokens)
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub = generate_pb2_grpc.OmniServiceStub(channel)
        request = _request(target, tokens, rate)

        async def one() -> None:
            async for response in stub.Generate(request):
                meter.messages += 1
                for event in response.events:
                    if event.WhichOneof("event") == "output":
                        meter.take(event.output.payload.text)

        async with asyncio.TaskGroup() as group:
            for _ in range(runs):
                group.create_task(one())
    return meter.sample()


async def execute(target: Target, runs: int, rate: float, tokens: int) -> Sample:
    """A stream for each run, straight to a stage server."""
    meter = _Meter(rate * runs, runs * tokens)
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)
        start = stage_pb2.StartRun(
            request_id="load", prompt=content_pb2.Prompt(text="load"), params=_script(tokens, rate), output=True
        )
        message = stage_pb2.ExecuteRequest(commands=[stage_pb2.RunCommand(start=start)])

        async def one() -> None:
            call = stub.Execute()
            await call.write(message)
            await call.done_writing()
            async for response in call:
                meter.messages += 1
                for event in response.events:
                    if event.WhichOneof("event") == "output":
                        meter.take(event.output.payload.text)

        async with asyncio.TaskGroup() as group:
            for _ in range(runs):
                group.create_task(one())
    return meter.sample()
