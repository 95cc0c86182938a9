"""From a prompt to the thinker's inputs, by the checkpoint's own processor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3OmniMoeProcessor, WhisperFeatureExtractor

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2, content_pb2
from stage_server.models.length import check_length
from stage_server.models.qwen3_omni import media
from stage_server.models.text.prompt import ROLES, apply_template, known_ids, refused

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Inputs:
    """A prompt as the thinker takes it."""

    ids: list[int]
    pixels: torch.Tensor | None = None
    """Patches of all pictures, [patches, values]."""
    grids: torch.Tensor | None = None
    """Patches of each picture: time, height, width, [pictures, 3]."""
    mel: torch.Tensor | None = None
    """[recordings, bins, frames]."""
    mel_mask: torch.Tensor | None = None
    """[recordings, frames]."""


class _Processor(Qwen3OmniMoeProcessor):
    """The standard processor without its video part, which needs torchvision; no film is ever given to it."""

    def __init__(self, images: Any, features: Any, tokenizer: Any) -> None:
        self.image_processor = self.video_processor = images
        self.feature_extractor = features
        self.tokenizer = tokenizer
        for name in ("image", "audio", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos"):
            setattr(self, f"{name}_token", getattr(tokenizer, f"{name}_token"))


class PromptReader:
    """Tokenizes prompts and brings their media into the model's form."""

    def __init__(self, folder: Path, limits: config_pb2.MediaLimits, vocabulary: int, longest: int) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.chat_template and (legacy := folder / "chat_template.json").is_file():
            self.tokenizer.chat_template = json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
        features = WhisperFeatureExtractor.from_pretrained(folder)
        self._rate = features.sampling_rate
        self._processor = _Processor(Qwen2VLImageProcessorPil.from_pretrained(folder), features, self.tokenizer)
        self._limits = limits
        self._vocabulary = vocabulary
        self._longest = longest

    def check(self, prompt: content_pb2.Prompt | None) -> None:
        """Refuses what can be seen at a glance.

        Raises:
            OmniError: BAD_REQUEST, UNSUPPORTED_MODALITY, MEDIA_TOO_LARGE.
        """
        if prompt is None or prompt.WhichOneof("prompt") is None:
            raise refused("prompt", "must be set: this stage reads a prompt")
        media.check(prompt, self._limits)

    def read(self, prompt: content_pb2.Prompt) -> Inputs:
        """Decodes and tokenizes a prompt that `check` let through.

        Raises:
            OmniError: MEDIA_INVALID, MEDIA_TOO_LARGE, PROMPT_TOO_LONG, BAD_REQUEST with the field.
        """
        if prompt.WhichOneof("prompt") == "token_ids":
            return Inputs(known_ids(prompt.token_ids.ids, self._vocabulary))
        images, recordings = [], []
        for field, part in media.parts(prompt):
            if part.modality == content_pb2.MODALITY_IMAGE:
                images.append(media.picture(field, part, self._limits))
            else:
                recordings.append(media.recording(field, part, self._limits, self._rate))
        text = prompt.text if prompt.WhichOneof("prompt") == "text" else self._template(prompt.conversation)
        check_length("prompt", text, self.tokenizer, self._longest)
        self._check_places(text, len(images), len(recordings))
        if not images and not recordings:
            ids = self.tokenizer(text).input_ids
            if not ids:
                raise refused("prompt", "must not be empty")
            return Inputs(list(ids))
        try:
            found = self._processor(text=text, images=images or None, audio=recordings or None, return_tensors="pt")
        except ValueError as error:
            raise OmniError(Reason.MEDIA_INVALID, f"the model's processor refuses the media: {error}") from error
        return Inputs(
            found["input_ids"][0].tolist(),
            pixels=found.get("pixel_values"),
            grids=found.get("image_grid_thw"),
            mel=found.get("input_features"),
            mel_mask=found.get("feature_attention_mask"),
        )

    def _template(self, conversation: content_pb2.Conversation) -> str:
        def content(part: content_pb2.ContentPart) -> dict[str, str]:
            if part.WhichOneof("part") == "text":
                return {"type": "text", "text": part.text}
            return {"type": media.TAKEN[part.media.modality]}

        return apply_template(
            self.tokenizer,
            [
                {"role": ROLES[message.role], "content": [content(part) for part in message.content]}
                for message in conversation.messages
            ],
        )

    def _check_places(self, text: str, images: int, recordings: int) -> None:
        """Each placeholder must have its media: text of the client may hold the token itself."""
        for token, there in (
            (self._processor.image_token, images),
            (self._processor.audio_token, recordings),
            (self._processor.video_token, 0),
        ):
            if (count := text.count(token)) != there:
                raise refused("prompt", f"holds {token} {count} times, for {there} media parts of that kind")
