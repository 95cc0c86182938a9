"""Pictures, models, readiness, metrics, keys, and the process itself."""

import asyncio
import base64
import json
import os
import signal
import sys

import httpx
import openai
import pytest

from omni.v1 import config_pb2
from tests.contract.gateway_upstream import BOUND_S, IMAGE, Omni, finished, hello, http, omni_model, sdk, start_omni

HELLO = [{"role": "user", "content": "hi"}]


async def test_pictures_come_as_base64_with_all_that_was_asked_for_on_its_way():
    omni = Omni()
    async with sdk(omni) as client:
        answer = await client.images.generate(
            model="tiny-image",
            prompt="a red circle",
            n=2,
            size="128x64",
            output_format="webp",
            extra_body={"seed": 5, "num_inference_steps": 3, "guidance_scale": 2.5, "negative_prompt": "blue"},
        )
    assert [base64.b64decode(image.b64_json) for image in answer.data] == [b"\x89PNG\x00", b"\x89PNG\x01"]
    start = omni.turns[0].start
    assert start.prompt.text == "a red circle" and list(start.outputs) == [IMAGE]
    params = start.params["dit"]
    diffusion = params.diffusion
    assert (diffusion.width, diffusion.height, diffusion.outputs, diffusion.seed) == (128, 64, 2, 5)
    assert (diffusion.steps, diffusion.guidance_scale, diffusion.negative_prompt) == (3, 2.5, "blue")
    assert params.format == config_pb2.MEDIA_FORMAT_WEBP


async def test_an_image_request_without_a_model_takes_the_only_one_that_draws():
    omni = Omni()
    async with sdk(omni) as client:
        await client.images.generate(prompt="a red circle")
    assert omni.turns[0].start.model == "tiny-image"


async def test_fewer_pictures_than_asked_for_are_an_error():
    async def script(turn):
        await turn.accept()
        await turn.finish(finished("dit"))

    omni = Omni()
    omni.script = script
    async with sdk(omni) as client:
        with pytest.raises(openai.InternalServerError, match="0 pictures came where 1"):
            await client.images.generate(prompt="x")


async def test_models_are_listed_with_what_they_take_and_make():
    async with sdk(Omni()) as client:
        names = [model.id async for model in client.models.list()]
        model = await client.models.retrieve("tiny-omni")
    assert names == ["tiny-image", "tiny-omni"]
    assert model.object == "model" and model.ready is True
    assert model.output_modalities == ["text", "audio"] and model.stages == ["thinker", "talker", "code2wav"]


async def test_a_model_that_came_later_is_found():
    omni = Omni()
    async with sdk(omni) as client:
        later = omni_model()
        later.model = "later"
        omni.models.append(later)
        answer = await client.chat.completions.create(model="later", messages=HELLO)
    assert answer.model == "later"


async def test_ready_names_the_model_that_is_missing():
    omni = Omni()
    async with http(omni) as client:
        assert (await client.get("/ready")).json() == {"status": "ready", "missing": []}
        omni.models[1].ready = False
        answer = await client.get("/ready")
        health = await client.get("/health")
    assert answer.status_code == 503 and "tiny-image" in answer.json()["missing"][0]
    assert health.status_code == 200


async def test_metrics_have_the_field_s_names():
    async with http(Omni()) as client:
        body = {"model": "tiny-omni", "messages": HELLO, "modalities": ["text", "audio"], "stream": True}
        await client.post("/v1/chat/completions", json=body)
        await client.post("/v1/chat/completions", json={})
        page = (await client.get("/metrics")).text
    for name in ("ttft_seconds", "tpot_seconds", "ttfp_seconds", "e2el_seconds", "rtf", "underrun_seconds"):
        assert f'omni_gateway_{name}_count{{model="tiny-omni"}} 1.0' in page, name
    assert 'omni_gateway_requests_total{route="/v1/chat/completions",status="400"} 1.0' in page
    assert 'omni_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0' in page
    assert "omni_gateway_attached" in page


async def test_the_openapi_document_describes_the_bodies():
    async with http(Omni()) as client:
        document = (await client.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"] == "#/components/schemas/ChatRequest"
    assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "prompt" in document["components"]["schemas"]["ImageRequest"]["properties"]


async def test_keys_guard_the_api_and_nothing_else():
    async with http(Omni(), api_keys=frozenset({"right"})) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}):
            refused = await client.get("/v1/models", headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/v1/models", headers={"authorization": "Bearer right"})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200


async def test_ids_and_traces_travel():
    omni = Omni()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with http(omni) as client:
        body = {"model": "tiny-omni", "messages": HELLO}
        headers = {"x-request-id": "mine", "traceparent": trace}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "not ok", "traceparent": "no"})
    assert answer.headers["x-request-id"] == "req-1"
    assert (omni.turns[0].start.client_request_id, omni.turns[0].start.traceparent) == ("mine", trace)
    assert omni.turns[1].start.client_request_id.startswith("req-") and omni.turns[1].start.traceparent == ""


async def test_the_process_says_where_it_serves_and_ends_well_on_sigterm(tmp_path):
    omni = Omni()
    omni.script = hello
    server, target = await start_omni(omni)
    (tmp_path / "keys").write_text("# staff\nsecret\n")
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.server", "--coordinator", target, "--listen", "127.0.0.1:0"),
        *("--ready-fd", str(writing), "--api-key-file", str(tmp_path / "keys"), "--log-format", "json"),
        pass_fds=[writing],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            line = await asyncio.wait_for(asyncio.to_thread(ready.readline), 30)
        url = f"http://{json.loads(line)['http']}"
        async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer secret"}) as client:
            answer = await client.post("/v1/chat/completions", json={"model": "tiny-omni", "messages": HELLO})
        assert answer.json()["choices"][0]["message"]["content"] == "Hello"
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(process.communicate(), BOUND_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await server.stop(0)
    assert process.returncode == 0 and out == b"", err
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--listen", "nowhere"), 2, b"--listen"),
        (("--listen", "127.0.0.1:99999"), 2, b"--listen"),
        (("--listen", "127.0.0.1:0", "--api-key-file", "/nonexistent/keys"), 2, b"/nonexistent/keys"),
        (("--listen", "127.0.0.1:0", "--max-body-bytes", "-1"), 2, b"--max-body-bytes"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "x"), 2, b"--tls-ca"),
        (("--listen", "127.0.0.1:0", "--tls-ca", "/nonexistent/ca"), 2, b"/nonexistent/ca"),
        (("--listen", "127.0.0.1:0", "--tls-ca", __file__), 2, __file__.encode()),
    ],
)
async def test_options_that_make_no_sense_are_refused(arguments, status, says):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.server", "--coordinator", "127.0.0.1:1", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        _, err = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == status and says in err and b"Traceback" not in err, err
