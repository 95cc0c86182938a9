"""Tokens a second of the autoregressive engine, next to transformers' plain batched generate of the same model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench import report
from tools.tiny.folder import made

BATCHES = (1, 8, 32)
PROMPT = 32
TOKENS = 64
TURNS = 7
FLOOR = "transformers generate"

Prompts = Sequence[Sequence[int]]


def run() -> list[report.Row]:
    """Floor and subject in turn, all runs of a turn beginning together and making the same number of tokens."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from stage_server.checkpoint import ASSETS
    from tools.tiny.text import qwen3

    torch.set_num_threads(1)
    models = {"tiny-text": made(qwen3), "tiny-omni": ASSETS / "tiny_omni"}
    return [row for name, folder in models.items() for row in _rows(name, folder)]


def _rows(name: str, folder: Path) -> list[report.Row]:
    generate, engine = _generate(folder), _Engine(name, folder)
    rows = []
    try:
        for batch in BATCHES:
            prompts = [[300 + (7 * at + 3 * row) % 600 for at in range(PROMPT)] for row in range(batch)]
            turns = [(_rate(generate, prompts), _rate(engine.tokens, prompts)) for _ in range(TURNS + 1)]
            floor, subject = zip(*turns[1:], strict=True)  # the first turn warms both
            case = f"{name}, {batch} request{'s' * (batch > 1)}"
            wanted = 0.8 if batch > 1 else None
            rows.append(report.row("engine", case, "tokens/s", subject, floor=floor, floor_name=FLOOR, at_least=wanted))
    finally:
        engine.close()
    return rows


def _rate(call: Callable[[Prompts], None], prompts: Prompts) -> float:
    began = time.perf_counter()
    call(prompts)
    return len(prompts) * TOKENS / (time.perf_counter() - began)


def _generate(folder: Path) -> Callable[[Prompts], None]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3OmniMoeForConditionalGeneration

    kept: Any
    if AutoConfig.from_pretrained(folder).model_type == "qwen3_omni_moe":
        kept = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval().thinker
    else:
        kept = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def call(prompts: Prompts) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = kept.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert made.shape == (len(prompts), PROMPT + TOKENS)

    return call


class _Engine:
    """The engine as a stage server builds it, without the server."""

    def __init__(self, name: str, folder: Path) -> None:
        from omni.v1 import config_pb2
        from stage_server.engines.base import Event, Failed, Finished
        from stage_server.models import text
        from stage_server.models.qwen3_omni import thinker

        spec = config_pb2.StageSpec(checkpoint=str(folder), dtype="float32", max_running=max(BATCHES))
        self._engine = thinker.build(spec) if name == "tiny-omni" else text.build(spec)
        self._left = 0
        self._made = 0
        self._number = 0
        self._done = threading.Event()

        def deliver(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    self._left -= 1
                    self._made += event.usage.completion_tokens
            if self._left == 0:
                self._done.set()

        self._engine.start(deliver)

    def tokens(self, prompts: Prompts) -> None:
        """Runs all prompts at once to their end."""
        from omni.v1 import config_pb2, content_pb2
        from stage_server.engines.base import Run

        sampling = config_pb2.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        self._left, self._made = len(prompts), 0
        self._done.clear()
        for ids in prompts:
            self._number += 1
            prompt = content_pb2.Prompt(token_ids=content_pb2.TokenIds(ids=ids))
            params = config_pb2.StageParams(sampling=sampling)
            self._engine.submit(Run(self._number, f"bench-{self._number}", "", prompt, params))
        if not self._done.wait(120):
            raise TimeoutError("the engine did not finish a turn within 120 s")
        assert self._made == len(prompts) * TOKENS

    def close(self) -> None:
        self._engine.stop()
