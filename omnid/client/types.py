"""What a client gives and gets, without the contract's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from omni.rpc.errors import FieldViolation, invalid
from omni.v1 import content_pb2, generate_pb2

MODALITIES = {name.removeprefix("MODALITY_").lower(): number for name, number in content_pb2.Modality.items() if number}


@dataclass(slots=True)
class Artifact:
    """A file that a request made: sound or a picture."""

    modality: str
    mime_type: str = ""
    data: bytes = b""
    sample_rate: int = 0
    """Samples a second, of sound."""


@dataclass(frozen=True, slots=True)
class Output:
    """Something new of a request, as it came."""

    stage: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    media: tuple[content_pb2.MediaPiece, ...] = ()
    step: int = 0
    """Denoising steps done, of `steps`."""
    steps: int = 0


@dataclass(slots=True)
class Generation:
    """All that a request made."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    finished: generate_pb2.RequestFinished = field(default_factory=generate_pb2.RequestFinished)

    def take(self, output: Output) -> None:
        """Joins an output."""
        self.text += output.text
        self.token_ids.extend(output.token_ids)
        for piece in output.media:
            name = content_pb2.Modality.Name(piece.modality).removeprefix("MODALITY_").lower()
            same = [each for each in self.artifacts if each.modality == name]
            if piece.artifact >= len(same):
                same.append(Artifact(name, piece.mime_type, sample_rate=piece.sample_rate))
                self.artifacts.append(same[-1])
            same[piece.artifact].data += piece.data


def request(
    model: str,
    prompt: str | Sequence[content_pb2.ChatMessage],
    outputs: Sequence[str],
    params: Mapping[str, Mapping[str, Any]],
    timeout: float | None,
) -> generate_pb2.GenerateRequest:
    """The contract's request.

    Raises:
        OmniError: BAD_REQUEST, for a modality or a parameter that the contract does not have.
    """
    unknown = [name for name in outputs if name not in MODALITIES]
    if unknown:
        text = f"{unknown[0]!r} is none of {', '.join(MODALITIES)}"
        raise invalid(FieldViolation("outputs", text))
    message = generate_pb2.GenerateRequest(model=model, outputs=[MODALITIES[name] for name in outputs])
    if isinstance(prompt, str):
        turn = content_pb2.ChatMessage(role=content_pb2.CHAT_ROLE_USER, content=[content_pb2.ContentPart(text=prompt)])
        message.prompt.conversation.messages.append(turn)
    else:
        message.prompt.conversation.messages.extend(prompt)
    for stage, values in params.items():
        try:
            json_format.ParseDict(dict(values), message.params[stage])
        except json_format.ParseError as error:
            raise invalid(FieldViolation(f'params["{stage}"]', str(error))) from None
    if timeout is not None:
        message.timeout.FromNanoseconds(round(timeout * 1e9))
    return message


def output_of(event: generate_pb2.RequestOutput) -> Output:
    payload = event.payload
    return Output(
        stage=event.stage,
        text=payload.text,
        token_ids=tuple(payload.token_ids),
        media=tuple(payload.media),
        step=payload.progress.step,
        steps=payload.progress.steps,
    )


Params = Mapping[str, Mapping[str, Any]]
"""By stage, in the contract's JSON form: ``{"thinker": {"sampling": {"temperature": 0}}}``."""

__all__ = ["Artifact", "Generation", "Output", "Params", "output_of", "request"]
