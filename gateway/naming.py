"""Errors about omni.v1.GenerateRequest in the words of whoever sent an OpenAI request."""

from __future__ import annotations

import re

from gateway.schemas import ChatRequest, ImageRequest
from omni.rpc.errors import FieldViolation, OmniError

Body = ChatRequest | ImageRequest

_PARAMS = re.compile(r'params\["(?P<stage>[^"]*)"\]\.?(?P<path>.*)', re.DOTALL)
_PROMPT = re.compile(r"prompt(?:\.(?:text|token_ids|conversation))?(?:\.messages)?")
_MEDIA = re.compile(r"\.media(?:\..*)?$")
_FORMAT = re.compile(r"\bMEDIA_FORMAT_[A-Z0-9]+\b")
_OF_STAGE = {"steps": "num_inference_steps", "outputs": "n"}
"""Names in `StageOverride` that differ from the contract's."""
_ELSEWHERE: dict[type[Body], dict[str, str]] = {
    ChatRequest: {"voice": "audio.voice", "format": "audio.format", "sampling.logprobs": "top_logprobs"},
    ImageRequest: {"format": "output_format", "diffusion.width": "size", "diffusion.height": "size"},
}
"""Fields that stand elsewhere in a body than in omni.v1.StageParams, by the path that they have there."""


def public_error(error: OmniError, body: Body | None) -> OmniError:
    """`error` as the sender of `body` is to read it; its fields are the contract's, or the sender's own already."""
    if body is None or not error.fields:
        return error
    fields = [
        FieldViolation(public_field(each.field, body), _FORMAT.sub(_format, each.description)) for each in error.fields
    ]
    if error.message == "; ".join(map(str, error.fields)):
        message = "; ".join(dict.fromkeys(map(str, fields)))
    else:
        message = error.message
        for ours, theirs in zip(error.fields, fields, strict=True):
            message = message.replace(f"{ours.field}: ", f"{theirs.field}: ")
    return OmniError(
        error.reason,
        message,
        request_id=error.request_id,
        stage=error.stage,
        replica=error.replica,
        fields=fields,
        retry_after=error.retry_after,
    )


def public_field(field: str, body: Body) -> str:
    """The name in `body` of a field of the contract; other names are left as they are."""
    if found := _PARAMS.fullmatch(field):
        return _of_stage(found["stage"], found["path"], body)
    if field.startswith("outputs"):
        return field.replace("outputs", "modalities", 1)
    if isinstance(body, ImageRequest):
        return "prompt" if _PROMPT.match(field) else field
    return _MEDIA.sub("", _PROMPT.sub("messages", field, count=1) if _PROMPT.match(field) else field)


def _of_stage(stage: str, path: str, body: Body) -> str:
    """`path` is that of a field in the stage's parameters; it was given for the stage, or for the whole request."""
    kind, _, name = path.partition(".")
    plain, bracket, rest = (name if kind in ("sampling", "diffusion") else path).partition("[")
    plain = _OF_STAGE.get(plain, plain)
    own = (body.sampling_params or {}).get(stage)
    if getattr(own, plain, None) is None:
        if path in _ELSEWHERE[type(body)]:
            return _ELSEWHERE[type(body)][path]
        if plain in type(body).model_fields:
            return plain + bracket + rest
    return f"sampling_params.{stage}" + (f".{plain}{bracket}{rest}" if plain else "")


def _format(found: re.Match[str]) -> str:
    return found[0].removeprefix("MEDIA_FORMAT_").lower()
