"""Fields of omni.v1.GenerateRequest under the names that the sender of an OpenAI request knows."""

from __future__ import annotations

import re

from gateway.schemas import ImageRequest, Strict
from omni.rpc.errors import FieldViolation, OmniError

_PARAMS = re.compile(r'params\["(?P<stage>[^"]*)"\]\.?(?P<path>.*)', re.DOTALL)
_PROMPT = re.compile(r"prompt(?:\.(?:text|token_ids|conversation))?(?:\.messages)?")
_MEDIA = re.compile(r"\.media(?:\..*)?$")
_OF_STAGE = {"steps": "num_inference_steps", "outputs": "n"}
"""Names in `StageOverride` that differ from the contract's."""


def public_error(error: OmniError, schema: type[Strict] | None) -> OmniError:
    """`error` as the sender of a body is to read it.

    Args:
        error: its fields are the contract's, or the sender's own already.
        schema: of the body; None: there was none.
    """
    if schema is None or not error.fields:
        return error
    fields = [FieldViolation(public_field(each.field, schema), each.description) for each in error.fields]
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


def public_field(field: str, schema: type[Strict]) -> str:
    """The name in a body of that schema of a field of the contract; other names are left as they are."""
    if found := _PARAMS.fullmatch(field):
        return _of_stage(found["stage"], found["path"], schema)
    if field.startswith("outputs"):
        return field.replace("outputs", "modalities", 1)
    if schema is ImageRequest:
        return "prompt" if _PROMPT.match(field) else field
    return _MEDIA.sub("", _PROMPT.sub("messages", field, count=1) if _PROMPT.match(field) else field)


def _of_stage(stage: str, path: str, schema: type[Strict]) -> str:
    if path in schema.PUBLIC:
        return schema.PUBLIC[path]
    kind, _, name = path.partition(".")
    if kind not in ("sampling", "diffusion"):
        return f"sampling_params.{stage}" + (f".{path}" if path else "")
    plain, bracket, rest = name.partition("[")
    plain = _OF_STAGE.get(plain, plain)
    if plain in schema.model_fields:
        return plain + bracket + rest
    return f"sampling_params.{stage}" + (f".{plain}{bracket}{rest}" if plain else "")
