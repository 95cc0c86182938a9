"""What a coordinator refuses before any stage hears of it. Each refusal names the field and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from omni.rpc.errors import FieldViolation, OmniError, Reason
from omni.v1 import config_pb2, content_pb2, generate_pb2
from omnid.orchestrator.plan import Pipeline


def check(asked: generate_pb2.GenerateRequest, pipeline: Pipeline | None, models: Sequence[str]) -> None:
    """Checks a request that satisfies the contract against the model that it names.

    Raises:
        OmniError: UNKNOWN_MODEL, UNSUPPORTED_MODALITY, UNKNOWN_PARAMETER, MEDIA_TOO_LARGE or BAD_REQUEST.
    """
    if pipeline is None:
        raise _refusal(Reason.UNKNOWN_MODEL, "model", _unknown("model", asked.model, models))
    offered = [modality for stage in pipeline.stages.values() for modality in stage.spec.outputs]
    for index, modality in enumerate(asked.outputs):
        if modality not in offered:
            raise _refusal(
                Reason.UNSUPPORTED_MODALITY,
                f"outputs[{index}]",
                f"model {asked.model} does not make {_name(modality)}; it makes {_names(offered)}",
            )
    for stage in asked.params:
        if stage not in pipeline.stages:
            raise _refusal(
                Reason.UNKNOWN_PARAMETER, f'params["{stage}"]', _unknown("stage", stage, list(pipeline.stages))
            )
    if asked.prompt.HasField("conversation"):
        _check_conversation(asked.prompt.conversation, pipeline)
    elif asked.prompt.WhichOneof("prompt") == "text" and not asked.prompt.text:
        raise _refusal(Reason.BAD_REQUEST, "prompt.text", "is empty")


def _check_conversation(conversation: content_pb2.Conversation, pipeline: Pipeline) -> None:
    limits = _limits(pipeline)
    inputs = pipeline.resolved.inputs
    parts = 0
    empty = True
    for at, message in enumerate(conversation.messages):
        for index, part in enumerate(message.content):
            field = f"prompt.conversation.messages[{at}].content[{index}]"
            if part.WhichOneof("part") == "text":
                empty = empty and not part.text
                continue
            empty = False
            media = part.media
            parts += 1
            if media.modality not in inputs:
                raise _refusal(
                    Reason.UNSUPPORTED_MODALITY,
                    f"{field}.media",
                    f"model {pipeline.resolved.model} does not take {_name(media.modality)}; it takes {_names(inputs)}",
                )
            if len(media.data) > limits.bytes:
                raise _refusal(
                    Reason.MEDIA_TOO_LARGE,
                    f"{field}.media.data",
                    f"has {len(media.data)} bytes; at most {limits.bytes} are taken",
                )
    if parts > limits.parts:
        raise _refusal(
            Reason.MEDIA_TOO_LARGE,
            "prompt.conversation.messages",
            f"hold {parts} pictures and recordings; at most {limits.parts} are taken",
        )
    if empty:
        raise _refusal(Reason.BAD_REQUEST, "prompt.conversation.messages", "hold no text and no media")


def _limits(pipeline: Pipeline) -> config_pb2.MediaLimits:
    return next(stage.spec.limits for stage in pipeline.stages.values() if not stage.inputs)


def _refusal(reason: Reason, field: str, description: str) -> OmniError:
    return OmniError(reason, f"{field}: {description}", fields=[FieldViolation(field, description)])


def _unknown(kind: str, value: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no {kind} {value!r}; there are {', '.join(known)}{hint}"


def _name(modality: content_pb2.Modality.ValueType) -> str:
    return content_pb2.Modality.Name(modality).removeprefix("MODALITY_").lower()


def _names(modalities: Iterable[content_pb2.Modality.ValueType]) -> str:
    return ", ".join(dict.fromkeys(_name(each) for each in modalities)) or "nothing"
