"""A checkpoint that cannot be loaded is refused with its folder and what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni.rpc.errors import OmniError, Reason
from omni.v1 import config_pb2
from stage_server import models
from stage_server.checkpoint import WEIGHTS, readable, require

PARTS = ("thinker", "talker", "code2wav")


def spec_of(folder: Path, component: str) -> config_pb2.StageSpec:
    return config_pb2.StageSpec(
        family="qwen3_omni", component=component, checkpoint=str(folder), dtype="auto", max_running=1
    )


def refusal(folder: Path, component: str) -> str:
    with pytest.raises(OmniError) as refused:
        models.build(spec_of(folder, component)).start(lambda _events: None)
    assert refused.value.reason is Reason.BAD_REQUEST
    assert refused.value.fields[0].field == "checkpoint"
    return refused.value.message


@pytest.mark.parametrize("part", PARTS)
def test_an_empty_folder_is_refused_with_all_that_the_stage_reads(tmp_path: Path, part: str) -> None:
    message = refusal(tmp_path, part)
    assert f"{tmp_path} is not a whole checkpoint" in message
    assert "lacks config.json, *.safetensors" in message


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("config", "says"),
    [("{", "config.json cannot be loaded"), ('{"model_type": "llama"}', "is of type 'llama', this stage takes")],
)
def test_another_models_folder_is_refused_by_its_type(tmp_path: Path, part: str, config: str, says: str) -> None:
    for name in ("model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(config)
    message = refusal(tmp_path, part)
    assert str(tmp_path) in message
    assert says in message


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(OmniError, match=r"lacks model-2\.safetensors$"):
        require(tmp_path, WEIGHTS)
    (tmp_path / "model-2.safetensors").touch()
    require(tmp_path, WEIGHTS)
    index.write_text("[]")
    with pytest.raises(OmniError, match=f"{index} cannot be loaded"):
        require(tmp_path, WEIGHTS)


def test_whatever_a_library_raises_over_a_folder_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OmniError, match=f"{tmp_path} cannot be loaded: ZeroDivisionError"), readable(tmp_path):
        raise ZeroDivisionError
