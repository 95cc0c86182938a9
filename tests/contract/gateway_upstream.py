"""A real gateway on a real socket in front of a real OmniService whose answers a script decides."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import httpx
import openai
from prometheus_client import CollectorRegistry

from gateway.server import HttpServer
from gateway.settings import Settings
from omni.rpc.errors import OmniError
from omni.rpc.server import Server, make_server
from omni.rpc.tls import ServerTls
from omni.v1 import config_pb2, content_pb2, generate_pb2, generate_pb2_grpc

BOUND_S = 10.0
TEXT, IMAGE, AUDIO = content_pb2.MODALITY_TEXT, content_pb2.MODALITY_IMAGE, content_pb2.MODALITY_AUDIO


class Turn:
    """One request as the coordinator has it."""

    def __init__(self, number: int, start: generate_pb2.GenerateRequest, session: Session) -> None:
        self.start = start
        self.credits = asyncio.Semaphore(0)
        self.taken = 0
        """Credits that came in all."""
        self.cancelled = asyncio.Event()
        self.reason = ""
        self._number = number
        self._session = session
        self._index = 0

    async def event(self, **event: Any) -> None:
        await self._session.events.put(generate_pb2.RequestEvent(request=self._number, index=self._index, **event))
        self._index += 1

    async def accept(self, request_id: str = "req-1") -> None:
        await self.event(accepted=generate_pb2.RequestAccepted(request_id=request_id))

    async def output(self, stage: str, **payload: Any) -> None:
        output = generate_pb2.RequestOutput(stage=stage, payload=content_pb2.Payload(**payload))
        await self.event(output=output)

    async def text(self, text: str, token: int = 1) -> None:
        await self.output("thinker", text=text, token_ids=[token])

    async def finish(self, *stages: generate_pb2.StageFinished, reason: int = content_pb2.FINISH_REASON_STOP) -> None:
        await self.event(finished=generate_pb2.RequestFinished(reason=reason, stages=stages))

    async def fail(self, error: OmniError) -> None:
        await self.event(failed=error.to_status())


class _BrokenError(Exception):
    """Ends a stream with all that serves it."""


Script = Callable[[Turn], Awaitable[None]]


class Session:
    """One Attach stream."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[generate_pb2.RequestEvent | None] = asyncio.Queue()
        self.turns: dict[int, Turn] = {}


class Omni(generate_pb2_grpc.OmniServiceServicer):
    """The coordinator: answers each request with the script of the day."""

    def __init__(self) -> None:
        self.models = [omni_model(), image_model()]
        self.script: Script = hello
        self.sessions: list[Session] = []
        self.turns: list[Turn] = []
        self.commands = 0
        self.listings = 0
        self._seen = asyncio.Condition()

    async def ListModels(self, _request: Any, _context: Any) -> generate_pb2.ListModelsResponse:
        self.listings += 1
        return generate_pb2.ListModelsResponse(models=self.models)

    async def Attach(self, requests: Any, context: Any) -> None:
        session = Session()
        self.sessions.append(session)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(requests, session, tasks))
                tasks.create_task(self._write(session, context))
        except* _BrokenError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    async def _read(self, requests: Any, session: Session, tasks: asyncio.TaskGroup) -> None:
        async for message in requests:
            for number in message.credits:
                turn = session.turns[number]
                turn.taken += 1
                turn.credits.release()
            for command in message.commands:
                self.commands += 1
                if command.HasField("start"):
                    turn = session.turns[command.request] = Turn(command.request, command.start, session)
                    self.turns.append(turn)
                    tasks.create_task(self.script(turn))
                else:
                    session.turns[command.request].reason = command.cancel.reason
                    session.turns[command.request].cancelled.set()
            async with self._seen:
                self._seen.notify_all()
        await session.events.put(None)

    async def _write(self, session: Session, context: Any) -> None:
        while True:
            events = [await session.events.get()]
            while not session.events.empty():
                events.append(session.events.get_nowait())
            if None in events:
                # Between two writes: one that is cut off would leave the call without its end.
                raise _BrokenError
            await context.write(generate_pb2.OmniServiceAttachResponse(events=events))

    def break_streams(self) -> None:
        """Ends all Attach streams, as a coordinator that goes away does."""
        for session in self.sessions:
            session.events.put_nowait(None)

    async def turn(self, index: int = 0) -> Turn:
        """The request of that place, when it has come."""
        async with asyncio.timeout(BOUND_S), self._seen:
            await self._seen.wait_for(lambda: len(self.turns) > index)
        return self.turns[index]

    async def seen(self, condition: Callable[[], bool], within: float = BOUND_S) -> None:
        """Waits until `condition` holds after some message from the gateway; TimeoutError after `within` seconds."""
        async with asyncio.timeout(within), self._seen:
            await self._seen.wait_for(condition)


