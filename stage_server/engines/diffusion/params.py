"""Checks what a request asks of a diffusion stage, and fills in what it leaves out."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.v1 import config_pb2, content_pb2
from stage_server.engines.diffusion.model import Limits, PictureRequest
from stage_server.output import image

if TYPE_CHECKING:
    from stage_server.engines.base import Run


def picture_request(run: Run, limits: Limits) -> PictureRequest:
    """The run's parameters, complete.

    Raises:
        OmniError: BAD_REQUEST, UNKNOWN_PARAMETER or UNSUPPORTED_MODALITY with every field that is wrong and what is
            allowed there.
    """
    _refuse_unknown(run.params)
    wanted = run.params.diffusion
    path = "params.diffusion"
    width = wanted.width if wanted.HasField("width") else limits.width
    height = wanted.height if wanted.HasField("height") else limits.height
    wrong = [*_side(path, "width", width, limits), *_side(path, "height", height, limits)]
    if not wrong and width * height > limits.max_pixels:
        told = f"width x height must be at most {limits.max_pixels} pixels, got {width} x {height}"
        wrong.append(FieldViolation(f"{path}.width", told))
    if wanted.negative_prompt and not limits.negative_prompt:
        wrong.append(FieldViolation(f"{path}.negative_prompt", "this model takes none"))
    if wanted.HasField("frames") and wanted.frames != 1:
        wrong.append(FieldViolation(f"{path}.frames", f"this model draws single pictures, got {wanted.frames}"))
    media_format = run.params.format if run.params.HasField("format") else config_pb2.MEDIA_FORMAT_PNG
    if media_format not in image.FORMATS:
        allowed = ", ".join(sorted(config_pb2.MediaFormat.Name(each) for each in image.FORMATS))
        got = config_pb2.MediaFormat.Name(media_format)
        wrong.append(FieldViolation("params.format", f"must be one of {allowed}, got {got}"))
    if wrong:
        raise invalid(*wrong)
    return PictureRequest(
        prompt=_prompt(run.prompt),
        negative_prompt=wanted.negative_prompt,
        width=width,
        height=height,
        steps=wanted.steps if wanted.HasField("steps") else limits.steps,
        guidance_scale=wanted.guidance_scale if wanted.HasField("guidance_scale") else limits.guidance_scale,
        seed=wanted.seed if wanted.HasField("seed") else secrets.randbits(63),
        outputs=wanted.outputs if wanted.HasField("outputs") else 1,
        media_format=media_format,
    )


def _refuse_unknown(params: config_pb2.StageParams) -> None:
    path = "params"
    wrong = [FieldViolation(f"{path}.extra.{key}", "this model knows no such key") for key in params.extra]
    if params.sampling.ListFields():
        wrong.append(FieldViolation(f"{path}.sampling", "a diffusion stage draws no tokens; use `diffusion`"))
    if params.HasField("voice"):
        wrong.append(FieldViolation(f"{path}.voice", "this stage makes no sound"))
    if wrong:
        raise invalid(*wrong, reason=Reason.UNKNOWN_PARAMETER)


def _side(path: str, name: str, value: int, limits: Limits) -> list[FieldViolation]:
    if limits.multiple <= value <= limits.max_side and value % limits.multiple == 0:
        return []
    allowed = f"must be a multiple of {limits.multiple} from {limits.multiple} to {limits.max_side} pixels"
    return [FieldViolation(f"{path}.{name}", f"{allowed}, got {value}")]


def _prompt(prompt: content_pb2.Prompt | None) -> str:
    """The text to draw: as it is, or the text of a conversation's last user message."""
    if prompt is None:
        raise OmniError(Reason.BAD_REQUEST, "a diffusion stage draws from a prompt, and the run has none")
    if prompt.WhichOneof("prompt") == "token_ids":
        field = FieldViolation("prompt.token_ids", "a diffusion stage takes text or a conversation")
        raise invalid(field)
    if prompt.WhichOneof("prompt") == "text":
        field_name, text = "prompt.text", prompt.text
    else:
        field_name = "prompt.conversation.messages"
        text = _last_user_text(prompt.conversation, field_name)
    if not text.strip():
        raise invalid(FieldViolation(field_name, "has no text to draw"))
    return text


def _last_user_text(conversation: content_pb2.Conversation, field: str) -> str:
    for index in reversed(range(len(conversation.messages))):
        message = conversation.messages[index]
        if message.role != content_pb2.CHAT_ROLE_USER:
            continue
        for place, part in enumerate(message.content):
            if part.HasField("media"):
                told = "this model draws from text only"
                where = f"{field}[{index}].content[{place}].media"
                raise invalid(FieldViolation(where, told), reason=Reason.UNSUPPORTED_MODALITY)
        return "\n".join(part.text for part in message.content)
    raise invalid(FieldViolation(field, "has no message of a user"))
