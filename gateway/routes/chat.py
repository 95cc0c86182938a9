"""``POST /v1/chat/completions``."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway import answers, translate
from gateway.context import gateway, json_body, read, send
from gateway.event_stream import Chunks, EventStream
from gateway.metrics import Stopwatch
from gateway.presence import while_connected
from gateway.schemas import ChatRequest
from gateway.upstream import Call
from omni.v1 import generate_pb2

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
async def create(request: Request) -> Response:
    """A chat completion, whole or as server-sent events."""
    shared = gateway(request)
    body = await read(request, ChatRequest, shared.settings.max_body_bytes)
    watch = Stopwatch(shared.metrics, body.model)
    model = await shared.coordinators.model(body.model)
    asked, wanted = await translate.chat(body, model, shared.fetcher)
    call = send(request, asked)
    if not body.stream:
        answer = await collect(call, watch, request)
        content = answers.completion(answer, call.request_id, wanted)
        headers = {"x-request-id": call.request_id}
        return Response(orjson.dumps(content), headers=headers, media_type="application/json")
    first = await first_events(call, shared.settings.first_event_s, request)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    client_request_id = request.state.request_id
    chunks = Chunks(call.request_id or client_request_id, wanted, with_usage=with_usage)
    return EventStream(call, first, chunks, watch, shared.settings, client_request_id, body)


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
                    answer.finish(event.finished, call.request_id)
                    watch.finished()
            call.credit(outputs)

    async with call:
        await while_connected(request.receive, take())
    return answer


async def first_events(call: Call, within: float, request: Request) -> list[generate_pb2.RequestEvent]:
    """Events up to the first that a client sees, so that an early failure still has its HTTP status; after `within`
    seconds those that there are.

    Raises:
        OmniError: how the request failed; then, or when the client goes away, the call is ended.
    """
    found: list[generate_pb2.RequestEvent] = []

    async def take() -> None:
        while not any(event.WhichOneof("event") != "accepted" for event in found):
            more = await call.events(within)
            found.extend(more)
            if not more:
                return

    try:
        await while_connected(request.receive, take())
    except BaseException:
        await call.__aexit__(None, None, None)
        raise
    return found
