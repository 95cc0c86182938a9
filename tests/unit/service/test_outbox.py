"""The outbox: nothing is lost or doubled however outputs come and go, and no message outgrows its bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni.v1 import content_pb2
from stage_server.engines.base import Output
from stage_server.service.outbox import MESSAGE_BYTES, Outbox, Taken

TENSOR_BYTES = 64
LOGPROB = content_pb2.TokenLogprobs(
    sampled=content_pb2.TokenLogprobs.Candidate(token_id=7, text="x" * 500, logprob=-1.5)
)
OUTPUTS = st.builds(
    lambda tokens, text, sizes, rows, width, logprobs: Output(
        1,
        token_ids=tokens,
        text=text,
        logprobs=[LOGPROB] * logprobs,
        media=[content_pb2.MediaPiece(data=bytes(size)) for size in sizes],
        tensors={"rows": torch.ones(rows, width)} if rows else {},
    ),
    st.lists(st.integers(0, 2**32 - 1), max_size=3),
    st.sampled_from(["", "a", "é" * 3, "x" * (MESSAGE_BYTES // 3), "\U0001f600" * (MESSAGE_BYTES // 4)]),
    st.lists(st.integers(0, MESSAGE_BYTES), max_size=4),
    st.integers(0, 9),
    st.integers(1, 2),
    st.sampled_from([0, 1, 60]),
)


def take(outbox: Outbox, tensor_bytes: int = TENSOR_BYTES) -> tuple[Taken, content_pb2.Payload, tuple[int, int]]:
    taken = outbox.look(tensor_bytes)
    payload = content_pb2.Payload()
    taken.fill(payload)
    return taken, payload, outbox.drop(taken)


@given(st.lists(st.tuples(OUTPUTS, st.booleans()), max_size=12))
def test_all_that_goes_in_comes_out_once_in_order_and_in_bounded_messages(steps: list[tuple[Output, bool]]) -> None:
    outbox = Outbox()
    came: list[content_pb2.Payload] = []
    rows = 0
    due = 0

    def next_message() -> None:
        nonlocal rows, due
        taken, payload, (first, count) = take(outbox)
        assert first == due
        assert count >= 1
        due += count
        assert payload.ByteSize() <= taken.wire
        if count > 1:
            assert payload.ByteSize() <= MESSAGE_BYTES
            assert sum(tensor.nbytes for tensor in taken.joined()) <= TENSOR_BYTES
        assert [tensor.shape for tensor in taken.outlines()] == [tensor.shape for tensor in taken.joined()]
        rows += sum(len(tensor) for tensor in taken.joined())
        came.append(payload)

    for output, now in steps:
        outbox.put(output)
        if now:
            next_message()
    while outbox.count:
        next_message()
    put = [output for output, _ in steps]
    assert [token for payload in came for token in payload.token_ids] == [t for output in put for t in output.token_ids]
    assert "".join(payload.text for payload in came) == "".join(output.text for output in put)
    assert sum(len(payload.logprobs) for payload in came) == sum(len(output.logprobs) for output in put)
    assert [len(piece.data) for payload in came for piece in payload.media] == [
        len(piece.data) for output in put for piece in output.media
    ]
    assert rows == sum(len(tensor) for output in put for tensor in output.tensors.values())
    assert due == outbox.made == sum(max(1, len(output.media)) for output in put)
    assert outbox.size == outbox.tensor_bytes == 0


@pytest.mark.parametrize(
    "output",
    [
        Output(1, text="x" * 1000),
        Output(1, token_ids=[2**31] * 300),
        Output(1, logprobs=[LOGPROB] * 2),
        Output(1, tensors={"rows": torch.ones(1, 8)}),
    ],
    ids=["text", "token ids", "log-probabilities", "tensors"],
)
def test_what_waits_is_weighed_whatever_it_is(output: Output) -> None:
    outbox = Outbox()
    outbox.put(output)
    one = outbox.size, outbox.tensor_bytes
    assert one[0] + one[1] >= 288
    outbox.put(output)
    assert (outbox.size, outbox.tensor_bytes) == (2 * one[0], 2 * one[1])


def test_a_larger_output_goes_alone_and_the_small_ones_around_it_join() -> None:
    outbox = Outbox()
    for text in ("a", "b", "x" * 2 * MESSAGE_BYTES, "c", "d"):
        outbox.put(Output(1, text=text))
    spans = []
    while outbox.count:
        spans.append(take(outbox)[2])
    assert spans == [(0, 2), (2, 1), (3, 2)]


def test_tensors_that_cannot_be_joined_go_out_one_after_the_other() -> None:
    outbox = Outbox()
    shapes = [(1, 2), (2, 2), (1, 3), ()]
    for shape in shapes:
        outbox.put(Output(1, tensors={"rows": torch.ones(shape)}))
    came = []
    while outbox.count:
        came += [tuple(tensor.shape) for tensor in take(outbox, 1 << 20)[0].joined()]
    assert came == [(3, 2), (1, 3), ()]


def test_what_waits_keeps_no_more_memory_than_its_own_rows() -> None:
    outbox = Outbox()
    for _ in range(4):
        step = torch.rand(512, 8)
        outbox.put(Output(1, tensors={"rows": step[3:4]}))
    kept = [entry.output.tensors["rows"] for entry in outbox._entries]
    assert all(rows.untyped_storage().nbytes() == rows.nbytes for rows in kept[1:])
    assert outbox.tensor_bytes == 4 * 8 * 4
