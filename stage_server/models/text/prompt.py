"""A prompt as a text model takes it: token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid
from omni.v1 import content_pb2
from stage_server.models.length import check_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = {
    content_pb2.CHAT_ROLE_SYSTEM: "system",
    content_pb2.CHAT_ROLE_USER: "user",
    content_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    content_pb2.CHAT_ROLE_TOOL: "tool",
}


def check(prompt: content_pb2.Prompt | None) -> None:
    """Refuses what a text model cannot read.

    Raises:
        OmniError: BAD_REQUEST without a prompt, UNSUPPORTED_MODALITY with media in it.
    """
    if prompt is None or prompt.WhichOneof("prompt") is None:
        raise refused("prompt", "must be set: this stage reads a prompt")
    for at, message in enumerate(prompt.conversation.messages):
        for place, part in enumerate(message.content):
            if part.WhichOneof("part") == "media":
                kind = content_pb2.Modality.Name(part.media.modality).removeprefix("MODALITY_").lower()
                field = f"prompt.conversation.messages[{at}].content[{place}].media"
                wrong = FieldViolation(field, f"this model takes text, not {kind}")
                raise invalid(wrong, reason=Reason.UNSUPPORTED_MODALITY)


def tokenize(
    prompt: content_pb2.Prompt, tokenizer: PreTrainedTokenizerBase, vocabulary: int, longest: int
) -> list[int]:
    """Token ids of a prompt that `check` let through; a conversation goes through the chat template.

    Raises:
        OmniError: BAD_REQUEST when the template refuses the conversation, or an id is not in the vocabulary;
            PROMPT_TOO_LONG for what is longer than `longest` tokens at a glance.
    """
    kind = prompt.WhichOneof("prompt")
    if kind == "token_ids":
        return known_ids(prompt.token_ids.ids, vocabulary)
    if kind == "text":
        check_length("prompt.text", prompt.text, tokenizer, longest)
        ids = tokenizer(prompt.text).input_ids
    else:
        messages = [
            {"role": ROLES[message.role], "content": "".join(part.text for part in message.content)}
            for message in prompt.conversation.messages
        ]
        text = apply_template(tokenizer, messages)
        check_length("prompt", text, tokenizer, longest)
        ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise refused("prompt", "must not be empty")
    return list(ids)


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, object]]) -> str:
    """The conversation as the model's own chat template writes it, up to where the answer begins.

    Raises:
        OmniError: BAD_REQUEST when the model has no template, or it refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise refused("prompt.conversation", "this model has no chat template; send the prompt as text")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        raise refused("prompt.conversation", f"the model's chat template refuses it: {error}") from error


def known_ids(ids: object, vocabulary: int) -> list[int]:
    """Token ids given by the client.

    Raises:
        OmniError: BAD_REQUEST for one that the model does not have.
    """
    listed = list(ids)  # type: ignore[call-overload]  # a repeated field
    for place, token in enumerate(listed):
        if token >= vocabulary:
            raise refused(f"prompt.token_ids.ids[{place}]", f"must be below {vocabulary}, was {token}")
    return listed


def refused(field: str, description: str) -> OmniError:
    """An error about one field of the request."""
    return invalid(FieldViolation(field, description))
