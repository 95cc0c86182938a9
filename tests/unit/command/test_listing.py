"""What ``omnid ps`` shows of a replica's data."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from omni.v1 import cluster_pb2, stage_pb2
from omnid import listing


def shown(*replicas: cluster_pb2.ReplicaStatus) -> list[list[str]]:
    """The cells of the table of data, its head aside."""
    page = io.StringIO()
    Console(width=200, file=page).print(listing.data(replicas))
    lines = page.getvalue().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


def test_a_replica_shows_its_arena_its_leases_and_what_it_read() -> None:
    arena = stage_pb2.ArenaLoad(
        capacity_bytes=72 << 20,
        used_bytes=1536,
        leases=3,
        oldest_lease_seconds=12.34,
        released_leases=40,
        dropped_leases=5,
        expired_leases=6,
    )
    load = stage_pb2.ReplicaLoad(arena=arena, fetched_bytes={"host": 3 << 30, "grpc": 17})
    replica = cluster_pb2.ReplicaStatus(model="m", stage="s", index=2, load=load)
    assert shown(replica) == [
        ["m/s/2", "72 MiB", "1.5 KiB", "3", "12.3 s", "40", "5", "6", "grpc 17 B, host 3 GiB"],
    ]


def test_a_replica_that_is_absent_or_holds_nothing_has_no_oldest_lease() -> None:
    [cells] = shown(cluster_pb2.ReplicaStatus(model="m", stage="s"))
    assert cells == ["m/s/0", "0 B", "0 B", "0", "", "0", "0", "0", ""]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (5 << 50, "5120 TiB")],
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert listing.size(count) == text
