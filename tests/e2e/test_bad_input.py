"""Bad input over REST, gRPC and the command line: an answer that names field and allowed values, and nothing breaks."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from omni.rpc.errors import InvalidArgumentError, NotFoundError, OmniError
from omnid.client import AsyncOmni

HELLO = [{"role": "user", "content": "Hello"}]


def picture(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def with_part(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]


def image_part(url: str) -> list[dict[str, Any]]:
    return with_part({"type": "image_url", "image_url": {"url": url}})


def sound_part(data: bytes) -> list[dict[str, Any]]:
    return with_part({"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}})


CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model": ({"model": "tiny-omn"}, "tiny-omni"),
    "unsupported modality": ({"modalities": ["image"]}, "modalities"),
    "unknown modality": ({"modalities": ["smell"]}, "modalities"),
    "empty messages": ({"messages": []}, "messages"),
    "empty text": ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    "messages of a wrong type": ({"messages": "hello"}, "messages"),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    "temperature of a wrong type": ({"temperature": "hot"}, "temperature"),
    "negative temperature": ({"temperature": -1}, "temperature"),
    "huge max_tokens": ({"max_tokens": 10**12}, "max_tokens"),
    "negative max_tokens": ({"max_tokens": -5}, "max_tokens"),
    "top_p of zero": ({"top_p": 0}, "top_p"),
    "huge seed": ({"seed": 2**70}, "seed"),
    "two choices": ({"n": 2}, "n"),
    "unknown field": ({"temprature": 1}, "temperature"),
    "unknown stage": ({"sampling_params": {"thinkr": {}}}, "thinker"),
    "a voice for a stage that does not speak": ({"sampling_params": {"thinker": {"voice": "tiny"}}}, "voice"),
    "unknown extra key": ({"sampling_params": {"thinker": {"extra": {"speed": 2}}}}, "speed"),
    "unknown voice": ({"modalities": ["text", "audio"], "audio": {"voice": "nobody", "format": "wav"}}, "tiny"),
    "unknown audio format": ({"modalities": ["text", "audio"], "audio": {"voice": "tiny", "format": "ogx"}}, "format"),
    "broken base64": ({"messages": image_part("data:image/png;base64,####")}, "base64"),
    "broken picture": ({"messages": image_part("data:image/png;base64,aGVsbG8gd29ybGQ=")}, "picture"),
    "a URL where none is fetched": ({"messages": image_part("http://127.0.0.1/x.png")}, "URL"),
    "too many pixels": ({"messages": image_part(picture(5000, 4000))}, "pixels"),
    "broken sound": ({"messages": sound_part(b"RIFFnothing")}, "recording"),
    "prompt longer than the context": ({"messages": [{"role": "user", "content": "word " * 20000}]}, "token"),
}


@pytest.mark.parametrize("case", CHATS)
def test_a_bad_chat_is_refused_with_the_field_and_what_is_allowed(demo, case: str) -> None:
    change, named = CHATS[case]
    body = {"model": "tiny-omni", "messages": HELLO, "max_tokens": 4} | change
    answer = httpx.post(f"{demo.http}/v1/chat/completions", json=body, timeout=30)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert named.lower() in f"{error['param']} {error['message']}".lower(), error
    assert error["request_id"]
    assert "Traceback" not in answer.text


def test_a_voice_that_there_is_not_is_refused_before_a_stream_begins(demo) -> None:
    voiced = {"modalities": ["text", "audio"], "audio": {"voice": "nobody", "format": "pcm16"}, "stream": True}
    body = {"model": "tiny-omni", "messages": HELLO} | voiced
    answer = httpx.post(f"{demo.http}/v1/chat/completions", json=body, timeout=30)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "audio.voice")
    voices = httpx.get(f"{demo.http}/v1/models/tiny-omni", timeout=30).json()["voices"]
    assert voices
    assert f"audio.voice: must be one of {', '.join(voices)}, got 'nobody'" in error["message"]


IMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "a model that does not draw": ({"model": "tiny-omni"}, "model"),
    "a size that is no multiple": ({"size": "130x128"}, "size"),
    "a size below the model's": ({"size": "1x1"}, "size"),
    "a size beyond the model": ({"size": "4096x4096"}, "size"),
    "a size that is none": ({"size": "big"}, "size"),
    "no prompt": ({"prompt": ""}, "prompt"),
    "no steps": ({"num_inference_steps": 0}, "num_inference_steps"),
    "a negative guidance": ({"guidance_scale": -1}, "guidance_scale"),
    "too many pictures": ({"n": 1000}, "n"),
    "an unknown format": ({"output_format": "bmp"}, "output_format"),
}


@pytest.mark.parametrize("case", IMAGES)
def test_a_bad_picture_request_is_refused_with_the_field_and_what_is_allowed(demo, case: str) -> None:
    change, named = IMAGES[case]
    body = {"model": "tiny-image", "prompt": "a red circle"} | change
    answer = httpx.post(f"{demo.http}/v1/images/generations", json=body, timeout=30)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert named in f"{error['param']} {error['message']}", error


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model":' * 5000])
def test_a_body_that_is_no_request_is_refused(demo, body: bytes) -> None:
    answer = httpx.post(f"{demo.http}/v1/chat/completions", content=body, timeout=30)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


GRPC: dict[str, tuple[dict[str, Any], type[OmniError], str]] = {
    "unknown model": ({"model": "none"}, NotFoundError, "tiny-omni"),
    "unsupported output": ({"outputs": ["video"]}, InvalidArgumentError, "video"),
    "empty prompt": ({"prompt": ""}, InvalidArgumentError, "prompt"),
    "unknown stage": ({"params": {"talkr": {}}}, InvalidArgumentError, "talker"),
    "top_p beyond 1": ({"params": {"thinker": {"sampling": {"top_p": 2}}}}, InvalidArgumentError, "top_p"),
    "not a number": (
        {"params": {"thinker": {"sampling": {"temperature": "NaN"}}}},
        InvalidArgumentError,
        "temperature",
    ),
    "huge count": (
        {"params": {"thinker": {"sampling": {"max_tokens": 2**32 - 1}}}},
        InvalidArgumentError,
        "max_tokens",
    ),
}


@pytest.mark.parametrize("case", GRPC)
async def test_a_bad_call_fails_with_its_typed_error_and_the_field(demo, case: str) -> None:
    change, kind, named = GRPC[case]
    asked: dict[str, Any] = {"model": "tiny-omni", "prompt": "Hello", "outputs": ["text"], "params": {}} | change
    async with AsyncOmni(demo.grpc) as omni:
        with pytest.raises(kind, match=named):
            await omni.generate(
                asked["model"], asked["prompt"], outputs=asked["outputs"], params=asked["params"], timeout=30
            )


def test_a_good_request_still_succeeds(demo) -> None:
    body = {"model": "tiny-omni", "messages": HELLO, "max_tokens": 4}
    answer = httpx.post(f"{demo.http}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text


def omnid(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omnid.cli", *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_an_unknown_key_in_a_deployment_is_refused_with_file_path_line_and_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("models:\n  - name: x\n    pipeline: synthetic\n    max_request: 4\n")
    for command in (("config", "validate"), ("config", "resolve"), ("up",), ("serve",)):
        ended = omnid(*command, str(path))
        assert ended.returncode == 2, ended
        for part in ("mine.yaml", "4", "max_request", "max_requests"):
            assert part in ended.stderr
        assert "Traceback" not in ended.stderr


def test_an_unknown_deployment_is_refused_with_those_there_are() -> None:
    ended = omnid("up", "dmo")
    assert ended.returncode == 2
    assert "demo" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_coordinator_that_is_not_there_is_said_in_one_line() -> None:
    ended = omnid("ps", "--target", "127.0.0.1:1")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
