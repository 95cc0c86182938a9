"""What a client gives and gets, without the contract's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from omni.rpc.duration import duration_of
from omni.rpc.errors import FieldViolation, invalid
from omni.rpc.text import MODALITIES, modality_name, shown
from omni.v1 import content_pb2, generate_pb2

Params = Mapping[str, Mapping[str, Any]]
"""By stage, in the contract's JSON form: ``{"thinker": {"sampling": {"temperature": 0}}}``."""

LONGEST = 1e9
"""Seconds that a client may give a request; the deployment's own bound is shorter."""


@dataclass(slots=True)
class Artifact:
    """A file that a request made: sound or a picture."""

    modality: str
    mime_type: str = ""
    data: bytearray = field(default_factory=bytearray)
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
    _artifacts: dict[tuple[str, int], Artifact] = field(default_factory=dict)

    def take(self, output: Output) -> None:
        """Joins an output."""
        self.text += output.text
        self.token_ids.extend(output.token_ids)
        for piece in output.media:
            name = modality_name(piece.modality)
            key = name, piece.artifact
            if key not in self._artifacts:
                self._artifacts[key] = Artifact(name, piece.mime_type, sample_rate=piece.sample_rate)
                self.artifacts.append(self._artifacts[key])
            self._artifacts[key].data += piece.data


def request(
    model: str,
    prompt: str | Sequence[content_pb2.ChatMessage],
    outputs: Sequence[str],
    params: Params,
    timeout: float | None,
) -> generate_pb2.GenerateRequest:
    """The contract's request.

    Raises:
        OmniError: BAD_REQUEST, for a modality or a parameter that the contract does not have.
    """
    wrong = [
        FieldViolation(name, f"must be {what}, got {shown(value)}")
        for name, value, right, what in (
            ("model", model, _is_text(model), "a name"),
            ("prompt", prompt, _is_prompt(prompt), "a text or a list of ChatMessage"),
            ("outputs", outputs, _are_names(outputs), f"a list of any of {', '.join(MODALITIES)}"),
            ("params", params, _is_params(params), "a mapping of stages to mappings"),
            ("timeout", timeout, _is_timeout(timeout), f"a number of seconds, more than 0 and at most {LONGEST:g}"),
        )
        if not right
    ]
    if not wrong:
        allowed = f"is none of {', '.join(MODALITIES)}"
        wrong = [FieldViolation("outputs", f"{shown(name)} {allowed}") for name in outputs if name not in MODALITIES]
    if wrong:
        raise invalid(*wrong)
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
        message.timeout.CopyFrom(duration_of(timeout))
    return message


def _is_text(given: object) -> bool:
    """Whether it is a string that can travel: one that holds half of a surrogate pair cannot."""
    if not isinstance(given, str):
        return False
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_names(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(each, str) for each in given)


def _is_prompt(given: object) -> bool:
    if isinstance(given, str):
        return _is_text(given)
    return isinstance(given, Sequence) and all(isinstance(each, content_pb2.ChatMessage) for each in given)


def _is_params(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        _is_text(stage) and isinstance(values, Mapping) for stage, values in given.items()
    )


def _is_timeout(given: object) -> bool:
    return given is None or (isinstance(given, int | float) and 0 < given <= LONGEST)


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
