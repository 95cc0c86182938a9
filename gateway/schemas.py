"""Request bodies of the REST surface, in OpenAI's field names, with what omnid adds to them.

All fields that OpenAI knows are known here. One that cannot be honoured and would change the answer is refused unless
it holds its neutral value; one that would not (``user``, ``store: false`` ...) is taken and has no effect.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

UINT64_MAX = 2**64 - 1
MAX_TEXT = 4 * 1024 * 1024
MAX_FIELDS = 100
"""Of one object."""


def _few(value: Any) -> Any:
    """`value`, when it is no object of too many fields. Each mistake in a body costs a kilobyte and its time: such an
    object, or a list that is not left at its first wrong entry, would hold up everybody else."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"must have at most {MAX_FIELDS} fields, got {len(value)}")
    return value


class Strict(BaseModel):
    """Refuses unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _of_few_fields(cls, value: Any) -> Any:
        return _few(value)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str = Field(min_length=1)
    """A data URL; an http or https one when the gateway was started with --allow-media-urls."""
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(Strict):
    data: str = Field(min_length=1)
    """Base64 of the file."""
    format: Literal["wav", "mp3", "flac", "opus", "ogg", "m4a", "webm"]


class AudioPart(Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio


# Tags begin with "@", so that paths in error messages can leave them out.
def _part_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"@{kind}" if kind in ("text", "image_url", "input_audio") else None


ContentPart = Annotated[
    Annotated[TextPart, Tag("@text")]
    | Annotated[ImagePart, Tag("@image_url")]
    | Annotated[AudioPart, Tag("@input_audio")],
    Discriminator(
        _part_tag,
        custom_error_type="content_part",
        custom_error_message="must be an object of type 'text', 'image_url' or 'input_audio'",
    ),
]


def _content_tag(value: Any) -> str | None:
    return "@text" if isinstance(value, str) else "@parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("@text")]
    | Annotated[list[ContentPart], Field(min_length=1, max_length=256, fail_fast=True), Tag("@parts")],
    Discriminator(
        _content_tag,
        custom_error_type="content",
        custom_error_message="must be a string or a list of content parts",
    ),
]


def _only(value: Any, *neutral: Any) -> Any:
    """`value`, when it is null or one of the values under which the field has no effect."""
    if value is None or any(value == allowed and type(value) is type(allowed) for allowed in neutral):
        return value
    shown = " or ".join(repr(allowed) for allowed in neutral)
    raise ValueError("is not supported" + (f"; the only value allowed is {shown}" if shown else ""))


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Any = None
    tool_call_id: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
    images: Any = None
    refusal: Any = None
    annotations: Any = None

    @field_validator("name", "function_call", "refusal")
    @classmethod
    def _never(cls, value: Any) -> Any:
        return _only(value)

    @field_validator("tool_calls", "annotations", "images")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        return _only(value, [])

    @field_validator("audio")
    @classmethod
    def _audio(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("is not supported: earlier speech is not kept; send its transcript as content")
        return value

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None:
            raise ValueError("content is missing")
        return self


class AudioParam(Strict):
    voice: str | None = Field(None, min_length=1, max_length=128)
    format: Literal["wav", "mp3", "flac", "opus", "pcm16"] | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StageOverride(Strict):
    """Parameters of one stage: ``sampling_params: {"talker": {"temperature": 0.8}}``."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=0, le=UINT64_MAX)
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(None, max_length=16)
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] | None = Field(None, max_length=256)
    max_tokens: int | None = Field(None, ge=1, le=1_048_576)
    min_tokens: int | None = Field(None, ge=0, le=1_048_576)
    ignore_eos: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    width: int | None = Field(None, ge=1, lt=2**32)
    height: int | None = Field(None, ge=1, lt=2**32)
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    negative_prompt: str | None = Field(None, max_length=65536)
    n: int | None = Field(None, ge=1, le=16)
    frames: int | None = Field(None, ge=1, le=100_000)
    format: Literal["pcm16", "wav", "mp3", "flac", "opus", "png", "jpeg", "webp", "mp4"] | None = None
    voice: str | None = Field(None, min_length=1, max_length=128)
    extra: dict[str, Any] | None = None
    """What only this model family knows."""


Overrides = Annotated[dict[str, StageOverride], BeforeValidator(_few)]


