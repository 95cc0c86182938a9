"""What is wrong with a request, before anything is begun: each answer names the field and what is taken in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.rpc.params import check_voice
from omni.rpc.text import modality_name, shown
from omni.v1 import config_pb2, content_pb2, generate_pb2
from omnid.config.errors import nearest

_FORMATS: dict[int, tuple[config_pb2.MediaFormat.ValueType, ...]] = {
    content_pb2.MODALITY_IMAGE: (
        config_pb2.MEDIA_FORMAT_PNG,
        config_pb2.MEDIA_FORMAT_JPEG,
        config_pb2.MEDIA_FORMAT_WEBP,
    ),
    content_pb2.MODALITY_AUDIO: (
        config_pb2.MEDIA_FORMAT_PCM16,
        config_pb2.MEDIA_FORMAT_WAV,
        config_pb2.MEDIA_FORMAT_MP3,
        config_pb2.MEDIA_FORMAT_FLAC,
        config_pb2.MEDIA_FORMAT_OPUS,
    ),
    content_pb2.MODALITY_VIDEO: (config_pb2.MEDIA_FORMAT_MP4,),
}


def find_model(model: str, pipelines: Mapping[str, config_pb2.ResolvedPipeline]) -> config_pb2.ResolvedPipeline:
    """The pipeline that serves `model`.

    Raises:
        OmniError: UNKNOWN_MODEL, with those that there are.
    """
    pipeline = pipelines.get(model)
    if pipeline is None:
        raise _error(Reason.UNKNOWN_MODEL, "model", f"no model {shown(model)}; {nearest(model, pipelines)}")
    return pipeline


def check(
    request: generate_pb2.GenerateRequest, pipeline: config_pb2.ResolvedPipeline, voices: Mapping[str, Sequence[str]]
) -> frozenset[int]:
    """Checks a request, sound by the contract, against the model that it asks; gives the outputs to make.

    Args:
        request: what was asked.
        pipeline: serves the model.
        voices: speakers by stage, as far as stages have said them. A stage that speaks begins long after the answer:
            what is wrong with its voice is said before.

    Raises:
        OmniError: INVALID_ARGUMENT by one of its reasons, with the field.
    """
    offered = {modality for spec in pipeline.stages for modality in spec.outputs}
    for position, modality in enumerate(request.outputs):
        if modality not in offered:
            message = f"{pipeline.model} does not make {modality_name(modality)}; it makes: {_names(offered)}"
            raise _error(Reason.UNSUPPORTED_MODALITY, f"outputs[{position}]", message)
    stages = {spec.stage: spec for spec in pipeline.stages}
    for name in sorted(request.params):
        if name not in stages:
            message = f"{pipeline.model} has no stage {shown(name)}; {nearest(name, stages)}"
            raise _error(Reason.UNKNOWN_PARAMETER, f'params["{name}"]', message)
        _check_format(request.params[name], stages[name], f'params["{name}"].format')
        if name in voices:
            check_voice(request.params[name], voices[name], f'params["{name}"].voice')
    _check_prompt(request.prompt, pipeline)
    return frozenset(request.outputs or pipeline.default_outputs)


def limits_of(pipeline: config_pb2.ResolvedPipeline) -> config_pb2.MediaLimits:
    """The media limits of the stage that takes the prompt."""
    return next((spec.limits for spec in pipeline.stages if not spec.sources), config_pb2.MediaLimits())


def _check_format(params: config_pb2.StageParams, spec: config_pb2.StageSpec, field: str) -> None:
    """A format must be one of what the stage makes; which of those it can encode is its own to say."""
    fit = [name for modality in spec.outputs for name in _FORMATS.get(modality, ())]
    if params.HasField("format") and fit and params.format not in fit:
        names = ", ".join(config_pb2.MediaFormat.Name(each) for each in fit)
        got = config_pb2.MediaFormat.Name(params.format)
        raise _error(Reason.BAD_REQUEST, field, f"must be one of {names}, got {got}")


def _check_prompt(prompt: content_pb2.Prompt, pipeline: config_pb2.ResolvedPipeline) -> None:
    kind = prompt.WhichOneof("prompt")
    if kind == "text" and not prompt.text:
        raise _error(Reason.BAD_REQUEST, "prompt.text", "must not be empty")
    if kind != "conversation":
        return
    limits = limits_of(pipeline)
    parts = 0
    said = False
    for turn, message in enumerate(prompt.conversation.messages):
        for position, part in enumerate(message.content):
            if part.WhichOneof("part") == "text":
                said = said or bool(part.text)
                continue
            field = f"prompt.conversation.messages[{turn}].content[{position}].media"
            parts += 1
            said = True
            _check_media(part.media, field, parts, limits, pipeline)
    if not said:
        raise _error(Reason.BAD_REQUEST, "prompt.conversation.messages", "must hold some text or media; all are empty")


def _check_media(
    media: content_pb2.Media,
    field: str,
    parts: int,
    limits: config_pb2.MediaLimits,
    pipeline: config_pb2.ResolvedPipeline,
) -> None:
    if media.modality not in pipeline.inputs:
        taken = _names(pipeline.inputs)
        message = f"{pipeline.model} does not take {modality_name(media.modality)}; it takes: {taken}"
        raise _error(Reason.UNSUPPORTED_MODALITY, f"{field}.modality", message)
    if parts > limits.parts:
        message = f"a request may hold at most {limits.parts} media parts"
        raise _error(Reason.MEDIA_TOO_LARGE, field, message)
    if len(media.data) > limits.bytes:
        message = f"must be at most {limits.bytes} bytes, got {len(media.data)}"
        raise _error(Reason.MEDIA_TOO_LARGE, f"{field}.data", message)


def _names(modalities: Iterable[int]) -> str:
    return ", ".join(modality_name(modality) for modality in sorted(modalities)) or "none"


def _error(reason: Reason, field: str, message: str) -> OmniError:
    return invalid(FieldViolation(field, message), reason=reason)
