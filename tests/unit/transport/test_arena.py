"""The arena: what is published stays until it is released, and memory that was taken back is noticed."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni.rpc.errors import OmniError, Reason
from omni.v1 import tensor_pb2
from stage_server.transport import dtypes
from stage_server.transport.arena import RESERVE, RESERVED_PIECES, Arena, Holder
from stage_server.transport.buddy import SMALLEST, Buddy

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 20000), st.integers(0, 50)), max_size=80))
def test_blocks_never_overlap_and_come_back_to_one(steps: list[tuple[int, int]]) -> None:
    buddy = Buddy(1 << 16)
    live: list[tuple[int, int]] = []
    for size, pick in steps:
        offset = buddy.allocate(size)
        if offset is not None:
            span = 1 << Buddy.order(size)
            assert offset % span == 0
            assert offset + span <= buddy.capacity
            assert all(offset + span <= o or o + (1 << Buddy.order(s)) <= offset for o, s in live)
            live.append((offset, size))
        if live and pick % 2:
            buddy.free(*live.pop(pick % len(live)))
        assert buddy.used == sum(1 << Buddy.order(size) for _, size in live)
    for each in live:
        buddy.free(*each)
    assert buddy.used == 0
    assert buddy.allocate(buddy.capacity) == 0


@pytest.mark.parametrize("capacity", [0, SMALLEST - 1, SMALLEST + 1, 1000])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Buddy(capacity)


@pytest.fixture
def arena():
    made = Arena("m/s/0", 7, MIB, 60.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(2, 3, 4).to(torch.bfloat16),
        torch.arange(7),
        torch.tensor([True, False]),
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros(0, 4),
        torch.randn(6, 4).t(),
    ],
    ids=["float32", "bfloat16", "int64", "bool", "scalar", "empty", "strided"],
)
def test_a_tensor_comes_back_as_it_was(arena: Arena, tensor: torch.Tensor) -> None:
    handle = arena.publish(tensor)
    assert handle is not None
    dtype, shape = dtypes.described(handle)
    assert torch.equal(dtypes.view(arena.bytes_of(handle), dtype, shape), tensor)


def test_a_full_arena_publishes_nothing_until_there_is_room(arena: Arena) -> None:
    told: list[int] = []
    arena.on_room = lambda: told.append(1)
    half = torch.zeros(MIB // 2, dtype=torch.uint8)
    first, second = arena.publish(half), arena.publish(half)
    assert first is not None
    assert second is not None
    assert arena.publish(half) is None
    assert arena.reserve([torch.zeros(4), half]) is None
    assert arena.load().leases == 2
    arena.release(first.lease)
    assert told == [1]
    assert arena.publish(half) is not None


@given(st.lists(st.tuples(st.integers(8, 12), st.booleans()), max_size=200), st.integers(8, 15))
def test_each_tensor_spoils_no_more_blocks_of_a_size_than_it_fills(made: list[tuple[int, bool]], order: int) -> None:
    buddy = Buddy(1 << 16)
    live = [(offset, size, kept) for size, kept in made if (offset := buddy.allocate(1 << size)) is not None]
    for offset, size, kept in live:
        if not kept:
            buddy.free(offset, 1 << size)
    spoiled = sum(1 << max(0, size - order) for _, size, kept in live if kept)
    for _ in range((1 << 16 >> order) - spoiled):
        assert buddy.allocate(1 << order) is not None


def fill(arena: Arena, holder: Holder | None = None) -> None:
    """Leaves no room in what all share."""
    size = arena.largest
    while size >= SMALLEST:
        while arena.publish(torch.empty(size, dtype=torch.uint8), holder) is not None:
            pass
        size //= 2


def test_in_a_full_arena_only_those_that_a_reader_waits_for_publish(arena: Arena) -> None:
    new, behind, waited_for = Holder(), Holder(), Holder()
    small = torch.zeros(MIB // RESERVE // RESERVED_PIECES, dtype=torch.uint8)
    read = [arena.publish(small, holder) for holder in (behind, waited_for)]
    arena.publish(small, behind)
    for handle in read:
        assert handle is not None
        arena.release(handle.lease)
    fill(arena)
    assert arena.publish(small, new) is None
    assert arena.publish(small, behind) is None
    assert arena.publish(torch.zeros(small.numel() + 1, dtype=torch.uint8), waited_for) is None
    ones = torch.ones_like(small)
    handle = arena.publish(ones, waited_for)
    assert handle is not None
    assert torch.equal(arena.bytes_of(handle), ones)
    assert arena.publish(small, waited_for) is None
    arena.release(handle.lease)
    assert arena.publish(small, waited_for) is not None


def test_the_reserve_has_room_for_as_many_as_it_promises_whatever_their_sizes(arena: Arena) -> None:
    holders = [Holder() for _ in range(RESERVED_PIECES)]
    for holder in holders:
        handle = arena.publish(torch.zeros(1), holder)
        assert handle is not None
        arena.release(handle.lease)
    fill(arena)
    piece = MIB // RESERVE // RESERVED_PIECES
    for number, holder in enumerate(holders):
        assert arena.publish(torch.zeros(piece if number % 2 else 1, dtype=torch.uint8), holder) is not None
    assert arena.load().used_bytes <= arena.load().capacity_bytes == arena.capacity
    for holder in holders:
        arena.release_all(holder)
    assert arena.load().used_bytes == arena.largest


def test_what_was_given_up_for_want_of_room_is_not_taken_for_read(arena: Arena) -> None:
    holder = Holder()
    arena.publish(torch.zeros(MIB // 2, dtype=torch.uint8))
    assert arena.reserve([torch.zeros(8), torch.zeros(MIB // 2, dtype=torch.uint8)], holder) is None
    fill(arena)
    assert arena.publish(torch.zeros(8), holder) is None


def test_ends_of_leases_are_counted_by_their_cause() -> None:
    arena = Arena("m/s/0", 7, MIB, 0.0)
    whole = Holder()
    part = Holder(whole)
    read = arena.publish(torch.zeros(8), part)
    assert read is not None
    arena.release(read.lease)
    arena.release(read.lease)
    for holder in (part, whole):
        arena.publish(torch.zeros(8), holder)
    arena.release_all(whole)
    assert not part.leases
    arena.publish(torch.zeros(8), part)
    arena.expire()
    assert not whole.leases
    load = arena.load()
    assert (load.released_leases, load.dropped_leases, load.expired_leases, load.leases) == (1, 2, 1, 0)
    arena.close()


def test_a_tensor_that_could_never_fit_is_an_error(arena: Arena) -> None:
    with pytest.raises(OmniError, match="raise `arena` of its stage") as refused:
        arena.publish(torch.zeros(MIB + 1, dtype=torch.uint8))
    assert refused.value.reason is Reason.ARENA_FULL


def test_a_holder_releases_all_of_its_own_and_nothing_else(arena: Arena) -> None:
    one, other = Holder(), Holder()
    for _ in range(3):
        arena.publish(torch.zeros(8), one)
    kept = arena.publish(torch.zeros(8), other)
    assert kept is not None
    arena.release_all(one)
    assert not one.leases
    assert other.leases == {kept.lease}
    arena.release_all(other)
    assert arena.load().used_bytes == 0


async def test_memory_is_given_to_nobody_else_while_it_is_filled(arena: Arena) -> None:
    tensor = torch.ones(MIB, dtype=torch.uint8)
    holder = Holder()
    handles = arena.reserve([tensor], holder)
    assert handles is not None
    begun, go = threading.Event(), threading.Event()
    copy = arena.copy

    def slow_copy(tensor: torch.Tensor, handle: tensor_pb2.TensorHandle) -> None:
        begun.set()
        assert go.wait(10)
        copy(tensor, handle)

    arena.copy = slow_copy  # type: ignore[method-assign]
    filling = asyncio.create_task(arena.fill([tensor], handles))
    assert await asyncio.to_thread(begun.wait, 10)
    arena.release_all(holder)
    filling.cancel()
    assert arena.load().leases == 0
    assert arena.reserve([tensor]) is None
    room = asyncio.get_running_loop().create_future()
    arena.on_room = lambda: room.set_result(arena.load().used_bytes)
    go.set()
    assert await asyncio.wait_for(room, 10) == 0


async def test_a_slot_whose_lease_has_ended_while_it_was_filled_is_not_for_use(arena: Arena) -> None:
    kept, ended = arena.reserve([torch.zeros(8)]), arena.reserve([torch.zeros(8)])
    assert kept is not None
    assert ended is not None
    assert await arena.fill([torch.ones(8)], kept)
    filling = asyncio.create_task(arena.fill([torch.ones(8)], ended))
    await asyncio.sleep(0)
    arena.release(ended[0].lease)
    assert not await filling
    assert not await arena.fill([torch.ones(8)], ended)


def test_a_lease_is_released_once(arena: Arena) -> None:
    handle = arena.publish(torch.zeros(8))
    assert handle is not None
    arena.release(handle.lease)
    arena.release(handle.lease)
    arena.release(12345)
    assert arena.load().used_bytes == 0


@pytest.mark.parametrize(
    "change",
    [{"lease": 1}, {"epoch": 8}, {"owner": "m/s/1"}, {"offset": 256}, {"size": 4}],
    ids=lambda change: next(iter(change)),
)
def test_a_handle_that_was_tampered_with_opens_nothing(arena: Arena, change: dict[str, int]) -> None:
    handle = arena.publish(torch.zeros(8))
    forged = tensor_pb2.TensorHandle()
    forged.CopyFrom(handle)
    for name, value in change.items():
        setattr(forged, name, value)
    with pytest.raises(OmniError) as refused:
        arena.bytes_of(forged)
    assert refused.value.reason is Reason.TENSOR_LOST


def test_memory_that_is_used_again_has_another_generation(arena: Arena) -> None:
    first = arena.publish(torch.zeros(8))
    assert first is not None
    arena.release(first.lease)
    second = arena.publish(torch.zeros(8))
    assert second is not None
    assert second.offset == first.offset
    assert second.generation != first.generation
    assert second.lease != first.lease


def test_what_outlives_its_lease_is_taken_back() -> None:
    arena = Arena("m/s/0", 7, MIB, 0.0)
    assert arena.publish(torch.zeros(8)) is not None
    assert arena.expire() is None
    assert arena.load().used_bytes == 0
    arena.close()


def test_checksums_are_those_of_the_bytes() -> None:
    arena = Arena("m/s/0", 7, MIB, 60.0, checksum=True)
    one, same, other = (arena.publish(tensor) for tensor in (torch.ones(9), torch.ones(9), torch.zeros(9)))
    assert one is not None
    assert same is not None
    assert other is not None
    assert one.checksum == same.checksum != other.checksum
    arena.close()
