"""The floors of the control benchmark: a source of tokens and a relay, each as small as the contract allows.

    python -m tools.bench.bare source            # StageService: Attach (many runs) and Execute (one)
    python -m tools.bench.bare relay TARGET      # OmniService: Attach and Generate, in front of a StageService

Both print the port that they bound. The relay does what any relay of this contract must: parse, check that the tokens
of a run come in sequence, number them for the client, and send them on in new messages.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import grpc
import uvloop

from omni.v1 import content_pb2, generate_pb2, generate_pb2_grpc, stage_pb2, stage_pb2_grpc


class Source(stage_pb2_grpc.StageServiceServicer):
    """Emits one token a step for each run, stamped with the clock, at the pace that the runs ask for."""

    @staticmethod
    def _script(start: stage_pb2.StartRun) -> tuple[int, float]:
        extra = start.params.extra
        return int(extra["tokens"]), float(extra["rate"])

    async def Attach(self, requests, context) -> AsyncIterator[stage_pb2.StageServiceAttachResponse]:
        first = await anext(aiter(requests))
        runs = [command.run for command in first.commands]
        tokens, rate = self._script(first.commands[0].start)
        begin = time.monotonic()
        for step in range(tokens):
            if (wait := begin + step / rate - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            payload = content_pb2.Payload(token_ids=[step], text=f"{time.monotonic_ns():020d}")
            span = stage_pb2.OutputRange(first=step, count=1)
            output = stage_pb2.RunOutput(range=span, payload=payload)
            yield stage_pb2.StageServiceAttachResponse(
                events=[stage_pb2.RunEvent(run=run, output=output) for run in runs]
            )
        finished = stage_pb2.RunFinished(count=tokens)
        yield stage_pb2.StageServiceAttachResponse(
            events=[stage_pb2.RunEvent(run=run, finished=finished) for run in runs]
        )

    async def Execute(self, requests, context) -> AsyncIterator[stage_pb2.ExecuteResponse]:
        first = await anext(aiter(requests))
        tokens, rate = self._script(first.commands[0].start)
        begin = time.monotonic()
        for step in range(tokens):
            if (wait := begin + step / rate - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            payload = content_pb2.Payload(token_ids=[step], text=f"{time.monotonic_ns():020d}")
            output = stage_pb2.RunOutput(range=stage_pb2.OutputRange(first=step, count=1), payload=payload)
            yield stage_pb2.ExecuteResponse(events=[stage_pb2.RunEvent(output=output)])
        yield stage_pb2.ExecuteResponse(events=[stage_pb2.RunEvent(finished=stage_pb2.RunFinished(count=tokens))])


class Relay(generate_pb2_grpc.OmniServiceServicer):
    """Passes on what a source says."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stage = stage_pb2_grpc.StageServiceStub(channel)

    @staticmethod
    def _command(run: int, request: generate_pb2.GenerateRequest) -> stage_pb2.RunCommand:
        start = stage_pb2.StartRun(request_id=str(run), params=next(iter(request.params.values())))
        return stage_pb2.RunCommand(run=run, start=start)

    async def Attach(self, requests, context) -> AsyncIterator[generate_pb2.OmniServiceAttachResponse]:
        first = await anext(aiter(requests))
        call = self._stage.Attach()
        commands = [self._command(each.request, each.start) for each in first.commands]
        await call.write(stage_pb2.StageServiceAttachRequest(commands=commands))
        expected = {command.run: 0 for command in commands}
        async for response in call:
            out = generate_pb2.OmniServiceAttachResponse()
            for event in response.events:
                run = event.run
                if event.HasField("output"):
                    if event.output.range.first != expected[run]:
                        raise ValueError(f"run {run} is out of sequence")
                    relayed = generate_pb2.RequestOutput(stage="source", payload=event.output.payload)
                    out.events.append(generate_pb2.RequestEvent(request=run, index=expected[run], output=relayed))
                    expected[run] += 1
                else:
                    out.events.add(request=run, index=expected.pop(run)).finished.SetInParent()
            yield out
            if not expected:
                break
        async for _ in requests:  # credits, which it has no use for, until the client hangs up
            pass

    async def Generate(self, request, context) -> AsyncIterator[generate_pb2.GenerateResponse]:
        call = self._stage.Execute()
        await call.write(stage_pb2.ExecuteRequest(commands=[self._command(0, request)]))
        expected = 0
        async for response in call:
            for event in response.events:
                if event.HasField("output"):
                    if event.output.range.first != expected:
                        raise ValueError("out of sequence")
                    relayed = generate_pb2.RequestOutput(stage="source", payload=event.output.payload)
                    yield generate_pb2.GenerateResponse(
                        events=[generate_pb2.RequestEvent(index=expected, output=relayed)]
                    )
                    expected += 1
                else:
                    last = generate_pb2.GenerateResponse()
                    last.events.add(index=expected).finished.SetInParent()
                    yield last


async def serve(role: str, target: str) -> None:
    """Serves until it is killed."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    if role == "source":
        stage_pb2_grpc.add_StageServiceServicer_to_server(Source(), server)
    else:
        channel = grpc.aio.insecure_channel(target)
        generate_pb2_grpc.add_OmniServiceServicer_to_server(Relay(channel), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
