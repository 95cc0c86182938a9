"""Readers: the same tensor by every path, and never data that is no longer there."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry

from omni.rpc.errors import OmniError, Reason
from omni.rpc.server import make_server
from omni.v1 import stage_pb2_grpc, tensor_pb2
from stage_server.service.servicer import StageServicer
from stage_server.transport import reader as transport_reader
from stage_server.transport.arena import Arena
from stage_server.transport.reader import ArenaDoor, Reader, host_id

MIB = 1 << 20


class Owner:
    """An arena, its door, and its Fetch on a loopback port."""

    def __init__(self, name: str, *, checksum: bool) -> None:
        self.arena = Arena(name, 7, 16 * MIB, 60.0, checksum=checksum)
        self.address = tensor_pb2.ReplicaAddress(
            replica=name, epoch=7, host_id=host_id(), arena_socket=f"omni-test-{id(self)}"
        )


@pytest.fixture
async def owner(request: pytest.FixtureRequest) -> AsyncIterator[Owner]:
    """An owner; with a true parameter one whose handles carry checksums."""
    made = Owner("m/s/0", checksum=getattr(request, "param", False))
    server = make_server(registry=CollectorRegistry())
    servicer = StageServicer()
    servicer.host = SimpleNamespace(arena=made.arena)  # Fetch needs no more of it
    server.add(stage_pb2_grpc.add_StageServiceServicer_to_server, servicer)
    made.address.target = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    door = asyncio.create_task(ArenaDoor(made.arena, made.address.arena_socket).serve())
    yield made
    door.cancel()
    await asyncio.gather(door, return_exceptions=True)
    await server.stop(0)
    made.arena.close()


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    arena = Arena("m/t/0", 9, MIB, 60.0)
    made = Reader(arena, CollectorRegistry())
    yield made
    await made.close()
    arena.close()


async def test_a_replica_reads_its_own_tensors_in_place(owner: Owner) -> None:
    tensor = torch.randn(4, 4)
    handle = owner.arena.publish(tensor)
    fetched = Reader(owner.arena, CollectorRegistry()).at_once(handle)
    assert fetched is not None
    assert torch.equal(fetched.tensor, tensor)
    owner.arena.release(handle.lease)
    with pytest.raises(OmniError):
        fetched.check()


async def test_the_second_read_of_a_mapped_arena_waits_for_nothing(owner: Owner, reader: Reader) -> None:
    tensor = torch.randn(100, 3)
    handle = owner.arena.publish(tensor)
    assert reader.at_once(handle) is None
    assert torch.equal((await reader.fetch(handle, owner.address)).tensor, tensor)
    again = reader.at_once(handle)
    assert again is not None
    assert torch.equal(again.tensor, tensor)


async def test_memory_that_was_taken_back_is_noticed_before_and_after_a_read(owner: Owner, reader: Reader) -> None:
    handle = owner.arena.publish(torch.ones(8))
    fetched = await reader.fetch(handle, owner.address)
    fetched.check()
    owner.arena.release(handle.lease)
    with pytest.raises(OmniError) as lost:
        fetched.check()
    assert lost.value.reason is Reason.TENSOR_LOST
    with pytest.raises(OmniError):
        reader.at_once(handle)


@pytest.mark.parametrize("change", [{"arena_socket": ""}, {"host_id": "elsewhere"}, {"arena_socket": "omni-nobody"}])
async def test_what_cannot_be_mapped_comes_over_grpc(owner: Owner, reader: Reader, change: dict[str, str]) -> None:
    tensor = torch.randn(3 * MIB // 4 + 5)
    handle = owner.arena.publish(tensor)
    for name, value in change.items():
        setattr(owner.address, name, value)
    assert torch.equal((await reader.fetch(handle, owner.address)).tensor, tensor)
    owner.arena.release(handle.lease)
    with pytest.raises(OmniError) as lost:
        await reader.fetch(handle, owner.address)
    assert lost.value.reason is Reason.TENSOR_LOST


async def test_a_handle_of_an_earlier_incarnation_is_lost(owner: Owner, reader: Reader) -> None:
    handle = owner.arena.publish(torch.ones(8))
    handle.epoch = 6
    with pytest.raises(OmniError) as lost:
        await reader.fetch(handle, owner.address)
    assert lost.value.reason is Reason.TENSOR_LOST


@pytest.mark.parametrize("change", [{"epoch": 9}, {"epoch": 9, "arena_socket": "omni-nobody"}, {"target": ""}])
async def test_a_false_address_on_one_stream_spoils_no_handle_of_another(
    owner: Owner, reader: Reader, change: dict[str, int | str]
) -> None:
    handle = owner.arena.publish(torch.ones(8))
    await reader.fetch(handle, owner.address)
    false, wrong = tensor_pb2.ReplicaAddress(), tensor_pb2.TensorHandle()
    false.CopyFrom(owner.address)
    wrong.CopyFrom(handle)
    for name, value in change.items():
        setattr(false, name, value)
    wrong.epoch, wrong.lease = false.epoch, 5
    with contextlib.suppress(OmniError):
        await reader.fetch(wrong, false)
    assert torch.equal((await reader.fetch(handle, owner.address)).tensor, torch.ones(8))


async def test_what_an_owner_says_of_its_size_is_not_believed(owner: Owner, reader: Reader) -> None:
    handle = owner.arena.publish(torch.ones(8))
    owner.address.arena_socket = ""
    for size in (2**40, 2**62):
        handle.size = handle.shape[0] = size
        handle.dtype = tensor_pb2.ELEMENT_TYPE_UINT8
        with pytest.raises(OmniError) as lost:
            await reader.fetch(handle, owner.address)
        assert lost.value.reason is Reason.TENSOR_LOST


async def test_an_owner_that_nobody_introduced_is_named(reader: Reader) -> None:
    handle = tensor_pb2.TensorHandle(owner="m/x/0", epoch=1, lease=1, size=4, shape=[1], dtype=8)
    with pytest.raises(OmniError, match="m/x/0"):
        await reader.fetch(handle)


async def test_a_broken_handle_is_an_error_and_no_crash(owner: Owner, reader: Reader) -> None:
    handle = owner.arena.publish(torch.ones(8))
    await reader.fetch(handle, owner.address)
    for name, value in (("size", 1 << 40), ("offset", 1 << 40), ("offset", 3)):
        broken = tensor_pb2.TensorHandle()
        broken.CopyFrom(handle)
        setattr(broken, name, value)
        with pytest.raises(OmniError):
            reader.at_once(broken)


READING = """
import asyncio, os, signal, sys
from prometheus_client import CollectorRegistry
from omni.v1 import tensor_pb2
from stage_server.transport.arena import Arena
from stage_server.transport.reader import Reader
address, handle = (kind.FromString(bytes.fromhex(text)) for kind, text in
    zip((tensor_pb2.ReplicaAddress, tensor_pb2.TensorHandle), sys.argv[1:]))
