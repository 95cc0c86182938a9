"""A chat completion as server-sent events.

A text delta is what there is most of: it is written into a template of bytes, not through a model or a dictionary.
An output is credited to the coordinator when the connection has taken it, so a client that reads slowly slows its own
request and nobody else's.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import answers, errors
from gateway.answers import Artifact, Wanted
from gateway.metrics import Stopwatch
from gateway.naming import public_error
from gateway.presence import while_connected
from gateway.schemas import ChatRequest
from gateway.settings import Settings
from gateway.upstream import Call
from omni.rpc import logs
from omni.rpc.errors import OmniError
from omni.v1 import content_pb2, generate_pb2

_DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": still at work\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

_log = logs.get(__name__)


class Chunks:
    """Makes the chunks of one answer, in order."""

    def __init__(self, request_id: str, wanted: Wanted, *, with_usage: bool) -> None:
        self._request_id = request_id
        self._wanted = wanted
        self._with_usage = with_usage
        head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": wanted.model,
            "system_fingerprint": None,
        }
        end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._before = self._head + b',"choices":[{"index":0,"delta":'
        self._before_text = self._before + b'{"content":'
        self._after_text = b'},"logprobs":null,"finish_reason":null}]' + end
        self._after = b',"logprobs":null,"finish_reason":null}]' + end
        self._end = end
        self._speaks = content_pb2.MODALITY_AUDIO in wanted.made
        self._transcript: list[str] = []
        self._pictures: dict[int, Artifact] = {}

    def first(self) -> bytes:
        """The chunk that opens the message."""
        return self._before + b'{"role":"assistant","content":""}' + self._after

    def output(self, payload: content_pb2.Payload) -> bytes:
        """Chunks of an output; none while a picture is not complete."""
        made = b""
        text = payload.text
        if payload.logprobs:
            delta = orjson.dumps({"content": text})
            found = orjson.dumps(answers.logprobs(list(payload.logprobs)))
            made = b"".join((self._before, delta, b',"logprobs":', found, b',"finish_reason":null}]', self._end))
        elif text:
            made = b"".join((self._before_text, orjson.dumps(text), self._after_text))
        if self._speaks and text:
            self._transcript.append(text)
        return made + self._media(payload.media) if payload.media else made

    def finish(self, finished: generate_pb2.RequestFinished) -> bytes:
        """The last chunks and the end mark.

        Raises:
            OmniError: CANCELLED; COUNT_MISMATCH for a picture that ends short.
        """
        answers.check_not_cancelled(finished, self._request_id)
        answers.check_complete(self._pictures, self._request_id)
        made = [self._delta({"audio": answers.spoken_as(self._request_id, "".join(self._transcript))})] * self._speaks
        reason = orjson.dumps(answers.finish_reason(finished, self._wanted))
        made += [self._before, b'{},"logprobs":null,"finish_reason":', reason, b"}]", self._end]
        if self._with_usage:
            usage = orjson.dumps(answers.usage(finished, self._wanted))
            made += [self._head, b',"choices":[],"usage":', usage, b"}\n\n"]
        return b"".join((*made, _DONE))

    def _media(self, pieces: Sequence[content_pb2.MediaPiece]) -> bytes:
        sound = b""
        rate = 0
        pictures = []
        for piece in pieces:
            if piece.modality == content_pb2.MODALITY_AUDIO:
                sound += piece.data
                rate = rate or piece.sample_rate
            else:
                picture = self._pictures.setdefault(piece.artifact, Artifact())
                picture.take(piece)
                if picture.complete:
                    pictures.append(answers.image_part(piece.artifact, self._pictures.pop(piece.artifact)))
        made = b""
        if sound:
            audio: dict[str, Any] = {"id": f"audio_{self._request_id}", "data": base64.b64encode(sound).decode("ascii")}
            made += self._delta({"audio": audio | ({"sample_rate": rate} if rate else {})})
        if pictures:
            made += self._delta({"images": pictures})
        return made

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return b"".join((self._before, orjson.dumps(delta), self._after))


class EventStream(Response):
    """The answer to a request for a stream. It owns the call: when the client hangs up, or takes nothing for
    `Settings.stalled_client_s`, the request is cancelled."""

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        first: list[generate_pb2.RequestEvent],
        chunks: Chunks,
        watch: Stopwatch,
        settings: Settings,
        client_request_id: str,
        asked: ChatRequest,
    ) -> None:
        """
        Args:
            call: owned by the answer from now on.
            first: events that were taken from `call` already.
            chunks: makes the body.
            watch: measures the request.
            settings: heartbeat, and how long a client may stall.
            client_request_id: the sender's own, or the one that was made for it; for logs, and for the answer when the
                coordinator has not said its own in time.
            asked: what the sender sent, in whose words it is told what fails.
        """
        self.status_code = 200
        self.background = None
        self.body = b""
        self._call = call
        self._first = first
        self._chunks = chunks
        self._watch = watch
        self._settings = settings
        self._client_request_id = client_request_id
        self._asked = asked
        self.init_headers({**_HEADERS, "x-request-id": call.request_id or client_request_id})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._call:
            try:
                await while_connected(receive, self._write(send))
            except (OmniError, TimeoutError) as error:
                _log.info(
                    "client gone",
                    request_id=self._call.request_id,
                    client_request_id=self._client_request_id,
                    why=str(error),
                )

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            body = self._chunks.first()
            events = self._first
            while True:
                outputs = 0
                made = [body]
                for event in events:
                    kind = event.WhichOneof("event")
                    if kind == "output":
                        outputs += 1
                        self._watch.output(event.output.payload)
                        made.append(self._chunks.output(event.output.payload))
                    elif kind == "finished":
                        made.append(self._chunks.finish(event.finished))
                        self._watch.finished()
                if body := b"".join(made):
                    await self._send(send, body)
                self._call.credit(outputs)
                if self._call.ended:
                    break
                events = await self._call.events(self._settings.heartbeat_s)
                body = b"" if events else _HEARTBEAT
        except OmniError as error:
            errors.log_failure(error.located(request_id=self._call.request_id), self._client_request_id)
            told = errors.body(public_error(error, self._asked), self._client_request_id)
            await self._send(send, b"data: " + orjson.dumps(told) + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        """Returns when the connection has taken `body`, all but what fits into its buffers.

        Raises:
            TimeoutError: the client reads nothing for too long.
        """
        async with asyncio.timeout(self._settings.stalled_client_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})
