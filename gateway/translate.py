"""Request bodies -> `omni.v1.GenerateRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.answers import Wanted
from gateway.errors import bad_request, nearest
from gateway.media.fetch import Fetcher
from gateway.media.parts import MediaReader
from gateway.schemas import ChatRequest, ImagePart, ImageRequest, Message, StageOverride, TextPart
from omni.rpc.errors import Reason
from omni.rpc.text import MODALITIES, clip, modality_name, shown
from omni.v1 import config_pb2, content_pb2, generate_pb2

FORMATS = {
    name.removeprefix("MEDIA_FORMAT_").lower(): number
    for name, number in config_pb2.MediaFormat.items()
    if number != config_pb2.MEDIA_FORMAT_UNSPECIFIED
}
_ROLES = {
    "system": content_pb2.CHAT_ROLE_SYSTEM,
    "developer": content_pb2.CHAT_ROLE_SYSTEM,
    "user": content_pb2.CHAT_ROLE_USER,
    "assistant": content_pb2.CHAT_ROLE_ASSISTANT,
    "tool": content_pb2.CHAT_ROLE_TOOL,
}
_SAMPLING = frozenset(config_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_SAME_IN_CHAT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)
# Of `extra`: levels of lists and objects, and the largest integer that a double holds exactly.
_MAX_DEPTH = 16
_MAX_EXACT = 2**53
_DIFFUSION = {
    "width": "width",
    "height": "height",
    "num_inference_steps": "steps",
    "guidance_scale": "guidance_scale",
    "negative_prompt": "negative_prompt",
    "n": "outputs",
    "frames": "frames",
}


async def chat(
    body: ChatRequest, model: generate_pb2.Model, fetcher: Fetcher | None
) -> tuple[generate_pb2.GenerateRequest, Wanted]:
    """The request that a chat completion asks for, and what its answer is to hold.

    Args:
        body: as it came.
        model: the one that it names.
        fetcher: reads media behind URLs; None: they are refused.

    Raises:
        OmniError: with the field of the body that is wrong.
    """
    wanted = [MODALITIES[name] for name in body.modalities or ()]
    request = generate_pb2.GenerateRequest(model=body.model, outputs=wanted)
    made = wanted or list(model.default_outputs)
    for index, modality in enumerate(wanted):
        if modality not in {output.modality for output in model.outputs}:
            able = ", ".join(sorted({modality_name(output.modality) for output in model.outputs}))
            raise bad_request(
                f"modalities[{index}]",
                f"model {body.model} does not make {modality_name(modality)}; it makes {able}",
                Reason.UNSUPPORTED_MODALITY,
            )
    for output in model.outputs:
        if output.modality not in made:
            continue
        params = request.params[output.stage]
        if output.kind == config_pb2.STAGE_KIND_DIFFUSION:
            if body.seed is not None:
                params.diffusion.seed = body.seed
        elif output.modality == content_pb2.MODALITY_TEXT:
            _sampling(params.sampling, body)
        elif output.modality == content_pb2.MODALITY_AUDIO and body.audio is not None and body.audio.format:
            params.format = FORMATS[body.audio.format]
    if content_pb2.MODALITY_AUDIO in made:
        _speech(request, body, model)
    elif body.audio is not None:
        raise bad_request("audio", "is given, but modalities does not hold 'audio'")
    _overrides(request, body.sampling_params, model)
    reader = MediaReader(model, fetcher)
    reader.check(body.messages)
    for at, message in enumerate(body.messages):
        await _message(request.prompt.conversation.messages.add(), message, f"messages[{at}]", reader)
    text = (output.stage for output in model.outputs if output.modality == content_pb2.MODALITY_TEXT)
    text_stage = next(text, "") if content_pb2.MODALITY_TEXT in made else ""
    return request, Wanted(model.model, frozenset(made), text_stage)


def image(body: ImageRequest, model: generate_pb2.Model) -> tuple[generate_pb2.GenerateRequest, int]:
    """The request that an image generation asks for, and how many pictures it is to make.

    Raises:
        OmniError: with the field of the body that is wrong.
    """
    output = next((each for each in model.outputs if each.modality == content_pb2.MODALITY_IMAGE), None)
    if output is None:
        raise bad_request("model", f"model {model.model} does not make pictures", Reason.UNSUPPORTED_MODALITY)
    request = generate_pb2.GenerateRequest(
        model=model.model, prompt=content_pb2.Prompt(text=body.prompt), outputs=[content_pb2.MODALITY_IMAGE]
    )
    params = request.params[output.stage]
    if body.size and body.size != "auto":
        params.diffusion.width, params.diffusion.height = (int(side) for side in body.size.split("x"))
    for name, value in (
        ("outputs", body.n),
        ("seed", body.seed),
        ("steps", body.num_inference_steps),
        ("guidance_scale", body.guidance_scale),
        ("negative_prompt", body.negative_prompt),
    ):
        if value is not None:
            setattr(params.diffusion, name, value)
    if body.output_format:
        params.format = FORMATS[body.output_format]
    _overrides(request, body.sampling_params, model)
    own, default = params.diffusion, output.defaults.diffusion
    return request, own.outputs if own.HasField("outputs") else default.outputs or 1


def _sampling(params: config_pb2.SamplingParams, body: ChatRequest) -> None:
    for name in _SAME_IN_CHAT:
        _set(params, name, getattr(body, name))
    _set(params, "max_tokens", body.max_completion_tokens or body.max_tokens)
    if body.logprobs:
        params.logprobs = body.top_logprobs or 0


def _speech(request: generate_pb2.GenerateRequest, body: ChatRequest, model: generate_pb2.Model) -> None:
    """Voice and seed concern every stage on the way to the sound: each takes what it knows."""
    if body.audio is None and body.seed is None:
        return
    text_stages = {output.stage for output in model.outputs if output.modality == content_pb2.MODALITY_TEXT}
    for stage in model.stages:
        if stage in text_stages:
            continue
        if body.seed is not None:
            request.params[stage].sampling.seed = body.seed
        if body.audio is not None and body.audio.voice:
            request.params[stage].voice = body.audio.voice


def _overrides(
    request: generate_pb2.GenerateRequest, overrides: Mapping[str, StageOverride] | None, model: generate_pb2.Model
) -> None:
    kinds = {output.stage: output.kind for output in model.outputs}
    for stage, override in (overrides or {}).items():
        if stage not in model.stages:
            text = f"model {model.model} has no stage {shown(stage)}{nearest(stage, model.stages)}"
            raise bad_request(f"sampling_params.{clip(stage, 64)}", f"{text}; it has {', '.join(model.stages)}")
        params = request.params[stage]
        diffusion = kinds.get(stage) == config_pb2.STAGE_KIND_DIFFUSION
        for name, value in override.model_dump(exclude_none=True).items():
            if name == "extra":
                _extra(params, value, f"sampling_params.{stage}.extra")
            elif name == "format":
                params.format = FORMATS[value]
            elif name == "voice":
                params.voice = value
            elif name in _DIFFUSION:
                setattr(params.diffusion, _DIFFUSION[name], value)
            elif name == "seed" and diffusion:
                params.diffusion.seed = value
            else:
                _set(params.sampling, name, value)


def _extra(params: config_pb2.StageParams, values: dict[str, Any], param: str) -> None:
    _check_plain(values, param, _MAX_DEPTH)
    params.extra.update(values)


def _check_plain(value: Any, param: str, depth: int) -> None:
    """Checks that a value travels as it is: numbers become doubles, and protobuf bounds how deep messages nest.

    Raises:
        OmniError: BAD_REQUEST.
    """
    if depth == 0:
        raise bad_request(param, f"nests deeper than {_MAX_DEPTH} levels")
    if isinstance(value, int) and abs(value) > _MAX_EXACT:
        raise bad_request(param, f"must be at most {_MAX_EXACT} in magnitude")
    if isinstance(value, dict):
        for key, each in value.items():
            _check_plain(each, f"{param}.{key[:64]}", depth - 1)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_plain(each, f"{param}[{index}]", depth - 1)


def _set(params: config_pb2.SamplingParams, name: str, value: Any) -> None:
    if value is None or name not in _SAMPLING:
        return
    if isinstance(value, list):
        del getattr(params, name)[:]
        getattr(params, name).extend(value)
    else:
        setattr(params, name, value)


async def _message(into: content_pb2.ChatMessage, message: Message, param: str, reader: MediaReader) -> None:
    into.role = _ROLES[message.role]
    if isinstance(message.content, str):
        into.content.add(text=message.content)
        return
    for index, part in enumerate(message.content or ()):
        at = f"{param}.content[{index}]"
        if isinstance(part, TextPart):
            into.content.add(text=part.text)
        elif isinstance(part, ImagePart):
            into.content.add(media=await reader.image(part, at))
        else:
            into.content.add(media=await reader.audio(part, at))
