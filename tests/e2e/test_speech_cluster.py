"""The speaking model through the whole cluster: the same words, codes and samples as transformers, and in time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

from omni.v1 import content_pb2
from omnid.client import AsyncOmni, Generation
from stage_server.checkpoint import ASSETS

QUESTIONS = {
    "How are you today?": (12, 40),
    "The quick brown fox jumps over the lazy dog. " * 3: (30, 60),
    "a": (2, 20),
    "Hello": (3, 12),
    "Tell me a story.": (40, 10),
    "Say it again, please, and slowly.": (20, 33),
    "Count to ten.": (7, 25),
    "What is two plus three?": (16, 50),
}
"""Words and frames at most."""


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[list[int], np.ndarray]]:
    """Token ids and samples by transformers' own generate."""
    torch.set_num_threads(1)
    folder = ASSETS / "tiny_omni"
    whole = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    speaker = next(iter(whole.config.talker_config.speaker_id))
    made = {}
    for question, (words, frames) in QUESTIONS.items():
        turn = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = ids["input_ids"]
        sequence, wave = whole.generate(
            ids,
            speaker=speaker,
            attention_mask=torch.ones_like(ids),
            thinker_max_new_tokens=words,
            thinker_do_sample=False,
            thinker_eos_token_id=tokenizer.eos_token_id,
            talker_max_new_tokens=frames,
            talker_do_sample=False,
            talker_repetition_penalty=1.0,
        )
        made[question] = (sequence[0, ids.shape[1] :].tolist(), wave.reshape(-1).numpy())
    return made


def params(question: str) -> dict[str, Any]:
    words, frames = QUESTIONS[question]
    return {
        "thinker": {"sampling": {"temperature": 0, "max_tokens": words}},
        "talker": {"sampling": {"temperature": 0, "max_tokens": frames}},
    }


async def speak(omni: AsyncOmni, question: str) -> Generation:
    return await omni.generate("tiny-omni", question, outputs=["text", "audio"], params=params(question), timeout=60)


def check(answer: Generation, tokens: list[int], wave: np.ndarray) -> None:
    assert answer.token_ids == tokens
    samples = np.frombuffer(answer.artifacts[0].data, dtype="<i2") / 32768
    assert len(samples) == len(wave)
    np.testing.assert_allclose(samples, np.clip(wave, -1, 1), atol=1e-3)


async def test_one_request_says_what_transformers_says(demo, reference) -> None:
    question = "How are you today?"
    async with AsyncOmni(demo.grpc) as omni:
        check(await speak(omni, question), *reference[question])


async def test_eight_requests_at_once_say_what_transformers_says(demo, reference) -> None:
    async with AsyncOmni(demo.grpc) as omni:
        answers = await asyncio.gather(*(speak(omni, question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        check(answer, *reference[question])


async def test_sound_begins_before_the_text_has_ended(demo) -> None:
    wanted = {
        "thinker": {"sampling": {"temperature": 0, "min_tokens": 600, "max_tokens": 600}},
        "talker": {"sampling": {"temperature": 0, "min_tokens": 40, "max_tokens": 60}},
    }
    async with AsyncOmni(demo.grpc) as omni:
        stream = omni.stream("tiny-omni", "Tell me a story.", outputs=["text", "audio"], params=wanted, timeout=60)
        order = ["sound" if output.media else "text" async for output in stream]
    last_text = len(order) - 1 - order[::-1].index("text")
    assert order.index("sound") < last_text


async def test_finished_stages_are_reported_with_their_usage(demo) -> None:
    async with AsyncOmni(demo.grpc) as omni:
        answer = await speak(omni, "Hello")
    assert [each.stage for each in answer.finished.stages] == ["thinker", "talker", "code2wav"]
    thinker, _, code2wav = answer.finished.stages
    assert thinker.usage.completion_tokens == len(answer.token_ids) == 3
    assert thinker.reason == content_pb2.FINISH_REASON_LENGTH
    assert code2wav.usage.audio_samples == len(answer.artifacts[0].data) // 2