async def main():
    reader = Reader(Arena("m/r/0", 1, 1 << 20, 60.0), CollectorRegistry())
    print(float((await reader.fetch(handle, address)).tensor.sum()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_a_reader_that_is_killed_leaves_its_owner_as_it_was(owner: Owner) -> None:
    handle = owner.arena.publish(torch.ones(1000))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READING, owner.address.SerializeToString().hex(), handle.SerializeToString().hex()),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert float(said) == 1000.0
    assert process.returncode == -9
    owner.arena.release(handle.lease)
    assert owner.arena.load().used_bytes == 0
    assert owner.arena.publish(torch.ones(1000)) is not None


async def test_bytes_are_counted_by_the_path_that_they_came_by(owner: Owner, reader: Reader) -> None:
    handle = owner.arena.publish(torch.ones(1000))
    assert reader.fetched_bytes() == {}
    for _ in range(2):
        await reader.fetch(handle, owner.address)
    owner.address.epoch = handle.epoch = 8  # Another incarnation, whose arena cannot be mapped.
    owner.address.arena_socket, owner.arena.epoch = "", 8
    await reader.fetch(handle, owner.address)
    assert reader.fetched_bytes() == {"host": 8000, "grpc": 4000}


@pytest.mark.parametrize("owner", [True], ids=["checksum"], indirect=True)
@pytest.mark.parametrize("size", [8, 8 * MIB], ids=["small", "large"])
@pytest.mark.parametrize("path", ["host", "grpc"])
async def test_bytes_that_are_not_those_of_the_checksum_are_never_read(
    owner: Owner, reader: Reader, path: str, size: int
) -> None:
    if path == "grpc":
        owner.address.arena_socket = ""
    tensor = torch.ones(size, dtype=torch.uint8)
    handle = owner.arena.publish(tensor)
    assert torch.equal((await reader.fetch(handle, owner.address)).tensor, tensor)
    owner.arena.bytes_of(handle)[size // 2] = 0
    with pytest.raises(OmniError, match="another checksum") as lost:
        await reader.fetch(handle, owner.address)
    assert lost.value.reason is Reason.TENSOR_LOST
    assert sum(reader.fetched_bytes().values()) == size


@pytest.mark.parametrize("owner", [True], ids=["checksum"], indirect=True)
@pytest.mark.parametrize("path", ["host", "grpc"])
async def test_a_large_tensor_is_compared_with_its_checksum_while_the_loop_goes_on(
    owner: Owner, reader: Reader, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "grpc":
        owner.address.arena_socket = ""
    await reader.fetch(owner.arena.publish(torch.ones(1)), owner.address)
    handle = owner.arena.publish(torch.ones(2 * MIB))
    begun, go = threading.Event(), threading.Event()
    verify = transport_reader._verify

    def slow_verify(memory: torch.Tensor, handle: tensor_pb2.TensorHandle) -> None:
        begun.set()
        assert go.wait(10)
        verify(memory, handle)

    monkeypatch.setattr(transport_reader, "_verify", slow_verify)
    assert reader.at_once(handle) is None
    reading = asyncio.create_task(reader.fetch(handle, owner.address))
    assert await asyncio.to_thread(begun.wait, 10)
    go.set()
    assert torch.equal((await reading).tensor, torch.ones(2 * MIB))
