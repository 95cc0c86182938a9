"""The outbox: nothing is lost or doubled however outputs join and leave, and media goes in small pieces."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from omni.v1 import content_pb2
from stage_server.engines.base import Output
from stage_server.service.outbox import MEDIA_BYTES, Outbox

OUTPUTS = st.builds(
    lambda tokens, text, sizes, rows: Output(
        1,
        token_ids=tokens,
        text=text,
        media=[content_pb2.MediaPiece(data=bytes(size)) for size in sizes],
        tensors={"rows": torch.ones(rows, 2)} if rows else {},
    ),
    st.lists(st.integers(0, 9), max_size=3),
    st.text(max_size=3),
    st.lists(st.integers(0, MEDIA_BYTES), max_size=4),
    st.integers(0, 3),
)


@given(st.lists(st.tuples(OUTPUTS, st.booleans()), max_size=12))
def test_all_that_goes_in_comes_out_once_and_in_order(steps: list[tuple[Output, bool]]) -> None:
    outbox = Outbox()
    came: list[content_pb2.Payload] = []
    rows = 0
    due = 0

    def take() -> None:
        nonlocal rows, due
        rows += sum(len(tensor) for tensor in outbox.joined_tensors().values())
        payload = content_pb2.Payload()
        first, count = outbox.take(payload)
        assert first == due
        assert count >= 1
        due += count
        assert len(payload.media) <= 1 or sum(len(piece.data) for piece in payload.media) <= MEDIA_BYTES
        came.append(payload)

    for output, now in steps:
        outbox.put(output)
        if now:
            take()
    while outbox.count:
        take()
    put = [output for output, _ in steps]
    assert [token for payload in came for token in payload.token_ids] == [t for output in put for t in output.token_ids]
    assert "".join(payload.text for payload in came) == "".join(output.text for output in put)
    assert [len(piece.data) for payload in came for piece in payload.media] == [
        len(piece.data) for output in put for piece in output.media
    ]
    assert rows == sum(len(tensor) for output in put for tensor in output.tensors.values())
    assert due == outbox.made == sum(max(1, len(output.media)) for output in put)
    assert outbox.size == 0
