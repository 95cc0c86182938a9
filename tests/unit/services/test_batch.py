"""Messages to clients: whatever is pending, none is beyond what a gRPC client takes whose limits nobody has changed."""

from __future__ import annotations

import pytest

from omni.v1 import content_pb2, generate_pb2
from omnid.cluster.batch import SPLIT_BYTES, WriteBatch, split
from omnid.services.clients import StreamClient

DEFAULT_LIMIT = 4 * 1024 * 1024
LARGEST_PIECE = 64 * 1024


@pytest.mark.parametrize(("count", "size"), [(600_000, 0), (30_000, 200), (200, LARGEST_PIECE), (3, SPLIT_BYTES + 1)])
async def test_pending_events_are_cut_into_messages_that_every_client_takes(count: int, size: int) -> None:
    batch = WriteBatch(generate_pb2.OmniServiceAttachResponse)
    clients = [StreamClient(batch, number) for number in range(3)]
    payload = content_pb2.Payload(text="x" * size)
    for index in range(count):
        clients[index % 3].output(index, "a", payload)
    parts = list(split(await batch.take(), "events"))
    assert len(parts) > 1
    assert max(part.ByteSize() for part in parts) <= DEFAULT_LIMIT
    if size <= LARGEST_PIECE:
        assert max(part.ByteSize() for part in parts) <= SPLIT_BYTES
    assert [event.index for part in parts for event in part.events] == list(range(count))


async def test_other_fields_travel_first_and_what_is_small_travels_whole() -> None:
    message = generate_pb2.GenerateResponse()
    message.events.add(index=1)
    assert list(split(message, "events")) == [message]