async def hello(turn: Turn) -> None:
    """Answers any request with what it asked for, in two pieces each."""
    await turn.accept()
    outputs = list(turn.start.outputs) or [TEXT]
    if TEXT in outputs:
        await turn.text("Hel")
        await turn.text("lo", 2)
    if AUDIO in outputs:
        for piece in (b"\x01\x00" * 4, b"\x02\x00" * 4):
            first = piece[0] == 1
            media = content_pb2.MediaPiece(
                modality=AUDIO,
                mime_type="audio/pcm" if first else "",
                sample_rate=24000 * first,
                data=piece,
                samples=4,
                last=not first,
            )
            await turn.output("code2wav", media=[media])
    if IMAGE in outputs:
        for picture in range(turn.start.params["dit"].diffusion.outputs or 1):
            for piece in (b"\x89PNG", bytes([picture])):
                media = content_pb2.MediaPiece(
                    artifact=picture, modality=IMAGE, mime_type="image/png", data=piece, last=len(piece) == 1
                )
                await turn.output("dit", media=[media])
    stages = [finished("thinker", prompt=7, completion=2)] if TEXT in outputs else []
    if AUDIO in outputs:
        stages += [finished("talker", completion=5), finished("code2wav")]
    await turn.finish(*stages)


def finished(
    stage: str, prompt: int = 0, completion: int = 0, reason: int = content_pb2.FINISH_REASON_STOP
) -> generate_pb2.StageFinished:
    usage = content_pb2.Usage(prompt_tokens=prompt, completion_tokens=completion)
    return generate_pb2.StageFinished(stage=stage, reason=reason, usage=usage)


def omni_model() -> generate_pb2.Model:
    return generate_pb2.Model(
        model="tiny-omni",
        pipeline="qwen3_omni",
        inputs=[TEXT, IMAGE, AUDIO],
        outputs=[
            generate_pb2.ModelOutput(modality=TEXT, stage="thinker", kind=config_pb2.STAGE_KIND_AUTOREGRESSIVE),
            generate_pb2.ModelOutput(modality=AUDIO, stage="code2wav", kind=config_pb2.STAGE_KIND_GENERATION),
        ],
        default_outputs=[TEXT],
        stages=["thinker", "talker", "code2wav"],
        limits=config_pb2.MediaLimits(bytes=4096, pixels=10_000, parts=2, seconds=1.0),
        ready=True,
    )


def image_model() -> generate_pb2.Model:
    output = generate_pb2.ModelOutput(modality=IMAGE, stage="dit", kind=config_pb2.STAGE_KIND_DIFFUSION)
    return generate_pb2.Model(
        model="tiny-image",
        pipeline="image",
        inputs=[TEXT],
        outputs=[output],
        default_outputs=[IMAGE],
        stages=["dit"],
        ready=True,
    )


async def start_omni(omni: Omni, address: str = "127.0.0.1:0", tls: ServerTls | None = None) -> tuple[Server, str]:
    """Serves `omni`; the server and its target."""
    server = make_server(tls=tls, registry=CollectorRegistry(), service_names=["omni.v1.OmniService"])
    server.add(generate_pb2_grpc.add_OmniServiceServicer_to_server, omni)
    port = await server.start(address)
    return server, f"127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def gateway_at(target: str, *, attached: bool = True, **settings: Any) -> AsyncIterator[str]:
    """A gateway in front of `target`; its URL. `settings` are fields of `Settings`."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(replace(Settings(coordinators=(target,)), **settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(BOUND_S):
            await server.serving.wait()
            if attached:
                await server.app.state.gateway.coordinators.attached()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def gateway(omni: Omni, **settings: Any) -> AsyncIterator[str]:
    """A gateway in front of `omni`; its URL."""
    server, target = await start_omni(omni)
    try:
        async with gateway_at(target, **settings) as url:
            yield url
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def sdk(omni: Omni, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of a gateway in front of `omni`."""
    async with (
        gateway(omni, **settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=BOUND_S) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def http(omni: Omni, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of a gateway in front of `omni`."""
    async with gateway(omni, **settings) as url, httpx.AsyncClient(base_url=url, timeout=BOUND_S) as client:
        yield client
