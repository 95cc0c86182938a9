"""Where a stage server finds the checkpoint that its spec names."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni.rpc.errors import OmniError
from omni.v1 import config_pb2
from stage_server.checkpoint import ASSETS, located


def test_a_shipped_model_is_found_by_its_name_and_a_folder_by_its_path(tmp_path: Path) -> None:
    assert located(config_pb2.StageSpec(checkpoint="asset:tiny_omni")).checkpoint == str(ASSETS / "tiny_omni")
    assert located(config_pb2.StageSpec(checkpoint=str(tmp_path))).checkpoint == str(tmp_path)
    assert not located(config_pb2.StageSpec()).checkpoint


@pytest.mark.parametrize("name", ["tiny_omn", "", "../assets/tiny_omni", "/tmp", "tiny_omni/README.md"])
def test_a_name_that_is_none_of_the_shipped_models_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(OmniError, match=f"there is no asset {name!r}; there are tiny_image, tiny_omni"):
        located(config_pb2.StageSpec(checkpoint=f"asset:{name}"))
