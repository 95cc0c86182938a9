"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from gateway import answers, errors, translate
from gateway.context import Gateway, gateway, read
from gateway.metrics import Stopwatch
from gateway.schemas import ChatRequest
from gateway.upstream import Call
from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2, generate_pb2

router = APIRouter()

_DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": still at work\n\n"


@router.post("/v1/chat/completions", openapi_extra={"requestBody": {"content": {"application/json": {}}}})
async def create(request: Request) -> Response:
    """A chat completion, whole or as server-sent events."""
    shared = gateway(request)
    body = await read(request, ChatRequest, shared.settings.max_body_bytes)
    model = await shared.coordinators.model(body.model)
    asked = await translate.chat(body, model, urls=shared.settings.allow_media_urls)
    asked.client_request_id = request.state.request_id[:128]
    watch = Stopwatch(shared.metrics, body.model)
    call = shared.coordinators.start(asked)
    if not body.stream:
        answer = await collect(call, watch, request)
        spoken = content_pb2.MODALITY_AUDIO in (list(asked.outputs) or list(model.default_outputs))
        content = answers.completion(answer, call.request_id, body.model, spoken=spoken)
        return Response(orjson.dumps(content), media_type="application/json")
    first = await first_events(call, shared)
    return StreamingResponse(
        stream(call, first, body, watch, request),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def collect(call: Call, watch: Stopwatch, request: Request) -> answers.Answer:
    """The whole answer of a request; cancelled when its client goes away.

    Raises:
        OmniError: how the request failed.
    """
    answer = answers.Answer()

    async def take() -> None:
        while not call.ended:
            outputs = 0
            for event in await call.events():
                kind = event.WhichOneof("event")
                if kind == "output":
                    answer.take(event.output.payload)
                    watch.output(event.output.payload)
                    outputs += 1
                elif kind == "finished":
                    answer.finished = event.finished
                    watch.finished(event.finished)
            call.credit(outputs)

    async with call:
        taking = asyncio.ensure_future(take())
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise OmniError(Reason.CANCELLED, "the client went away", request_id=call.request_id)
            taking.result()
        finally:
            for task in (taking, gone):
                task.cancel()
            await asyncio.wait((taking, gone))
    return answer


async def _gone(request: Request) -> None:
    """Returns when the HTTP client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def first_events(call: Call, shared: Gateway) -> list[generate_pb2.RequestEvent]:
    """Events up to the first that a client sees, so that an early failure still has its HTTP status.

    Raises:
        OmniError: how the request failed.
    """
    found: list[generate_pb2.RequestEvent] = []
    try:
        while not any(event.WhichOneof("event") != "accepted" for event in found):
            more = await call.events(shared.settings.first_event_s)
            if not more:
                break
            found += more
    except BaseException:
        await call.__aexit__(None, None, None)
        raise
    return found


async def stream(
    call: Call, first: list[generate_pb2.RequestEvent], body: ChatRequest, watch: Stopwatch, request: Request
) -> AsyncIterator[bytes]:
    """Server-sent events. Starlette closes this generator when the client hangs up, which cancels the request."""
    settings = gateway(request).settings
    head = answers.head(call.request_id, body.model, "chat.completion.chunk")
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    pictures: dict[int, answers.Artifact] = {}
    transcript: list[str] = []
    spoken = False

    def chunk(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        content = head | {"choices": [choice]} | ({"usage": None} if with_usage else {})
        return b"data: " + orjson.dumps(content) + b"\n\n"

    async with call:
        yield chunk({"role": "assistant", "content": ""})
        try:
            events = first
            while True:
                outputs = 0
                parts: list[bytes] = []
                for event in events:
                    kind = event.WhichOneof("event")
                    if kind == "output":
                        outputs += 1
                        payload = event.output.payload
                        watch.output(payload)
                        transcript.append(payload.text)
                        spoken = spoken or any(p.modality == content_pb2.MODALITY_AUDIO for p in payload.media)
                        if found := answers.delta(payload, call.request_id, pictures):
                            parts.append(chunk(found, logprobs=answers.logprobs(list(payload.logprobs))))
                    elif kind == "finished":
                        watch.finished(event.finished)
                        if spoken:
                            parts.append(chunk({"audio": answers.spoken_as(call.request_id, "".join(transcript))}))
                        parts.append(chunk({}, answers.finish_reason(event.finished)))
                        if with_usage:
                            usage = head | {"choices": [], "usage": answers.usage(event.finished)}
                            parts.append(b"data: " + orjson.dumps(usage) + b"\n\n")
                        parts.append(_DONE)
                if parts:
                    yield b"".join(parts)
                call.credit(outputs)
                if call.ended:
                    return
                events = await call.events(settings.heartbeat_s)
                if not events:
                    yield _HEARTBEAT
        except OmniError as error:
            yield b"data: " + orjson.dumps(errors.body(error, request.state.request_id)) + b"\n\n"
