"""Loads single parts of a Qwen3-Omni checkpoint in transformers' standard layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference

from stage_server.checkpoint import DTYPES, readable, refused
from stage_server.device import device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from omni.v1 import config_pb2

_PARTS = {
    "thinker": reference.Qwen3OmniMoeThinkerForConditionalGeneration,
    "talker": reference.Qwen3OmniMoeTalkerForConditionalGeneration,
    "code2wav": reference.Qwen3OmniMoeCode2Wav,
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_config(folder: Path) -> Qwen3OmniMoeConfig:
    """The checkpoint's configuration.

    Raises:
        OmniError: there is none, or it is of another family.
    """
    path = folder / "config.json"
    with readable(path):
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    if kind != Qwen3OmniMoeConfig.model_type:
        raise refused(f"{folder} is of type {kind!r}, this stage takes {Qwen3OmniMoeConfig.model_type!r}")
    return Qwen3OmniMoeConfig.from_pretrained(folder)


def load_part(spec: config_pb2.StageSpec, folder: Path, part: str) -> PreTrainedModel:
    """One part, "thinker", "talker" or "code2wav", on this process's device, in the spec's dtype; nothing else of the
    checkpoint is read.

    Raises:
        OmniError: its weights are not all there.
    """
    dtype = DTYPES.get(spec.dtype, "auto")
    model, found = _shell(part).from_pretrained(folder, dtype=dtype, output_loading_info=True, use_safetensors=True)
    missing = sorted(found["missing_keys"])
    if missing:
        raise refused(f"{folder} lacks {len(missing)} tensors of the {part}, the first is {missing[0]}")
    loaded: PreTrainedModel = getattr(model, part)
    return loaded.to(device()).eval()


def _shell(part: str) -> type[PreTrainedModel]:
    """The whole model's class with one part in it, so that names and conversions of weights are the whole model's."""

    class Shell(reference.Qwen3OmniMoePreTrainedModel):
        config_class = Qwen3OmniMoeConfig
        _keys_to_ignore_on_load_unexpected = (rf"^(?!{part}\.)",)

        def __init__(self, config: Qwen3OmniMoeConfig) -> None:
            super().__init__(config)
            setattr(self, part, _PARTS[part]._from_config(getattr(config, f"{part}_config")))
            self.post_init()

        @classmethod
        def is_custom_code(cls) -> bool:
            return False

    return Shell


def read_rows(folder: Path, name: str, rows: Sequence[int]) -> torch.Tensor:
    """Some rows [n, ...] of one stored tensor, without reading the others.

    Raises:
        OmniError: the checkpoint does not hold it.
    """
    index = folder / INDEX
    with readable(folder):
        file = json.loads(index.read_text(encoding="utf-8"))["weight_map"][name] if index.exists() else SINGLE
        with safe_open(folder / file, framework="pt") as weights:
            stored = weights.get_slice(name)
            return torch.cat([stored[row : row + 1] for row in rows])
