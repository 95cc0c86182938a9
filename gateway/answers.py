"""Events of a request -> OpenAI's bodies, for answers that are not streamed and for what streams share with them."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field
from typing import Any

from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2, generate_pb2

_REASONS = {
    content_pb2.FINISH_REASON_STOP: "stop",
    content_pb2.FINISH_REASON_LENGTH: "length",
}
AUDIO_SECONDS = 3600
"""How long an answer's audio id is said to be good for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request is to make, as far as its answer's form depends on it."""

    model: str
    made: frozenset[content_pb2.Modality.ValueType]
    text_stage: str
    """Stage whose text, tokens and finish reason the answer shows; "" when no text is made."""


@dataclass(slots=True)
class Artifact:
    """One encoded file, put together from its pieces."""

    mime_type: str = ""
    sample_rate: int = 0
    data: bytearray = field(default_factory=bytearray)
    complete: bool = False

    def take(self, piece: content_pb2.MediaPiece) -> None:
        """Joins the next piece."""
        self.mime_type = self.mime_type or piece.mime_type
        self.sample_rate = self.sample_rate or piece.sample_rate
        self.data += piece.data
        self.complete = piece.last

    def base64(self) -> str:
        return base64.b64encode(self.data).decode("ascii")


@dataclass(slots=True)
class Answer:
    """All that a request made."""

    text: list[str] = field(default_factory=list)
    logprobs: list[content_pb2.TokenLogprobs] = field(default_factory=list)
    sound: Artifact | None = None
    pictures: dict[int, Artifact] = field(default_factory=dict)
    finished: generate_pb2.RequestFinished = field(default_factory=generate_pb2.RequestFinished)

    def take(self, payload: content_pb2.Payload) -> None:
        """Joins an output."""
        self.text.append(payload.text)
        self.logprobs.extend(payload.logprobs)
        for piece in payload.media:
            if piece.modality == content_pb2.MODALITY_AUDIO:
                self.sound = self.sound or Artifact()
                self.sound.take(piece)
            else:
                self.pictures.setdefault(piece.artifact, Artifact()).take(piece)

    def finish(self, finished: generate_pb2.RequestFinished, request_id: str) -> None:
        """Takes the last event.

        Raises:
            OmniError: CANCELLED, by somebody else; COUNT_MISMATCH for a picture that ends short.
        """
        check_not_cancelled(finished, request_id)
        check_complete(self.pictures, request_id)
        self.finished = finished


def check_not_cancelled(finished: generate_pb2.RequestFinished, request_id: str) -> None:
    """
    Raises:
        OmniError: CANCELLED.
    """
    if finished.reason == content_pb2.FINISH_REASON_CANCELLED:
        raise OmniError(Reason.CANCELLED, "the request was cancelled", request_id=request_id)


def check_complete(pictures: dict[int, Artifact], request_id: str) -> None:
    """
    Raises:
        OmniError: COUNT_MISMATCH, for a picture whose last piece has not come.
    """
    for index, picture in pictures.items():
        if not picture.complete:
            text = f"picture {index} ended short after {len(picture.data)} bytes"
            raise OmniError(Reason.COUNT_MISMATCH, text, request_id=request_id)


def completion(answer: Answer, request_id: str, wanted: Wanted) -> dict[str, Any]:
    """The body of a chat completion that was not streamed."""
    text = "".join(answer.text)
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
    if wanted.text_stage:
        message["content"] = text
    if content_pb2.MODALITY_AUDIO in wanted.made:
        sound = answer.sound or Artifact()
        message["audio"] = spoken_as(request_id, text) | {"data": sound.base64(), "sample_rate": sound.sample_rate}
    if content_pb2.MODALITY_IMAGE in wanted.made:
        message["images"] = [image_part(index, each) for index, each in sorted(answer.pictures.items())]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs(answer.logprobs),
        "finish_reason": finish_reason(answer.finished, wanted),
    }
    return {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": wanted.model,
        "choices": [choice],
        "usage": usage(answer.finished, wanted),
        "system_fingerprint": None,
    }


def spoken_as(request_id: str, transcript: str) -> dict[str, Any]:
    """What an answer says of its sound beside the data; the last audio of a stream."""
    expires = int(time.time()) + AUDIO_SECONDS
    return {"id": f"audio_{request_id}", "expires_at": expires, "transcript": transcript}


def image_part(index: int, artifact: Artifact) -> dict[str, Any]:
    """A picture of a message, in the form that OpenRouter gave to chats that answer with pictures."""
    url = f"data:{artifact.mime_type};base64,{artifact.base64()}"
    return {"index": index, "type": "image_url", "image_url": {"url": url}}


def images(answer: Answer, asked_for: int, request_id: str) -> dict[str, Any]:
    """The body of an image generation.

    Raises:
        OmniError: COUNT_MISMATCH, when not as many came as were asked for.
    """
    ordered = [artifact for _, artifact in sorted(answer.pictures.items())]
    if len(ordered) != asked_for:
        text = f"{len(ordered)} pictures came where {asked_for} were asked for"
        raise OmniError(Reason.COUNT_MISMATCH, text, request_id=request_id)
    used = [each.usage for each in answer.finished.stages]
    read, made = sum(each.prompt_tokens for each in used), sum(each.completion_tokens for each in used)
    return {
        "created": int(time.time()),
        "data": [{"b64_json": artifact.base64()} for artifact in ordered],
        "output_format": ordered[0].mime_type.removeprefix("image/"),
        "usage": {
            "input_tokens": read,
            "output_tokens": made,
            "total_tokens": read + made,
            "input_tokens_details": {"text_tokens": read, "image_tokens": 0},
        },
    }


def finish_reason(finished: generate_pb2.RequestFinished, wanted: Wanted) -> str:
    """Of the text, when there is text: sound that was cut is no reason to say that the text was."""
    of_text = (stage.reason for stage in finished.stages if stage.stage == wanted.text_stage)
    return _REASONS.get(next(of_text, finished.reason), "stop")


def usage(finished: generate_pb2.RequestFinished, wanted: Wanted) -> dict[str, Any]:
    """Tokens of the stage that wrote the text, or of the first one that read a prompt. Frames of sound that other
    stages made are told apart, as part of neither sum: clients divide the sum by the time it took."""
    counted = next(
        (stage.usage for stage in finished.stages if stage.stage == wanted.text_stage),
        next((stage.usage for stage in finished.stages if stage.usage.prompt_tokens), content_pb2.Usage()),
    )
    sound = sum(stage.usage.completion_tokens for stage in finished.stages if stage.stage != wanted.text_stage)
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "audio_tokens": sound if content_pb2.MODALITY_AUDIO in wanted.made else 0,
            "reasoning_tokens": 0,
        },
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
