"""The demo cluster through its front door: the OpenAI Python SDK."""

import base64
import io
import json

import av
import httpx
import numpy as np
import openai
import pytest
import soundfile
from PIL import Image

QUESTION = [{"role": "user", "content": "What is two plus three?"}]
PICTURE = "a red circle above a blue square on a white background"


@pytest.fixture
def client(demo):
    with openai.OpenAI(base_url=f"{demo.http}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **more):
    return client.chat.completions.create(
        model="tiny-omni", messages=QUESTION, temperature=0, max_completion_tokens=12, **more
    )


def pcm(chunks) -> np.ndarray:
    return np.frombuffer(b"".join(base64.b64decode(chunk) for chunk in chunks), dtype="<i2")


def test_an_answer_in_text_has_usage_and_a_finish_reason(client):
    answer = ask(client)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_text_joined_is_the_whole_answer(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = ask(client)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_streamed_speech_joined_is_the_whole_recording(client):
    sound, transcript, text = [], "", ""
    for chunk in ask(
        client, stream=True, modalities=["text", "audio"], audio={"voice": "tiny", "format": "pcm16"}, seed=7
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if audio := choice.delta.audio:
                sound.extend([audio.data] if audio.data else [])
                transcript += audio.transcript or ""
    whole = ask(client, modalities=["text", "audio"], audio={"voice": "tiny", "format": "pcm16"}, seed=7)
    message = whole.choices[0].message
    assert len(sound) > 1
    assert pcm(sound).size > 0
    np.testing.assert_array_equal(pcm(sound), pcm([message.audio.data]))
    assert message.audio.transcript == (transcript or text)


@pytest.mark.parametrize("form", ["wav", "mp3", "flac", "opus"])
def test_speech_comes_in_the_file_format_that_was_asked_for(client, form):
    answer = ask(client, modalities=["text", "audio"], audio={"voice": "tiny", "format": form}, seed=7)
    data = base64.b64decode(answer.choices[0].message.audio.data)
    if form == "wav":
        samples, rate = soundfile.read(io.BytesIO(data))
    else:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.audio[0]
            rate = stream.rate
            samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(stream)])
    assert rate in (24000, 48000)
    assert samples.size > rate // 25


def test_a_prompt_becomes_the_picture_that_it_describes(client):
    answer = client.images.generate(
        model="tiny-image", prompt=PICTURE, size="128x128", response_format="b64_json", extra_body={"seed": 1}
    )
    picture = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
    assert (picture.format, picture.size) == ("PNG", (128, 128))
    pixels = np.asarray(picture.convert("RGB"), dtype=int)
    red = (pixels[..., 0] > 150) & (pixels[..., 1:].max(axis=2) < 110)
    blue = (pixels[..., 2] > 130) & (pixels[..., 0] < 110)
    assert red.sum() > 100
    assert blue.sum() > 100
    assert np.nonzero(red)[0].mean() < np.nonzero(blue)[0].mean()
    assert (pixels.min(axis=2) > 220).mean() > 0.3


def test_a_picture_can_be_asked_for_in_a_chat(demo):
    body = {"model": "tiny-image", "modalities": ["image"], "messages": [{"role": "user", "content": PICTURE}]}
    answer = httpx.post(f"{demo.http}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "data:image/png;base64," in json.dumps(answer.json())


def test_a_picture_and_a_recording_can_be_part_of_the_question(client):
    picture, sound = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(picture, "PNG")
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    soundfile.write(sound, tone, 16000, format="WAV")
    parts = [
        {"type": "text", "text": "What is this?"},
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()},
        },
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(sound.getvalue()).decode(), "format": "wav"},
        },
    ]
    plain = ask(client)
    answer = client.chat.completions.create(
        model="tiny-omni", messages=[{"role": "user", "content": parts}], temperature=0, max_completion_tokens=8
    )
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 4


def test_models_health_readiness_and_metrics_are_served(demo, client):
    assert {model.id for model in client.models.list()} == {"tiny-omni", "tiny-image"}
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert httpx.get(demo.http + path).status_code == 200, path
    ask(client)
    metrics = httpx.get(demo.http + "/metrics").text
    assert "ttft" in metrics.lower()
