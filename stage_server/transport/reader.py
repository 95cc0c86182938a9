"""Reads published tensors by the best path that both ends have: own arena, mapped arena of the host, gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
import xxhash
from prometheus_client import CollectorRegistry, Counter

from omni.rpc import logs
from omni.rpc.channel import make_channel
from omni.rpc.errors import OmniError, Reason
from omni.rpc.tls import ClientTls
from omni.v1 import stage_pb2, stage_pb2_grpc, tensor_pb2
from stage_server.transport import dtypes
from stage_server.transport.arena import Arena, lost, region_bytes
from stage_server.transport.buddy import SMALLEST

_log = logs.get(__name__)

_GREETING = struct.Struct("<QQ")
"""What comes with an arena's descriptor: the owner's epoch and the arena's capacity."""
_MAP_SECONDS = 5.0
_FETCH_SECONDS = 30.0
_FETCH_BYTES_PER_SECOND = 10e6
"""Slowest rate at which a fetch is not given up."""
_LONGEST_FETCH_SECONDS = 3600.0
PIECE_BYTES = 1 << 20
_VERIFY_BYTES = 1 << 20
"""Larger tensors are compared with their checksum on another thread: 0.1 ms a MiB."""


def host_id() -> str:
    """Equal on two processes that can reach each other's abstract sockets: same boot, same network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - a link into nowhere that Path resolves


@dataclass(frozen=True, slots=True)
class Fetched:
    """A published tensor, to be read only, and a check that what was read is sound."""

    tensor: torch.Tensor
    check: Callable[[], None]
    """Raises OmniError TENSOR_LOST when the memory was taken back meanwhile."""


def _sound() -> None:
    """The check of a tensor that is this process's own copy."""


