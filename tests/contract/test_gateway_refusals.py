"""Whatever is wrong with a request: an answer of the 400 class that names the field, in OpenAI's form; never a 500."""

import base64
import json
import struct

import pytest

from tests.contract.gateway_upstream import Omni, http

HELLO = [{"role": "user", "content": "hi"}]
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 8, 8) + b"\x08\x02\x00\x00\x00"
BIG_PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 40_000, 40_000) + b"\x08\x02\x00\x00\x00"


def wav(seconds: float, rate: int = 8000) -> bytes:
    data = bytes(int(rate * seconds))
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1, rate, rate, 1, 8)
    return head + struct.pack("<4sI", b"data", len(data)) + data


def url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def picture(address: str) -> list:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]


def sound(data: str, kind: str = "wav") -> list:
    return [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": data, "format": kind}}]}]


CHAT = [
    # body, status, param, what the message says
    ({"model": "no-such"}, 404, "model", "tiny-omni"),
    ({"model": 7}, 400, "model", "string"),
    ({"model": None}, 400, "model", "string"),
    ({"messages": []}, 400, "messages", "at least 1"),
    ({"messages": "hi"}, 400, "messages", "array"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0]", "content"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content", "at least 1"),
    ({"messages": [{"role": "user", "content": [{"type": "vdeo"}]}]}, 400, "messages[0].content[0]", "image_url"),
    ({"messages": [{"role": "user", "content": "x", "nam": "y"}]}, 400, "messages[0].nam", "'name'"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, 400, "messages[0].audio", "transcript"),
    ({"temprature": 1}, 400, "temprature", "'temperature'"),
    ({"temperature": "hot"}, 400, "temperature", "number"),
    ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    ({"temperature": 1e300}, 400, "temperature", "less than or equal to 2"),
    ({"temperature": True}, 400, "temperature", "number"),
    ({"top_p": 0}, 400, "top_p", "greater than 0"),
    ({"max_tokens": -5}, 400, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 10**30}, 400, "max_tokens", "less than or equal"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_completion_tokens", "max_tokens (5)"),
    ({"seed": -1}, 400, "seed", "greater than or equal to 0"),
    ({"seed": 2**64}, 400, "seed", "less than or equal"),
    ({"stop": [""]}, 400, "stop", "1 to 1024"),
    ({"stop": ["x"] * 17}, 400, "stop", "at most 16"),
    ({"stop": {"a": 1}}, 400, "stop", "string"),
    ({"n": 2}, 400, "n", "only value allowed is 1"),
    ({"n": True}, 400, "n", "only value allowed is 1"),
    ({"tools": [{"type": "function"}]}, 400, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
    ({"modalities": ["smell"]}, 400, "modalities[0]", "'text'"),
    ({"modalities": []}, 400, "modalities", "at least 1"),
    ({"modalities": ["text", "text"]}, 400, "modalities", "twice"),
    ({"modalities": ["image"]}, 400, "modalities[0]", "audio, text"),
    ({"audio": {"voice": "a", "format": "wav"}}, 400, "audio", "modalities"),
    ({"audio": {"voice": "a", "format": "aiff"}}, 400, "audio.format", "'wav'"),
    ({"sampling_params": {"thinkr": {}}}, 400, "sampling_params.thinkr", "'thinker'"),
    ({"sampling_params": {"thinker": {"temperatur": 1}}}, 400, "sampling_params.thinker.temperatur", "'temperature'"),
    ({"sampling_params": {"talker": {"extra": {"a": 10**20}}}}, 400, "sampling_params.talker.extra.a", "at most"),
    ({"sampling_params": 3}, 400, "sampling_params", "object"),
    ({"sampling_params": {str(each): 1 for each in range(200_000)}}, 400, "sampling_params", "at most 100 fields"),
    ({str(each): 1 for each in range(200_000)}, 400, None, "at most 100 fields"),
    ({"messages": [{"rol": "user"}] * 4096}, 400, "messages[0].role", "did you mean 'role'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}] * 99_999}]}, 400, "messages[0].content[0].text", ""),
    ({"messages": HELLO * 10_000}, 400, "messages", "at most 4096"),
    ({"m" * 5000: 1}, 400, "m" * 61 + "…", "not a known field"),
    ({"model": "m" * 5000}, 400, "model", "got 'mmm"),
    ({"sampling_params": {"t" * 5000: {}}}, 400, "sampling_params." + "t" * 61 + "…", "has no stage"),
    ({"messages": picture("http://example.com/a.png")}, 400, "messages[0].content[0].image_url.url", "data URL"),
    ({"messages": picture("data:image/png;base64")}, 400, "messages[0].content[0].image_url.url", "comma"),
    ({"messages": picture("data:image/png,abcd")}, 400, "messages[0].content[0].image_url.url", "base64"),
    ({"messages": picture("data:image/png;base64,????")}, 400, "messages[0].content[0].image_url.url", "base64"),
    ({"messages": picture("data:image/png;base64,YQ=")}, 400, "messages[0].content[0].image_url.url", "multiple of 4"),
    ({"messages": picture("data:image/png;base64,")}, 400, "messages[0].content[0].image_url.url", "no data"),
    ({"messages": picture(url(b"hello, this is text"))}, 400, "messages[0].content[0].image_url.url", "no picture"),
    ({"messages": picture(url(BIG_PNG))}, 413, "messages[0].content[0].image_url.url", "40000x40000"),
    ({"messages": picture(url(PNG + bytes(5000)))}, 413, "messages[0].content[0].image_url.url", "at most 4096"),
    ({"messages": picture(url(PNG)) * 3}, 413, "messages[2].content[0]", "at most 2 media parts"),
    ({"messages": sound("@@@@")}, 400, "messages[0].content[0].input_audio.data", "base64"),
    ({"messages": sound(base64.b64encode(PNG).decode())}, 400, "messages[0].content[0].input_audio.data", "recording"),
    ({"messages": sound("AAAA", "midi")}, 400, "messages[0].content[0].input_audio.format", "'wav'"),
]


async def test_bad_chat_requests_are_refused_by_name():
    omni = Omni()
    async with http(omni) as client:
        for change, status, param, says in CHAT:
            answer = await client.post("/v1/chat/completions", json={"model": "tiny-omni", "messages": HELLO} | change)
            error = answer.json()["error"]
            assert answer.status_code == status, (change, error)
            assert error["param"] == param, (change, error)
            assert says in error["message"] and len(answer.content) < 2000, (change, error)
            assert error["type"] == "invalid_request_error" and error["request_id"] == answer.headers["x-request-id"]
    assert omni.turns == [], "nothing of this reaches the coordinator"


async def test_a_recording_that_lasts_too_long_is_refused():
    slow = base64.b64encode(wav(3, rate=100)).decode()
    async with http(Omni()) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "tiny-omni", "messages": sound(slow)})
    assert answer.status_code == 413 and "lasts 3.0 s" in answer.json()["error"]["message"]


