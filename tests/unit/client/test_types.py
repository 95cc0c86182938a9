"""What a client gives is checked before it is sent; what it gets is put together by artifact."""

from __future__ import annotations

from typing import Any

import pytest

from omni.rpc.errors import InvalidArgumentError
from omni.v1 import content_pb2
from omnid.client.types import Generation, Output, request


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"model": 5}, "model", "must be a name, got 5"),
        ({"prompt": None}, "prompt", "must be a text or a list of ChatMessage"),
        ({"prompt": [{"role": "user"}]}, "prompt", "must be a text or a list of ChatMessage"),
        ({"outputs": "text"}, "outputs", "must be a list of any of text, image, audio"),
        ({"model": "\ud800"}, "model", "must be a name, got '\\ud800'"),
        ({"prompt": "\ud800"}, "prompt", "must be a text or a list of ChatMessage"),
        ({"params": {"\ud800": {}}}, "params", "must be a mapping of stages to mappings"),
        ({"outputs": 5}, "outputs", "must be a list of any of text, image, audio"),
        ({"outputs": [["text"]]}, "outputs", "must be a list of any of text, image, audio"),
        ({"outputs": ["smell"]}, "outputs", "'smell' is none of text, image, audio"),
        ({"params": {"thinker": 5}}, "params", "must be a mapping of stages to mappings"),
        ({"params": {"thinker": {"samplin": {}}}}, 'params["thinker"]', "samplin"),
        ({"params": {"thinker": {"sampling": {"temperatur": 1}}}}, 'params["thinker"]', "temperature"),
        ({"timeout": float("nan")}, "timeout", "must be a number of seconds"),
        ({"timeout": float("inf")}, "timeout", "must be a number of seconds"),
        ({"timeout": -1}, "timeout", "must be a number of seconds"),
        ({"timeout": "5"}, "timeout", "must be a number of seconds"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(change: dict[str, Any], field: str, says: str) -> None:
    given: dict[str, Any] = {"model": "m", "prompt": "hi", "outputs": (), "params": {}, "timeout": None} | change
    with pytest.raises(InvalidArgumentError) as caught:
        request(**given)
    assert caught.value.fields[0].field == field
    assert says in str(caught.value)


def test_pieces_of_artifacts_may_come_in_any_order() -> None:
    def piece(artifact: int, data: bytes) -> content_pb2.MediaPiece:
        return content_pb2.MediaPiece(modality=content_pb2.MODALITY_IMAGE, artifact=artifact, data=data)

    made = Generation()
    for artifact, data in ((1, b"b"), (0, b"a"), (1, b"B"), (0, b"A")):
        made.take(Output("dit", media=(piece(artifact, data),)))
    assert [bytes(each.data) for each in made.artifacts] == [b"bB", b"aA"]
