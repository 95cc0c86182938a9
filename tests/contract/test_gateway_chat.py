"""Chat completions through OpenAI's own SDK."""

import base64

import openai
import pytest

from omni.rpc.errors import FieldViolation, OmniError, Reason
from omni.v1 import config_pb2, content_pb2
from tests.contract.gateway_upstream import AUDIO, TEXT, Omni, finished, sdk

HELLO = [{"role": "user", "content": "hi"}]


async def test_a_whole_answer_has_openai_s_shape():
    async with sdk(Omni()) as client:
        answer = await client.chat.completions.create(model="tiny-omni", messages=HELLO)
    assert answer.id == "chatcmpl-req-1" and answer.object == "chat.completion" and answer.model == "tiny-omni"
    assert answer._request_id == "req-1"
    assert answer.choices[0].message.content == "Hello" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 2, 9)


async def test_a_stream_opens_with_the_role_and_ends_with_reason_and_usage():
    async with sdk(Omni()) as client:
        stream = await client.chat.completions.create(
            model="tiny-omni", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:3]] == ["Hel", "lo"]
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-2].usage is None
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 9
    assert {chunk.id for chunk in chunks} == {"chatcmpl-req-1"}


async def test_text_with_any_character_arrives_as_it_was():
    text = 'quote " backslash \\ newline \n nul \x00 line separator \u2028 emoji \U0001f600'

    async def script(turn):
        await turn.accept()
        await turn.text(text)
        await turn.finish()

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        stream = await client.chat.completions.create(model="tiny-omni", messages=HELLO, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await client.chat.completions.create(model="tiny-omni", messages=HELLO)
    assert streamed == whole.choices[0].message.content == text


async def test_speech_comes_with_its_transcript_and_the_voice_reaches_the_stages_that_speak():
    omni = Omni()
    async with sdk(omni) as client:
        answer = await client.chat.completions.create(
            model="tiny-omni",
            messages=HELLO,
            modalities=["text", "audio"],
            audio={"voice": "chelsie", "format": "wav"},
        )
    audio = answer.choices[0].message.audio
    assert base64.b64decode(audio.data) == b"\x01\x00" * 4 + b"\x02\x00" * 4
    assert audio.transcript == "Hello" and audio.id == "audio_req-1"
    assert answer.usage.completion_tokens_details.audio_tokens == 5
    start = omni.turns[0].start
    assert list(start.outputs) == [TEXT, AUDIO]
    assert start.params["code2wav"].format == config_pb2.MEDIA_FORMAT_WAV
    assert start.params["talker"].voice == "chelsie"
    assert not start.params["thinker"].HasField("voice")


async def test_streamed_speech_is_base64_of_each_piece_and_then_the_transcript():
    async with sdk(Omni()) as client:
        stream = await client.chat.completions.create(
            model="tiny-omni",
            messages=HELLO,
            modalities=["text", "audio"],
            audio={"voice": "a", "format": "pcm16"},
            stream=True,
        )
        audio = [
            chunk.choices[0].delta.audio async for chunk in stream if getattr(chunk.choices[0].delta, "audio", None)
        ]
    assert b"".join(base64.b64decode(each.data or "") for each in audio) == b"\x01\x00" * 4 + b"\x02\x00" * 4
    assert audio[0].sample_rate == 24000
    assert audio[-1].transcript == "Hello" and audio[-1].data is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_picture_is_an_image_of_the_message_as_a_data_url(stream):
    async with sdk(Omni()) as client:
        answer = await client.chat.completions.create(
            model="tiny-image", messages=HELLO, modalities=["image"], stream=stream
        )
        if stream:
            images = [image async for chunk in answer for image in getattr(chunk.choices[0].delta, "images", ())]
        else:
            images = answer.choices[0].message.images
    assert [image["image_url"]["url"] for image in images] == [
        "data:image/png;base64," + base64.b64encode(b"\x89PNG\x00").decode()
    ]


async def test_parameters_reach_the_stage_that_writes_and_overrides_beat_them():
    omni = Omni()
    async with sdk(omni) as client:
        await client.chat.completions.create(
            model="tiny-omni",
            messages=[{"role": "developer", "content": "be brief"}, *HELLO],
            temperature=0.5,
            top_p=0.9,
            max_completion_tokens=12,
            stop=["a", "b"],
            seed=2**64 - 1,
            presence_penalty=1,
            frequency_penalty=-1,
            logprobs=True,
            top_logprobs=3,
            user="me",
            extra_body={
                "top_k": 5,
                "sampling_params": {"thinker": {"temperature": 0.25}, "talker": {"extra": {"a": [1, None]}}},
            },
        )
    start = omni.turns[0].start
    sampling = start.params["thinker"].sampling
    assert (sampling.temperature, sampling.max_tokens, list(sampling.stop)) == (0.25, 12, ["a", "b"])
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (2**64 - 1, 1, -1)
    assert (sampling.logprobs, sampling.top_k) == (3, 5)
    assert sampling.top_p == pytest.approx(0.9)
    assert dict(start.params["talker"].extra)["a"][0] == 1
    assert [message.role for message in start.prompt.conversation.messages] == [
        content_pb2.CHAT_ROLE_SYSTEM,
        content_pb2.CHAT_ROLE_USER,
    ]


async def test_log_probabilities_have_openai_s_shape():
    async def script(turn):
        await turn.accept()
        candidate = content_pb2.TokenLogprobs.Candidate(token_id=1, text="é", logprob=-0.5)
        logprobs = content_pb2.TokenLogprobs(sampled=candidate, top=[candidate])
        await turn.output("thinker", text="é", token_ids=[1], logprobs=[logprobs])
        await turn.finish()

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        whole = await client.chat.completions.create(model="tiny-omni", messages=HELLO, logprobs=True, top_logprobs=1)
        stream = await client.chat.completions.create(
            model="tiny-omni", messages=HELLO, logprobs=True, top_logprobs=1, stream=True
        )
        streamed = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]
    for found in (whole.choices[0].logprobs, streamed[0]):
        assert found.content[0].token == "é" and found.content[0].bytes == [0xC3, 0xA9]
        assert found.content[0].top_logprobs[0].logprob == -0.5


