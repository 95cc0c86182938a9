"""Events of a request -> OpenAI's answers."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field
from typing import Any

from omni.v1 import content_pb2, generate_pb2

_REASONS = {
    content_pb2.FINISH_REASON_STOP: "stop",
    content_pb2.FINISH_REASON_LENGTH: "length",
    content_pb2.FINISH_REASON_CANCELLED: "stop",
}
AUDIO_SECONDS = 3600
"""How long an answer's audio id is said to be good for."""


@dataclass(slots=True)
class Artifact:
    """One encoded file, put together from its pieces."""

    mime_type: str = ""
    data: bytearray = field(default_factory=bytearray)

    def data_url(self) -> str:
        return f"data:{self.mime_type};base64,{base64.b64encode(self.data).decode()}"


@dataclass(slots=True)
class Answer:
    """All that a request made."""

    text: str = ""
    logprobs: list[content_pb2.TokenLogprobs] = field(default_factory=list)
    sound: Artifact | None = None
    pictures: dict[int, Artifact] = field(default_factory=dict)
    finished: generate_pb2.RequestFinished | None = None

    def take(self, payload: content_pb2.Payload) -> None:
        """Joins an output."""
        self.text += payload.text
        self.logprobs.extend(payload.logprobs)
        for piece in payload.media:
            if piece.modality == content_pb2.MODALITY_AUDIO:
                self.sound = artifact = self.sound or Artifact()
            else:
                artifact = self.pictures.setdefault(piece.artifact, Artifact())
            artifact.mime_type = artifact.mime_type or piece.mime_type
            artifact.data += piece.data


def head(request_id: str, model: str, kind: str) -> dict[str, Any]:
    """Fields that an answer and each of its chunks share."""
    return {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time()), "model": model}


def completion(answer: Answer, request_id: str, model: str, *, spoken: bool) -> dict[str, Any]:
    """The body of a chat completion that was not streamed."""
    finished = answer.finished or generate_pb2.RequestFinished()
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if spoken and answer.sound is not None:
        data = base64.b64encode(answer.sound.data).decode()
        message["audio"] = spoken_as(request_id, answer.text) | {"data": data}
    if answer.pictures:
        message["images"] = [_image(artifact) for _, artifact in sorted(answer.pictures.items())]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs(answer.logprobs),
        "finish_reason": finish_reason(finished),
    }
    return head(request_id, model, "chat.completion") | {"choices": [choice], "usage": usage(finished)}


def spoken_as(request_id: str, transcript: str) -> dict[str, Any]:
    """What an answer says of its sound beside the data; the last audio of a stream."""
    expires = int(time.time()) + AUDIO_SECONDS
    return {"id": f"audio_{request_id}", "expires_at": expires, "transcript": transcript}


def _image(artifact: Artifact) -> dict[str, Any]:
    """A picture of a message, as OpenRouter and others that answer chats with pictures have it."""
    return {"type": "image_url", "image_url": {"url": artifact.data_url()}}


def images(answer: Answer) -> dict[str, Any]:
    """The body of an image generation."""
    ordered = sorted(answer.pictures.items())
    data = [{"b64_json": base64.b64encode(artifact.data).decode()} for _, artifact in ordered]
    kind = ordered[0][1].mime_type.removeprefix("image/") if ordered else None
    return {"created": int(time.time()), "data": data, "output_format": kind}


def delta(payload: content_pb2.Payload, request_id: str, pictures: dict[int, Artifact]) -> dict[str, Any]:
    """What a chunk of a stream adds to the message; a picture comes whole, with its last piece."""
    found: dict[str, Any] = {}
    if payload.text:
        found["content"] = payload.text
    sound = b"".join(piece.data for piece in payload.media if piece.modality == content_pb2.MODALITY_AUDIO)
    if sound:
        found["audio"] = {"id": f"audio_{request_id}", "data": base64.b64encode(sound).decode()}
    for piece in payload.media:
        if piece.modality == content_pb2.MODALITY_AUDIO:
            continue
        artifact = pictures.setdefault(piece.artifact, Artifact())
        artifact.mime_type = artifact.mime_type or piece.mime_type
        artifact.data += piece.data
        if piece.last:
            found.setdefault("images", []).append(_image(pictures.pop(piece.artifact)))
    return found


def finish_reason(finished: generate_pb2.RequestFinished) -> str:
    return _REASONS.get(finished.reason, "stop")


def usage(finished: generate_pb2.RequestFinished) -> dict[str, Any]:
    """Tokens of the stage that wrote the text; the first stage that counted a prompt."""
    counted = next((each.usage for each in finished.stages if each.usage.prompt_tokens), content_pb2.Usage())
    sound = sum(each.usage.completion_tokens for each in finished.stages[1:])
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"audio_tokens": sound, "reasoning_tokens": 0},
    }


def logprobs(found: list[content_pb2.TokenLogprobs]) -> dict[str, Any] | None:
    """Log probabilities in OpenAI's form; None when there are none."""
    if not found:
        return None

    def entry(candidate: content_pb2.TokenLogprobs.Candidate) -> dict[str, Any]:
        return {"token": candidate.text, "logprob": candidate.logprob, "bytes": list(candidate.text.encode())}

    return {
        "content": [
            entry(each.sampled) | {"top_logprobs": [entry(candidate) for candidate in each.top]} for each in found
        ],
        "refusal": None,
    }
