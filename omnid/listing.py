"""What ``omnid ps`` shows: one row a replica."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from omni.v1 import cluster_pb2, stage_pb2


def work(replicas: Sequence[cluster_pb2.ReplicaStatus]) -> Table:
    """States and load."""
    table = Table("replica", "state", "running", "waiting", "runs", "steps", "arena", "leases", "address", "pid")
    for each in replicas:
        state = stage_pb2.ReplicaState.Name(each.load.state).removeprefix("REPLICA_STATE_").lower()
        arena = each.load.arena
        table.add_row(
            _name(each),
            (state if each.HasField("address") else "absent") + (f": {each.load.detail}" if each.load.detail else ""),
            str(each.load.running),
            str(each.load.waiting),
            str(each.runs),
            str(each.load.steps),
            f"{arena.used_bytes >> 10}/{arena.capacity_bytes >> 10} KiB",
            str(arena.leases),
            each.address.target,
            str(each.pid or ""),
        )
    return table


def data(replicas: Sequence[cluster_pb2.ReplicaStatus]) -> Table:
    """What each has published and nobody gave back, how its leases ended, and what it read of others, by path."""
    table = Table("replica", "capacity", "used", "leases", "oldest", "released", "dropped", "expired", "fetched")
    for each in replicas:
        arena = each.load.arena
        fetched = each.load.fetched_bytes
        table.add_row(
            _name(each),
            size(arena.capacity_bytes),
            size(arena.used_bytes),
            str(arena.leases),
            f"{arena.oldest_lease_seconds:.1f} s" if arena.leases else "",
            str(arena.released_leases),
            str(arena.dropped_leases),
            str(arena.expired_leases),
            ", ".join(f"{path} {size(fetched[path])}" for path in sorted(fetched)),
        )
    return table


def size(count: int) -> str:
    """A number of bytes for people: "3 B", "1.5 KiB", "64 MiB"."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{round(amount, 1):.15g} {unit}"


def _name(replica: cluster_pb2.ReplicaStatus) -> str:
    return f"{replica.model}/{replica.stage}/{replica.index}"