class ChatRequest(Strict):
    model: str = Field(min_length=1, max_length=128)
    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    modalities: list[Literal["text", "audio", "image"]] | None = Field(None, min_length=1, max_length=3)
    audio: AudioParam | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=1_048_576)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_048_576)
    stop: Annotated[str, Field(min_length=1, max_length=1024)] | list[str] | None = None
    seed: int | None = Field(None, ge=0, le=UINT64_MAX)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # What other servers of this kind take beside OpenAI's fields.
    top_k: int | None = Field(None, ge=0, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=1_048_576)
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] | None = Field(None, max_length=256)
    sampling_params: Overrides | None = None
    """By name of the stage; beats the fields above."""
    # Known, and allowed at their neutral values only.
    n: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    logit_bias: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    store: Any = None
    # Known, and without effect on the answer.
    user: str | None = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None

    @field_validator("n", "tools", "tool_choice", "functions", "function_call", "response_format", "logit_bias")
    @classmethod
    def _neutral(cls, value: Any, info: Any) -> Any:
        neutral: dict[str, tuple[Any, ...]] = {
            "n": (1,),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "response_format": ({"type": "text"},),
            "logit_bias": ({},),
        }
        return _only(value, *neutral[info.field_name])

    @field_validator("reasoning_effort", "verbosity", "web_search_options", "moderation", "store")
    @classmethod
    def _neutral_too(cls, value: Any, info: Any) -> Any:
        neutral: dict[str, tuple[Any, ...]] = {
            "reasoning_effort": ("none",),
            "verbosity": ("medium",),
            "store": (False,),
        }
        return _only(value, *neutral.get(info.field_name, ()))

    @field_validator("modalities")
    @classmethod
    def _distinct(cls, value: list[str] | None) -> list[str] | None:
        if value and len(set(value)) != len(value):
            raise ValueError("holds a modality twice")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        if value is None:
            return None
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > 16:
            raise ValueError("must be a string or a list of at most 16 strings")
        if not all(isinstance(stop, str) and 1 <= len(stop) <= 1024 for stop in stops):
            raise ValueError("each stop must be a string of 1 to 1024 characters")
        return stops

    @field_validator("stream_options")
    @classmethod
    def _streams(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("is allowed only when stream is true")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_bound(cls, value: int | None, info: Any) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other is not None and other != value:
            raise ValueError(f"differs from max_tokens ({other}); give one of them")
        return value


class ImageRequest(Strict):
    prompt: str = Field(min_length=1, max_length=MAX_TEXT)
    model: str | None = Field(None, min_length=1, max_length=128)
    n: int | None = Field(None, ge=1, le=10)
    size: str | None = None
    """"auto" or WIDTHxHEIGHT in pixels."""
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    # Beside OpenAI's fields.
    seed: int | None = Field(None, ge=0, le=UINT64_MAX)
    """Of the first picture; each further one adds 1."""
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    negative_prompt: str | None = Field(None, max_length=65536)
    sampling_params: Overrides | None = None
    # Known, and allowed at their neutral values only.
    background: Any = None
    output_compression: Any = None
    partial_images: Any = None
    quality: Any = None
    style: Any = None
    stream: Any = None
    # Known, and without effect on the answer.
    moderation: Any = None
    user: str | None = None
    safety_identifier: Any = None

    @field_validator("size")
    @classmethod
    def _two_sides(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", value):
            raise ValueError('must be "auto" or WIDTHxHEIGHT in pixels, such as "512x512"')
        return value

    @field_validator("background", "output_compression", "partial_images", "quality", "style", "stream")
    @classmethod
    def _neutral(cls, value: Any, info: Any) -> Any:
        neutral: dict[str, tuple[Any, ...]] = {
            "background": ("auto",),
            "output_compression": (100,),
            "partial_images": (0,),
            "quality": ("auto",),
            "stream": (False,),
        }
        return _only(value, *neutral.get(info.field_name, ()))


_OF_PARENT: dict[str, tuple[type[BaseModel], ...]] = {
    "messages": (Message,),
    "content": (TextPart, ImagePart, AudioPart),
    "image_url": (ImageUrl,),
    "input_audio": (InputAudio,),
    "audio": (AudioParam,),
    "stream_options": (StreamOptions,),
}


def fields_at(body: type[BaseModel], location: tuple[int | str, ...]) -> Iterable[str]:
    """Names of the fields that the object at `location` in a `body` may have."""
    names = [part for part in location if isinstance(part, str) and not part.startswith("@")]
    if not names:
        models: tuple[type[BaseModel], ...] = (body,)
    elif names[0] == "sampling_params":
        models = (StageOverride,)
    else:
        models = _OF_PARENT.get(names[-1], ())
    return [name for model in models for name in model.model_fields]