async def test_media_that_the_model_does_not_take_is_refused():
    async with http(Omni()) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "tiny-image", "messages": picture(url(PNG))})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_modality"


async def test_good_media_reaches_the_coordinator_as_bytes():
    omni = Omni()
    async with http(omni) as client:
        messages = picture(url(PNG, "image/jpeg")) + sound(base64.b64encode(wav(0.1)).decode())
        answer = await client.post("/v1/chat/completions", json={"model": "tiny-omni", "messages": messages})
    assert answer.status_code == 200
    image, recording = (message.content[0].media for message in omni.turns[0].start.prompt.conversation.messages)
    assert (image.data, image.mime_type) == (PNG, "image/png"), "the bytes say what it is, not the sender"
    assert (recording.data, recording.mime_type) == (wav(0.1), "audio/wav")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model": "tiny-omni", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny-omni", "messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"model": "tiny-omni", "messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"\xff\xfe\x00",
        b'{"model": "tiny-omni", "messages": [{"role": "user", "content": "hi"}],'
        b'"sampling_params": {"thinker": {"extra":' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"}}}",
    ],
)  # fmt: skip
async def test_bodies_that_are_no_request_are_400(body):
    async with http(Omni()) as client:
        for path in ("/v1/chat/completions", "/v1/images/generations"):
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"]


async def test_a_body_that_announces_too_much_is_refused_before_it_is_read():
    async with http(Omni(), max_body_bytes=1000) as client:
        answer = await client.post("/v1/chat/completions", content=b"x" * 1001)
        assert answer.status_code == 413 and "1000" in answer.json()["error"]["message"]


async def test_a_body_that_does_not_say_its_length_is_refused_when_it_grows_too_long():
    async def pieces():
        for _ in range(100):
            yield b"x" * 100

    async with http(Omni(), max_body_bytes=1000) as client:
        answer = await client.post("/v1/chat/completions", content=pieces())
        assert answer.status_code == 413


IMAGES = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": 3}, 400, "prompt"),
    ({"n": 0}, 400, "n"),
    ({"n": 11}, 400, "n"),
    ({"size": "large"}, 400, "size"),
    ({"size": "-1x5"}, 400, "size"),
    ({"size": "999999x1"}, 400, "size"),
    ({"size": "0x10"}, 400, "size"),
    ({"response_format": "url"}, 400, "response_format"),
    ({"output_format": "gif"}, 400, "output_format"),
    ({"quality": "hd"}, 400, "quality"),
    ({"stream": True}, 400, "stream"),
    ({"seed": -3}, 400, "seed"),
    ({"guidance_scale": -1}, 400, "guidance_scale"),
    ({"num_inference_steps": 10**9}, 400, "num_inference_steps"),
    ({"num_inference_step": 3}, 400, "num_inference_step"),
    ({"model": "tiny-omni"}, 400, "model"),
]


async def test_bad_image_requests_are_refused_by_name():
    omni = Omni()
    async with http(omni) as client:
        for change, status, param in IMAGES:
            answer = await client.post("/v1/images/generations", json={"prompt": "a circle"} | change)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), (change, answer.text)
    assert omni.turns == []


async def test_paths_and_methods_that_are_not_served_answer_in_the_same_form():
    async with http(Omni()) as client:
        missing = await client.get("/v1/nothing")
        slash = await client.get("/v1/models/")
        wrong = await client.get("/v1/chat/completions")
        unknown = await client.get("/v1/models/no-such")
        long = await client.get("/v1/models/" + "m" * 5000)
    assert (missing.status_code, wrong.status_code, unknown.status_code) == (404, 405, 404)
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert len(long.content) < 400 and "'mmm" in long.json()["error"]["message"]
    assert slash.status_code == 404
    for answer in (missing, wrong, slash):
        assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"