class _Mapping:
    """Another replica's arena in this process's memory, read-only."""

    def __init__(self, epoch: int, capacity: int, descriptor: int) -> None:
        self.epoch = epoch
        self.capacity = capacity
        region = mmap.mmap(descriptor, region_bytes(capacity), prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch knows no read-only tensors, and says so
            self._memory = torch.frombuffer(region, dtype=torch.uint8)[:capacity]
        self._generations = memoryview(region)[capacity:].cast("I")

    def fetch(self, handle: tensor_pb2.TensorHandle) -> Fetched:
        dtype, shape = dtypes.described(handle)
        if handle.offset + handle.size > self.capacity or handle.offset % SMALLEST:
            raise lost(handle)
        at = handle.offset // SMALLEST

        def check() -> None:
            if self._generations[at] != handle.generation:
                raise lost(handle)

        check()
        memory = self._memory[handle.offset : handle.offset + handle.size]
        if handle.HasField("checksum") and handle.size:
            _verify(memory, handle)
        return Fetched(dtypes.view(memory, dtype, shape), check)


class Reader:
    """Owned by the server's event loop."""

    def __init__(self, arena: Arena, registry: CollectorRegistry, tls: ClientTls | None = None) -> None:
        self._arena = arena
        self._host = host_id()
        self._tls = tls
        self._mappings: dict[str, _Mapping] = {}
        """By owner: its newest incarnation that was read from."""
        self._unmappable: set[str] = set()
        """Sockets that have handed out no arena."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._bytes = Counter(
            "omni_fetched_bytes", "Bytes of tensors read from other replicas", ["path"], registry=registry
        )

    def at_once(self, handle: tensor_pb2.TensorHandle) -> Fetched | None:
        """The tensor, when it can be had without waiting.

        Raises:
            OmniError: TENSOR_LOST.
        """
        if handle.owner == self._arena.owner:
            return self._own(handle)
        mapping = self._mapping(handle)
        if mapping is None or _takes_time(handle):
            return None
        fetched = mapping.fetch(handle)
        self._bytes.labels("host").inc(handle.size)
        return fetched

    async def fetch(self, handle: tensor_pb2.TensorHandle, address: tensor_pb2.ReplicaAddress | None = None) -> Fetched:
        """The tensor, by the best path.

        Args:
            handle: of this replica or another one.
            address: where the stream that the handle came on says that its owner is; None: it has not said so.

        Raises:
            OmniError: TENSOR_LOST when it is no longer there, or its owner cannot be reached.
        """
        if address is None and handle.owner != self._arena.owner:
            raise OmniError(Reason.TENSOR_LOST, f"nobody has said how to reach {handle.owner}", replica=handle.owner)
        if address is not None and address.epoch != handle.epoch:
            raise lost(handle)
        if address is not None and self._mappable(address):
            await self._map(address)
        fetched = self.at_once(handle)
        if fetched is not None:
            return fetched
        if address is None:
            raise lost(handle)
        mapping = self._mapping(handle)
        if mapping is None:
            return await self._download(handle, address)
        fetched = await asyncio.to_thread(mapping.fetch, handle)
        self._bytes.labels("host").inc(handle.size)
        return fetched

    def fetched_bytes(self) -> dict[str, int]:
        """Bytes read from other replicas, by path, since the start."""
        [counted] = self._bytes.collect()
        return {
            sample.labels["path"]: int(sample.value) for sample in counted.samples if sample.name.endswith("_total")
        }

    async def close(self) -> None:
        """Closes its connections."""
        for channel in self._channels.values():
            await channel.close()

    def _own(self, handle: tensor_pb2.TensorHandle) -> Fetched:
        dtype, shape = dtypes.described(handle)
        return Fetched(dtypes.view(self._arena.bytes_of(handle), dtype, shape), lambda: _still(self._arena, handle))

    def _mapping(self, handle: tensor_pb2.TensorHandle) -> _Mapping | None:
        mapping = self._mappings.get(handle.owner)
        return mapping if mapping is not None and mapping.epoch == handle.epoch else None

    def _mappable(self, address: tensor_pb2.ReplicaAddress) -> bool:
        mapping = self._mappings.get(address.replica)
        return (
            bool(address.arena_socket)
            and address.host_id == self._host
            and (mapping is None or mapping.epoch != address.epoch)
            and address.arena_socket not in self._unmappable
        )

    async def _map(self, address: tensor_pb2.ReplicaAddress) -> None:
        try:
            mapping = await asyncio.to_thread(_receive_arena, address.arena_socket)
        except (OSError, ValueError) as error:
            _log.warning("arena cannot be mapped", owner=address.replica, error=str(error), instead="gRPC")
            self._unmappable.add(address.arena_socket)
            return
        if mapping.epoch == address.epoch:
            self._mappings[address.replica] = mapping

    async def _download(self, handle: tensor_pb2.TensorHandle, address: tensor_pb2.ReplicaAddress) -> Fetched:
        dtype, shape = dtypes.described(handle)
        channel = self._channels.get(address.target)
        if channel is None:
            channel = self._channels[address.target] = make_channel(address.target, tls=self._tls)
        received = bytearray()  # Grows with what comes: the size is what somebody says.
        timeout = min(_FETCH_SECONDS + handle.size / _FETCH_BYTES_PER_SECOND, _LONGEST_FETCH_SECONDS)
        try:
            call = stage_pb2_grpc.StageServiceStub(channel).Fetch(
                stage_pb2.FetchRequest(handle=handle), timeout=timeout
            )
            async for response in call:
                received += response.data
                if len(received) > handle.size:
                    raise OmniError(Reason.TENSOR_LOST, f"{handle.owner} sent more than the {handle.size} bytes asked")
        except grpc.aio.AioRpcError as error:
            why = OmniError.from_rpc_error(error)
            if why.reason is not Reason.TENSOR_LOST:
                message = f"a tensor of {handle.owner} could not be fetched from {address.target!r}: {why.message}"
                why = OmniError(Reason.TENSOR_LOST, message)
            raise why.located(replica=handle.owner) from error
        if len(received) != handle.size:
            raise OmniError(Reason.TENSOR_LOST, f"{handle.owner} sent {len(received)} bytes of {handle.size}")
        memory = torch.frombuffer(received, dtype=torch.uint8) if received else torch.empty(0, dtype=torch.uint8)
        if _takes_time(handle):
            await asyncio.to_thread(_verify, memory, handle)
        elif handle.HasField("checksum") and handle.size:
            _verify(memory, handle)
        self._bytes.labels("grpc").inc(handle.size)
        return Fetched(dtypes.view(memory, dtype, shape), _sound)


def _still(arena: Arena, handle: tensor_pb2.TensorHandle) -> None:
    arena.bytes_of(handle)


def _takes_time(handle: tensor_pb2.TensorHandle) -> bool:
    """Whether its bytes are to be compared on another thread."""
    return handle.HasField("checksum") and handle.size > _VERIFY_BYTES


def _verify(memory: torch.Tensor, handle: tensor_pb2.TensorHandle) -> None:
    if xxhash.xxh3_64_intdigest(memoryview(memory.numpy())) != handle.checksum:
        raise OmniError(Reason.TENSOR_LOST, f"a tensor of {handle.owner} has another checksum than its handle")


def _receive_arena(name: str) -> _Mapping:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
        connection.settimeout(_MAP_SECONDS)
        connection.connect("\0" + name)
        greeting, descriptors, _, _ = socket.recv_fds(connection, _GREETING.size, 1)
    if not descriptors or len(greeting) != _GREETING.size:
        raise OSError("the owner did not hand out its arena")
    try:
        return _Mapping(*_GREETING.unpack(greeting), descriptors[0])
    finally:
        os.close(descriptors[0])


class ArenaDoor:
    """Hands the arena's descriptor to processes of the same user on this host, through an abstract Unix socket."""

    def __init__(self, arena: Arena, name: str) -> None:
        self._arena = arena
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + name)
        self._listener.listen(64)

    async def serve(self) -> None:
        """Serves until it is cancelled."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(self._listener):
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                with contextlib.closing(connection), contextlib.suppress(OSError):
                    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                    if struct.unpack("3i", credentials)[1] == os.geteuid():
                        greeting = _GREETING.pack(self._arena.epoch, self._arena.capacity)
                        socket.send_fds(connection, [greeting], [self._arena.descriptor])
