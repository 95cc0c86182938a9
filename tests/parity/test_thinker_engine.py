"""The thinker under the engine, next to transformers' own generate on the same checkpoint."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni.rpc.errors import OmniError, Reason
from omni.v1 import content_pb2
from stage_server.models.qwen3_omni import thinker
from stage_server.models.qwen3_omni.processor import PromptReader
from tests.parity.driver import Driver, Seen, run_of
from tests.parity.speech import LIMITS, TINY_OMNI, reference_model, stage

TENSORS = ("prompt_ids", "embeds", "hidden", "image_grid_thw", "audio_feature_lengths")


def image(width: int, height: int, seed: int = 0) -> content_pb2.ContentPart:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    media = content_pb2.Media(modality=content_pb2.MODALITY_IMAGE, mime_type="image/png", data=file.getvalue())
    return content_pb2.ContentPart(media=media)


def sound(seconds: float, rate: int = 16000, seed: int = 0) -> content_pb2.ContentPart:
    samples = np.random.default_rng(seed).normal(0, 0.1, int(seconds * rate)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    media = content_pb2.Media(modality=content_pb2.MODALITY_AUDIO, mime_type="audio/wav", data=file.getvalue())
    return content_pb2.ContentPart(media=media)


def text(words: str) -> content_pb2.ContentPart:
    return content_pb2.ContentPart(text=words)


def prompt(*parts: content_pb2.ContentPart) -> content_pb2.Prompt:
    message = content_pb2.ChatMessage(role=content_pb2.CHAT_ROLE_USER, content=parts)
    return content_pb2.Prompt(conversation=content_pb2.Conversation(messages=[message]))


PROMPTS = {
    "text": prompt(text("How are you today?")),
    "image": prompt(image(64, 96), text("What is this?")),
    "audio": prompt(sound(1.3), text("Say it again.")),
    "image, audio and image": prompt(text("One"), image(96, 64, 1), sound(0.7), text("two"), image(128, 128, 2)),
    "long text": prompt(text("The quick brown fox jumps over the lazy dog. " * 8)),
    "two recordings": prompt(sound(2.2, 8000, 3), text("and"), sound(0.4, 22050, 4)),
    "large image": prompt(image(224, 160, 5), text("Tell me what is in this picture.")),
    "short": prompt(text("a")),
}


@pytest.fixture(scope="module")
def reference() -> Qwen3OmniMoeForConditionalGeneration:
    return reference_model()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver(thinker.build(stage("thinker", step_tokens=24)))
    yield driver
    driver.close()


def generate(reference: Qwen3OmniMoeForConditionalGeneration, wanted: content_pb2.Prompt, tokens: int) -> Any:
    inputs = PromptReader(TINY_OMNI, LIMITS, 2048, 2048).read(wanted)
    ids = torch.tensor([inputs.ids])
    given = {
        "pixel_values": inputs.pixels,
        "image_grid_thw": inputs.grids,
        "input_features": inputs.mel,
        "feature_attention_mask": inputs.mel_mask,
    }
    return reference.thinker.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        output_hidden_states=True,
        return_dict_in_generate=True,
        **{name: value for name, value in given.items() if value is not None},
    )


def compare(seen: Seen, expected: Any, layer: int) -> None:
    sequence = expected.sequences[0].tolist()
    length = len(seen.tensor("prompt_ids"))
    assert seen.tensor("prompt_ids").tolist() == sequence[:length]
    assert seen.tokens == sequence[length:]
    for name, index in (("embeds", 0), ("hidden", layer)):
        rows = torch.cat([step[index] for step in expected.hidden_states], dim=1)[0]
        torch.testing.assert_close(seen.tensor(name), rows, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", PROMPTS)
def test_tokens_and_hidden_states_of_one_run_equal_generate(
    driver: Driver, reference: Qwen3OmniMoeForConditionalGeneration, kind: str
) -> None:
    run = run_of(PROMPTS[kind], tensors=TENSORS, temperature=0, max_tokens=20, ignore_eos=True)
    seen = driver.result(driver.submit(run))
    compare(seen, generate(reference, PROMPTS[kind], 20), reference.config.talker_config.accept_hidden_layer)


def test_eight_runs_of_all_kinds_at_once_equal_generate(
    driver: Driver, reference: Qwen3OmniMoeForConditionalGeneration
) -> None:
    lengths = {kind: 8 + 5 * place for place, kind in enumerate(PROMPTS)}
    runs = [
        driver.submit(run_of(PROMPTS[kind], tensors=TENSORS, temperature=0, max_tokens=length, ignore_eos=True))
        for kind, length in lengths.items()
    ]
    layer = reference.config.talker_config.accept_hidden_layer
    for (kind, length), seen in zip(lengths.items(), driver.results(runs), strict=True):
        compare(seen, generate(reference, PROMPTS[kind], length), layer)


def test_the_prompts_rows_come_first_and_each_token_brings_one(driver: Driver) -> None:
    run = run_of(PROMPTS["short"], tensors=TENSORS, temperature=0, max_tokens=5, ignore_eos=True)
    seen = driver.result(driver.submit(run))
    rows = [len(output.tensors["hidden"]) for output in seen.outputs]
    assert rows[0] == seen.finished.usage.prompt_tokens
    assert rows[1:] == [1, 1, 1, 1]
    assert "prompt_ids" in seen.outputs[0].tensors
    assert not any("prompt_ids" in output.tensors for output in seen.outputs[1:])


def test_tensors_that_nobody_reads_are_not_made(driver: Driver) -> None:
    seen = driver.result(driver.submit(run_of(PROMPTS["image"], temperature=0, max_tokens=3)))
    assert not any(output.tensors for output in seen.outputs)


def test_where_media_lie_is_told_to_the_talker(driver: Driver) -> None:
    kind = "image, audio and image"
    seen = driver.result(driver.submit(run_of(PROMPTS[kind], tensors=TENSORS, temperature=0, max_tokens=2)))
    inputs = PromptReader(TINY_OMNI, LIMITS, 2048, 2048).read(PROMPTS[kind])
    assert inputs.grids is not None
    assert inputs.mel_mask is not None
    assert seen.tensor("image_grid_thw").tolist() == inputs.grids.tolist()
    assert seen.tensor("audio_feature_lengths").tolist() == inputs.mel_mask.sum(-1).tolist()


def refusal(driver: Driver, wanted: content_pb2.Prompt) -> OmniError:
    try:
        run = driver.submit(run_of(wanted, max_tokens=2))
    except OmniError as error:
        return error
    return driver.result(run).failed.error


def media(modality: int, data: bytes) -> content_pb2.ContentPart:
    return content_pb2.ContentPart(media=content_pb2.Media(modality=modality, data=data))


BAD = {
    "no picture": (media(content_pb2.MODALITY_IMAGE, b"not a picture"), Reason.MEDIA_INVALID),
    "a broken picture": (
        media(content_pb2.MODALITY_IMAGE, image(64, 64).media.data[:900]),
        Reason.MEDIA_INVALID,
    ),
    "too many pixels": (image(300, 300), Reason.MEDIA_TOO_LARGE),
    "a thin picture": (image(1, 600), Reason.MEDIA_INVALID),
    "no sound": (media(content_pb2.MODALITY_AUDIO, b"not a sound"), Reason.MEDIA_INVALID),
    "too long": (sound(5.5, 8000), Reason.MEDIA_TOO_LARGE),
    "too short": (sound(0.01), Reason.MEDIA_INVALID),
    "too many bytes": (sound(4.9, 96000), Reason.MEDIA_TOO_LARGE),
    "a film": (media(content_pb2.MODALITY_VIDEO, b"x"), Reason.UNSUPPORTED_MODALITY),
    "a placeholder without media": (text("<|image_pad|>"), Reason.BAD_REQUEST),
}


def test_a_text_of_megabytes_is_refused_before_it_is_tokenized(driver: Driver) -> None:
    error = refusal(driver, prompt(text("word " * 200_000)))
    assert error.reason is Reason.PROMPT_TOO_LONG
    assert "characters" in error.message


@pytest.mark.parametrize("kind", BAD)
def test_bad_media_fail_their_own_run_with_the_part_named(
    driver: Driver, reference: Qwen3OmniMoeForConditionalGeneration, kind: str
) -> None:
    part, reason = BAD[kind]
    good = driver.submit(run_of(PROMPTS["text"], tensors=TENSORS, temperature=0, max_tokens=12, ignore_eos=True))
    error = refusal(driver, prompt(text("Look:"), part))
    assert error.reason == reason
    if reason != Reason.BAD_REQUEST and kind != "a thin picture":
        assert error.fields[0].field == "prompt.conversation.messages[0].content[1].media"
    compare(
        driver.result(good),
        generate(reference, PROMPTS["text"], 12),
        reference.config.talker_config.accept_hidden_layer,
    )


def test_more_parts_than_the_limit_are_refused(driver: Driver) -> None:
    error = refusal(driver, prompt(*[sound(0.1)] * 5))
    assert error.reason == Reason.MEDIA_TOO_LARGE


def test_compressed_sound_is_taken(driver: Driver) -> None:
    samples, rate = soundfile.read(io.BytesIO(sound(1.0).media.data))
    for form in ("MP3", "FLAC", "OGG"):
        file = io.BytesIO()
        soundfile.write(file, samples, rate, format=form)
        wanted = prompt(media(content_pb2.MODALITY_AUDIO, file.getvalue()))
        assert driver.result(driver.submit(run_of(wanted, max_tokens=1))).tokens
