"""Part `data`: what it costs to hand a tensor over on one host, next to memcpy and next to bytes in gRPC messages."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable

import grpc
import torch
import uvloop
from prometheus_client import CollectorRegistry

from omni.rpc.channel import make_channel
from omni.v1 import stage_pb2, stage_pb2_grpc, tensor_pb2
from stage_server.transport.arena import Arena
from stage_server.transport.reader import ArenaDoor, Reader, host_id
from tools.bench import report
from tools.bench.cluster import program

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
TURNS = 5
ARENA = 1 << 30
_SECONDS = 0.15
"""Of work in one turn, at least one call."""


def run() -> list[report.Row]:
    """Rows of this part."""
    torch.set_num_threads(1)
    return uvloop.run(measure())


async def measure() -> list[report.Row]:
    arena = Arena("bench/data/0", 1, ARENA, 600.0)
    address = tensor_pb2.ReplicaAddress(
        replica=arena.owner, epoch=arena.epoch, target="none:0", host_id=host_id(), arena_socket="omni-bench-data"
    )
    rows = [_publish(arena, size) for size in SIZES]
    door = asyncio.create_task(ArenaDoor(arena, address.arena_socket).serve())
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    stage_pb2_grpc.add_StageServiceServicer_to_server(_Owner(arena), server)
    address.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    handles = {size: arena.publish(torch.ones(size, dtype=torch.uint8)) for size in (*SIZES[:4], SIZES[-1])}
    asked = json.dumps(
        {
            "address": address.SerializeToString().hex(),
            "handles": {size: handle.SerializeToString().hex() for size, handle in handles.items() if handle},
        }
    )
    # The other process reads; this one only serves it.
    async with program("tools.bench.data", asked) as line:
        seen = {int(size): each for size, each in json.loads(line).items()}
    door.cancel()
    await server.stop(0)
    reads = {size: each["host"] for size, each in seen.items()}
    smallest, largest = min(reads), max(reads)
    rows.append(
        report.row(
            "data",
            "read in another process, 256 MiB",
            "us",
            reads[largest],
            floor=reads[smallest],
            floor_name="4 KiB",
            at_most=2.0,
        )
    )
    for size, each in seen.items():
        rows.append(
            report.row(
                "data",
                f"hand-over read, {_name(size)}",
                "us",
                each["host"],
                floor=each["grpc"],
                floor_name="bytes in gRPC",
            )
        )
    return rows


class _Owner(stage_pb2_grpc.StageServiceServicer):
    """The Fetch of a stage server over one arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    async def Fetch(self, request, context):
        memory = self._arena.bytes_of(request.handle)
        for start in range(0, memory.numel(), MIB):
            yield stage_pb2.FetchResponse(data=memory[start : start + MIB].numpy().tobytes())


def _publish(arena: Arena, size: int) -> report.Row:
    tensor = torch.ones(size // 4, dtype=torch.float32)
    target = torch.empty_like(tensor)

    def publish() -> None:
        handle = arena.publish(tensor)
        if handle is None:
            raise RuntimeError("the arena is full")
        arena.release(handle.lease)

    def copy() -> None:
        target.copy_(tensor)

    for _ in range(2):  # Both sides' pages are there from now on.
        publish()
        copy()
    mine, theirs = [], []
    for _ in range(TURNS):
        theirs.append(size / _seconds(copy) / 1e9)
        mine.append(size / _seconds(publish) / 1e9)
    bound = 0.85 if size >= 16 * MIB else None
    return report.row(
        "data", f"publish, {_name(size)}", "GB/s", mine, floor=theirs, floor_name="memcpy", at_least=bound
    )


def _seconds(call: Callable[[], None]) -> float:
    """Median time of a call."""
    taken: list[float] = []
    until = time.perf_counter() + _SECONDS
    while not taken or time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def _name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


async def read(asked: str) -> None:
    """The reading process: prints, by size, microseconds of reads through the mapped arena and over gRPC."""
    given = json.loads(asked)
    address = tensor_pb2.ReplicaAddress.FromString(bytes.fromhex(given["address"]))
    reader = Reader(Arena("bench/reader/0", 2, MIB, 600.0), CollectorRegistry())
    found: dict[str, dict[str, list[float]]] = {}
    async with make_channel(address.target) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)
        for size, text in given["handles"].items():
            handle = tensor_pb2.TensorHandle.FromString(bytes.fromhex(text))
            await reader.fetch(handle, address)
            host, wire = [], []
            for _ in range(TURNS):
                host.append(_seconds(lambda handle=handle: _touch(reader, handle)) * 1e6)
                begun = time.perf_counter()
                memory = torch.empty(handle.size, dtype=torch.uint8)
                at = 0
                async for response in stub.Fetch(stage_pb2.FetchRequest(handle=handle)):
                    data = response.data
                    memory[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                    at += len(data)
                wire.append((time.perf_counter() - begun) * 1e6)
            found[size] = {"host": host, "grpc": wire}
    print(json.dumps(found), flush=True)


def _touch(reader: Reader, handle: tensor_pb2.TensorHandle) -> None:
    fetched = reader.at_once(handle)
    if fetched is None:
        raise RuntimeError("the arena is not mapped")
    fetched.tensor[-1].item()
    fetched.check()


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(read(sys.argv[1]))
