"""Fields of the contract have the names of the sender's own body."""

import pytest

from gateway.naming import public_error, public_field
from gateway.schemas import ChatRequest, ImageRequest
from omni.rpc.errors import FieldViolation, OmniError, Reason, invalid

CHAT = ChatRequest.model_validate(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "sampling_params": {"thinker": {"format": "wav", "min_p": 0.5}},
    }
)
IMAGE = ImageRequest(prompt="a star")


@pytest.mark.parametrize(
    ("field", "public"),
    [
        ("prompt", "messages"),
        ("prompt.text", "messages"),
        ("prompt.conversation", "messages"),
        ("prompt.conversation.messages", "messages"),
        ("prompt.conversation.messages[2].content[0].text", "messages[2].content[0].text"),
        ("prompt.conversation.messages[2].content[1].media.data", "messages[2].content[1]"),
        ("outputs[1]", "modalities[1]"),
        ('params["thinker"].sampling.top_p', "top_p"),
        ('params["thinker"].sampling.stop[3]', "stop[3]"),
        ('params["thinker"].sampling.logprobs', "top_logprobs"),
        ('params["talker"].voice', "audio.voice"),
        ('params["talker"].extra.speed', "sampling_params.talker.extra.speed"),
        ('params["dit"].diffusion.steps', "sampling_params.dit.num_inference_steps"),
        ('params["dit"].diffusion', "sampling_params.dit"),
        ('params["dit"]', "sampling_params.dit"),
        ('params["talker"].format', "audio.format"),
        ('params["thinker"].format', "sampling_params.thinker.format"),
        ('params["thinker"].sampling.min_p', "sampling_params.thinker.min_p"),
        ("model", "model"),
        ("messages[0].content", "messages[0].content"),
    ],
)
def test_a_chat_s_sender_knows_it_as(field: str, public: str) -> None:
    assert public_field(field, CHAT) == public


@pytest.mark.parametrize(
    ("field", "public"),
    [
        ("prompt.text", "prompt"),
        ('params["dit"].diffusion.width', "size"),
        ('params["dit"].diffusion.outputs', "n"),
        ('params["dit"].diffusion.steps', "num_inference_steps"),
        ('params["dit"].format', "output_format"),
        ('params["dit"].sampling.top_p', "sampling_params.dit.top_p"),
    ],
)
def test_an_image_s_sender_knows_it_as(field: str, public: str) -> None:
    assert public_field(field, IMAGE) == public


def test_the_message_says_the_same_names_once() -> None:
    sides = (FieldViolation(f'params["dit"].diffusion.{side}', "must be 16, got 1") for side in ("width", "height"))
    error = public_error(invalid(*sides), IMAGE)
    assert (error.message, [each.field for each in error.fields]) == ("size: must be 16, got 1", ["size", "size"])


def test_words_of_a_message_that_only_look_like_fields_stay() -> None:
    wrong = FieldViolation("prompt", "must be set: this stage reads a prompt")
    told = OmniError(Reason.BAD_REQUEST, f"stage thinker: {wrong}", fields=[wrong], stage="thinker", retry_after=2)
    error = public_error(told, CHAT)
    assert error.message == "stage thinker: messages: must be set: this stage reads a prompt"
    assert (error.stage, error.retry_after) == ("thinker", 2)


def test_formats_have_the_names_that_a_body_has() -> None:
    wrong = FieldViolation('params["dit"].format', "must be one of MEDIA_FORMAT_PNG, got MEDIA_FORMAT_MP4")
    assert public_error(invalid(wrong), IMAGE).message == "output_format: must be one of png, got mp4"
