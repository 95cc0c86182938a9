"""``omnid demo``: a cluster from nothing to its answers, through the door that OpenAI's clients use."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich_pixels import Pixels

from omni.rpc.channel import make_channel
from omni.rpc.errors import OmniError, Reason
from omni.rpc.tls import ClientTls
from omni.v1 import config_pb2, stage_pb2, stage_pb2_grpc
from omnid.config import ConfigError, DeployConfig
from omnid.launcher.deployment import prepare
from omnid.launcher.local import LocalCluster, local_cluster
from omnid.saving import save

TALKS, DRAWS = "tiny-omni", "tiny-image"
"""Models of the deployment."""
QUESTION = "What is two plus three?"
PICTURE = "a red circle above a blue square on a white background"
READY_SECONDS = 120.0
DESCRIBE_SECONDS = 10.0
PREVIEW = 64
"""Pixels a side of the picture in a terminal."""
_LINES_KEPT = 200


@dataclass(slots=True)
class Spoken:
    """An answer in text and sound, and when its parts came, in seconds from the question."""

    text: str = ""
    sound: bytearray = field(default_factory=bytearray)
    first_text: float = 0.0
    last_text: float = 0.0
    first_sound: float = 0.0
    end: float = 0.0
    tokens: int = 0


SAMPLE_RATE = 24000


async def run(deploy: str, out: Path, *, verbose: bool) -> None:
    """Starts the deployment on free ports, asks, saves the answers in `out`, prints the times, stops everything.

    Raises:
        ConfigError: the deployment does not serve what the demo asks for.
        ProcessFailedError, OmniError: when the cluster cannot be started, or does not answer.
    """
    console = Console()
    kept: deque[str] = deque(maxlen=_LINES_KEPT)
    echo = (lambda line: console.print(line, markup=False, highlight=False)) if verbose else kept.append
    begun = time.monotonic()
    config, pipelines = prepare(deploy)
    _check_models(config, pipelines)
    tls = config.tls_files()
    async with local_cluster(pipelines, grpc="127.0.0.1:0", http="127.0.0.1:0", tls=tls, echo=echo) as cluster:
        with console.status("starting coordinator, gateway and stage servers"):
            await cluster.ready(READY_SECONDS)
        console.print(f"ready after {time.monotonic() - begun:.1f} s: http://{cluster.http}/v1, gRPC {cluster.grpc}")
        async with openai.AsyncOpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0) as client:
            try:
                spoken = await _ask(client)
                picture, seconds = await _draw(client)
            except openai.OpenAIError as error:
                raise OmniError(Reason.INTERNAL, f"the gateway answered: {error}") from error
        await asyncio.to_thread(_save, out, spoken, picture)
        console.print(_times(spoken, seconds))
        console.print(await _stages(cluster, tls.client() if tls else None))
    for line in (
        f"asked: {QUESTION}",
        f"heard: {spoken.text} ({out / 'answer.txt'}, {out / 'answer.wav'}, {_seconds(spoken):.1f} s)",
        f"drawn: {PICTURE} ({out / 'picture.png'})",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print(_preview(picture))


def _check_models(config: DeployConfig, pipelines: list[config_pb2.ResolvedPipeline]) -> None:
    served = [pipeline.model for pipeline in pipelines]
    if not {TALKS, DRAWS} <= set(served):
        message = f"the deployment must serve {TALKS} and {DRAWS}, it serves {', '.join(served)}"
        raise ConfigError([config.document.problem(("models",), message)])


async def _ask(client: openai.AsyncOpenAI) -> Spoken:
    answer = Spoken()
    begun = time.monotonic()
    stream = await client.chat.completions.create(
        model=TALKS,
        messages=[{"role": "user", "content": QUESTION}],
        modalities=["text", "audio"],
        audio={"voice": "tiny", "format": "pcm16"},
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        seed=1,
    )
    async for chunk in stream:
        now = time.monotonic() - begun
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                answer.text += choice.delta.content
                answer.first_text = answer.first_text or now
                answer.last_text = now
            audio: Any = getattr(choice.delta, "audio", None)
            data = audio.get("data") if isinstance(audio, dict) else getattr(audio, "data", None)
            if data:
                answer.sound += base64.b64decode(data)
                answer.first_sound = answer.first_sound or now
    answer.end = time.monotonic() - begun
    return answer


async def _draw(client: openai.AsyncOpenAI) -> tuple[bytes, float]:
    begun = time.monotonic()
    answer = await client.images.generate(
        model=DRAWS, prompt=PICTURE, size="128x128", response_format="b64_json", extra_body={"seed": 1}
    )
    if not answer.data or not answer.data[0].b64_json:
        raise OmniError(Reason.COUNT_MISMATCH, "the answer holds no picture")
    return base64.b64decode(answer.data[0].b64_json), time.monotonic() - begun


def _preview(picture: bytes) -> Pixels:
    """The picture in half-blocks, two pixels a character."""
    with Image.open(io.BytesIO(picture)) as opened:
        pixels: Pixels = Pixels.from_image(opened.convert("RGB"), resize=(PREVIEW, PREVIEW))
    return pixels


def _seconds(answer: Spoken) -> float:
    return len(answer.sound) / 2 / SAMPLE_RATE


def _save(out: Path, spoken: Spoken, picture: bytes) -> None:
    save(out / "answer.txt", f"{spoken.text}\n".encode())
    save(out / "answer.wav", _wav(spoken.sound))
    save(out / "picture.png", picture)


def _wav(pcm: bytes | bytearray) -> bytes:
    import wave

    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(pcm)
    return made.getvalue()


def _times(answer: Spoken, picture: float) -> Table:
    table = Table(title="as the client felt it", title_justify="left")
    for column in ("request", "TTFT", "TTFP", "TPOT", "E2EL", "RTF"):
        table.add_column(column, justify="left" if column == "request" else "right")
    tpot = (answer.last_text - answer.first_text) / max(1, answer.tokens - 1)
    table.add_row(
        "question, text and speech",
        f"{answer.first_text * 1e3:.0f} ms",
        f"{answer.first_sound * 1e3:.0f} ms",
        f"{tpot * 1e3:.1f} ms",
        f"{answer.end:.2f} s",
        f"{answer.end / max(_seconds(answer), 1e-9):.2f}",
    )
    table.add_row("picture", "", f"{picture * 1e3:.0f} ms", "", f"{picture:.2f} s", "")
    return table


async def _stages(cluster: LocalCluster, tls: ClientTls | None) -> Table:
    """What each stage did, as its server counts."""
    table = Table(title="stages", title_justify="left")
    for column in ("replica", "runs", "steps", "tokens, frames or steps", "arena"):
        table.add_column(column, justify="left" if column == "replica" else "right")
    for status in cluster.daemon.cluster.statuses():
        async with make_channel(status.address.target, tls=tls) as channel:
            stub = stage_pb2_grpc.StageServiceStub(channel)
            try:
                described = await stub.Describe(stage_pb2.DescribeRequest(), timeout=DESCRIBE_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise OmniError.from_rpc_error(error) from None
        load = described.load
        name = f"{status.model}/{status.stage}/{status.index}"
        table.add_row(name, str(load.finished_runs), str(load.steps), str(load.units), f"{load.arena.used_bytes} B")
    return table
