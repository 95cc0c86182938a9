"""The speaking half of Qwen3-Omni next to transformers' own generate: what the reference gives, and how it is fed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni.v1 import config_pb2, content_pb2
from stage_server.checkpoint import ASSETS
from stage_server.engines.base import Feed, Run
from stage_server.models.qwen3_omni.processor import PromptReader
from tests.parity.driver import Driver, run_of

TINY_OMNI = ASSETS / "tiny_omni"
LIMITS = config_pb2.MediaLimits(bytes=1 << 20, pixels=256 * 256, parts=4, seconds=5)


def stage(component: str, **engine: Any) -> config_pb2.StageSpec:
    made = config_pb2.StageSpec(
        stage=component,
        model="tiny-omni",
        family="qwen3_omni",
        component=component,
        checkpoint=str(TINY_OMNI),
        dtype="float32",
        max_running=8,
        limits=LIMITS,
    )
    made.engine.update(engine)
    return made


def reference_model() -> Qwen3OmniMoeForConditionalGeneration:
    torch.set_num_threads(1)
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(TINY_OMNI, dtype=torch.float32).eval()


def conversation(*parts: content_pb2.ContentPart | str) -> content_pb2.Prompt:
    content = [content_pb2.ContentPart(text=part) if isinstance(part, str) else part for part in parts]
    message = content_pb2.ChatMessage(role=content_pb2.CHAT_ROLE_USER, content=content)
    return content_pb2.Prompt(conversation=content_pb2.Conversation(messages=[message]))


@dataclass
class Spoken:
    """What transformers makes of a prompt, greedily."""

    tensors: dict[str, torch.Tensor]
    """What the thinker publishes, rows of the whole run."""
    codes: torch.Tensor
    """[frames, groups]"""


def speak(model: Qwen3OmniMoeForConditionalGeneration, prompt: content_pb2.Prompt, words: int, frames: int) -> Spoken:
    """Runs generate for one request of `words` thinker tokens and at most `frames` talker tokens."""
    inputs = PromptReader(TINY_OMNI, LIMITS, 2048, 2048).read(prompt)
    ids = torch.tensor([inputs.ids])
    media = {
        "pixel_values": inputs.pixels,
        "image_grid_thw": inputs.grids,
        "input_features": inputs.mel,
        "feature_attention_mask": inputs.mel_mask,
    }
    kept: dict[str, Any] = {}

    def keep(name: str, call: Any) -> Any:
        def kept_call(*args: Any, **kwargs: Any) -> Any:
            kept[name] = call(*args, **kwargs)
            return kept[name]

        return kept_call

    thinker, talker = model.thinker.generate, model.talker.generate
    model.thinker.generate, model.talker.generate = keep("thinker", thinker), keep("talker", talker)
    try:
        model.generate(
            ids,
            speaker=next(iter(model.config.talker_config.speaker_id)),
            attention_mask=torch.ones_like(ids),
            thinker_max_new_tokens=words,
            thinker_do_sample=False,
            thinker_eos_token_id=None,
            talker_max_new_tokens=frames,
            talker_do_sample=False,
            talker_repetition_penalty=1.05,
            **{name: value for name, value in media.items() if value is not None},
        )
    finally:
        del model.thinker.generate, model.talker.generate
    layers = {"embeds": 0, "hidden": model.config.talker_config.accept_hidden_layer}
    tensors = {
        name: torch.cat([step[layer] for step in kept["thinker"].hidden_states], dim=1)[0]
        for name, layer in layers.items()
    }
    tensors["prompt_ids"] = ids[0]
    if inputs.grids is not None:
        tensors["image_grid_thw"] = inputs.grids
    if inputs.mel_mask is not None:
        tensors["audio_feature_lengths"] = inputs.mel_mask.sum(-1)
    codes = torch.cat([step[-1] for step in kept["talker"].hidden_states if step[-1] is not None])
    return Spoken(tensors, codes)


def talker_run(**sampling: Any) -> Run:
    """A greedy run of the talker with a known number of frames."""
    given = {"temperature": 0.0, "max_tokens": 40, **sampling}
    return replace(run_of(None, tensors=["codes"], **given), sources=(("thinker", ""),))


def feed_text(driver: Driver, run: int, spoken: Spoken, splits: Iterable[int] = ()) -> None:
    """Gives the talker the thinker's rows, cut at `splits`, and the end."""
    total = len(spoken.tensors["embeds"])
    bounds = [0, *splits, total]
    for start, stop in itertools.pairwise(bounds):
        tensors: dict[str, Sequence[torch.Tensor]] = {
            name: [spoken.tensors[name][start:stop]] for name in ("embeds", "hidden")
        }
        if start == 0:
            once = ("prompt_ids", "image_grid_thw", "audio_feature_lengths")
            tensors |= {name: [spoken.tensors[name]] for name in once if name in spoken.tensors}
        driver.engine.feed(run, Feed("thinker", "", tensors=tensors))
    driver.engine.feed(run, Feed("thinker", "", end=True))