async def test_the_finish_reason_is_the_text_s():
    async def script(turn):
        await turn.accept()
        await turn.text("cut")
        await turn.finish(finished("thinker", 1, 1, content_pb2.FINISH_REASON_LENGTH), finished("code2wav"))

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        answer = await client.chat.completions.create(model="tiny-omni", messages=HELLO)
    assert answer.choices[0].finish_reason == "length"


async def test_an_early_failure_of_a_stream_has_its_http_status_and_the_stage():
    async def script(turn):
        await turn.accept()
        await turn.fail(OmniError(Reason.STAGE_TIMEOUT, "no output within 5 s", stage="thinker"))

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        with pytest.raises(openai.APIStatusError) as failed:
            await client.chat.completions.create(model="tiny-omni", messages=HELLO, stream=True)
    assert failed.value.status_code == 504
    assert failed.value.body["stage"] == "thinker" and failed.value.body["request_id"] == "req-1"


async def test_a_late_failure_of_a_stream_is_an_error_event_and_no_end_mark():
    async def script(turn):
        await turn.accept()
        await turn.text("a")
        await turn.fail(OmniError(Reason.SEQUENCE_BROKEN, "a gap", stage="talker"))

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        stream = await client.chat.completions.create(model="tiny-omni", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="a gap") as failed:
            async for _ in stream:
                pass
    assert failed.value.body["stage"] == "talker" and failed.value.code == "sequence_broken"


async def test_a_refusal_by_the_coordinator_speaks_of_the_sender_s_own_fields():
    async def script(turn):
        field = 'params["thinker"].sampling.max_tokens'
        fields = [FieldViolation(field, "is more than the 64 that are left")]
        await turn.fail(OmniError(Reason.PROMPT_TOO_LONG, f"{field}: is more than the 64 that are left", fields=fields))

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        with pytest.raises(openai.BadRequestError) as failed:
            await client.chat.completions.create(model="tiny-omni", messages=HELLO)
    assert failed.value.param == "max_tokens" and failed.value.code == "context_length_exceeded"
    assert failed.value.body["message"] == "max_tokens: is more than the 64 that are left"


async def test_a_request_that_somebody_else_cancelled_is_no_answer():
    async def script(turn):
        await turn.accept()
        await turn.finish(reason=content_pb2.FINISH_REASON_CANCELLED)

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        with pytest.raises(openai.APIStatusError) as failed:
            await client.chat.completions.create(model="tiny-omni", messages=HELLO)
    assert failed.value.status_code == 499


async def test_a_full_queue_is_429_with_a_time_to_come_back():
    async def script(turn):
        await turn.fail(OmniError(Reason.QUEUE_FULL, "64 requests wait", retry_after=2.0))

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        with pytest.raises(openai.RateLimitError) as failed:
            await client.chat.completions.create(model="tiny-omni", messages=HELLO)
    assert failed.value.response.headers["retry-after"] == "2"
