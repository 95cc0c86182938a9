"""Part `control`: what a token costs on its way through omnid, next to a bare relay of the same shape."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import uvloop

from omni.rpc.channel import make_channel
from omni.v1 import cluster_pb2, cluster_pb2_grpc
from tools.bench import load, report
from tools.bench.cluster import HERE, omnid, program

TURNS = 3
SECONDS = 1.5
"""Of load in each turn."""
PACES = {1: 50.0, 16: 50.0, 64: 50.0, 256: 40.0, 1024: 20.0}
"""Tokens a second and run at which latency is measured on Attach: well below what either side carries."""
STREAM_PACES = {1: 50.0, 16: 50.0, 64: 40.0, 256: 10.0}
"""The same on Generate."""
RAMP = (25e3, 50e3, 75e3, 100e3, 125e3, 150e3, 200e3)
"""Offered tokens a second, rising until less than `SUSTAINED` of it arrives."""
SUSTAINED = 0.95


async def sustained(target: load.Target, drive: load.Drive, runs: int, ramp: tuple[float, ...]) -> float:
    """The highest rate that arrived while nearly all that was offered did; at least the lowest rung's."""
    best = 0.0
    for offered in ramp:
        rate = offered / runs
        sample = await drive(target, runs, rate, max(2, round(rate * SECONDS)))
        best = max(best, sample.delivered)
        if sample.delivered < SUSTAINED * offered:
            break
    return best


@dataclass(frozen=True, slots=True)
class Pair:
    """A coordinator or the bare relay, and the stage server or bare source behind it."""

    relay: load.Target
    stage: load.Target


@contextlib.asynccontextmanager
async def both() -> AsyncIterator[tuple[Pair, Pair]]:
    """Omnid with a synthetic stage, and the bare relay with the bare source."""
    async with contextlib.AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(omnid(HERE / "load.yaml"))
        source = await stack.enter_async_context(program("tools.bench.bare", "source"))
        relay = await stack.enter_async_context(program("tools.bench.bare", "relay", f"127.0.0.1:{source}"))
        async with make_channel(coordinator) as channel:
            listed = await cluster_pb2_grpc.ClusterServiceStub(channel).ListReplicas(cluster_pb2.ListReplicasRequest())
        [replica] = listed.replicas
        addresses = (coordinator, replica.address.target), (f"127.0.0.1:{relay}", f"127.0.0.1:{source}")
        subject, floor = (Pair(*(load.Target(each, "load", "a") for each in pair)) for pair in addresses)
        yield subject, floor


async def measure() -> list[report.Row]:
    rows: list[report.Row] = []
    async with both() as (subject, floor):
        for pair in (subject, floor):  # The first calls pay for connections and caches.
            await load.attach(pair.relay, 16, 50, 20)
            await load.generate(pair.relay, 16, 50, 20)
            await load.execute(pair.stage, 16, 50, 20)
        rows += await latencies(subject.relay, floor.relay)
        rows += await rates(subject.relay, floor.relay)
        rows += await streams(load.generate, subject.relay, floor.relay, "bare relay")
        rows += await streams(load.execute, subject.stage, floor.stage, "bare source")
        rows += await overload(subject.relay, floor.relay)
    return rows


async def latencies(subject: load.Target, relay: load.Target) -> list[report.Row]:
    rows = []
    for name, drive, paces, bounded in (
        ("attach", load.attach, PACES, {16, 256}),
        ("generate", load.generate, STREAM_PACES, set()),
    ):
        for runs, rate in paces.items():
            tokens = max(5, round(rate * SECONDS))
            mine, theirs = [], []
            for _ in range(TURNS):
                theirs.append((await drive(relay, runs, rate, tokens)).p50 * 1e3)
                mine.append((await drive(subject, runs, rate, tokens)).p50 * 1e3)
            rows.append(
                report.row(
                    "control",
                    f"{name}: p50 latency, {runs} runs at {rate:g}/s",
                    "ms",
                    mine,
                    floor=theirs,
                    floor_name="bare relay",
                    at_most=2.0 if runs in bounded else None,
                )
            )
    return rows


async def rates(subject: load.Target, relay: load.Target) -> list[report.Row]:
    rows = []
    attach_256: list[float] = []
    for runs in (256, 1024):
        mine, theirs = [], []
        for _ in range(TURNS):
            theirs.append(await sustained(relay, load.attach, runs, RAMP))
            mine.append(await sustained(subject, load.attach, runs, RAMP))
        if runs == 256:
            attach_256 = mine
        rows.append(
            report.row(
                "control",
                f"attach: sustained rate, {runs} runs",
                "tokens/s",
                mine,
                floor=theirs,
                floor_name="bare relay",
                at_least=0.4,
            )
        )
    own = [(await load.generate(subject, 256, 24e3 / 256, round(24e3 / 256 * SECONDS))).delivered for _ in attach_256]
    rows.append(
        report.row(
            "control",
            "attach over generate: rate, 256 runs",
            "tokens/s",
            attach_256,
            floor=own,
            floor_name="generate",
            at_least=5.0,
        )
    )
    return rows


async def streams(drive: load.Drive, subject: load.Target, floor: load.Target, floor_name: str) -> list[report.Row]:
    """What arrives of 24,000 tokens a second, over a stream for each run."""
    rows = []
    for runs, bound in ((1, 0.8), (16, 0.8), (64, 0.8), (256, 0.7)):
        rate = 24e3 / runs
        tokens = round(rate * SECONDS)
        mine, theirs = [], []
        for _ in range(TURNS):
            theirs.append((await drive(floor, runs, rate, tokens)).delivered)
            mine.append((await drive(subject, runs, rate, tokens)).delivered)
        rows.append(
            report.row(
                "control",
                f"{drive.__name__}: delivered of 24,000/s offered, {runs} streams",
                "tokens/s",
                mine,
                floor=theirs,
                floor_name=floor_name,
                at_least=bound,
            )
        )
    return rows


async def overload(subject: load.Target, relay: load.Target) -> list[report.Row]:
    """Two and a half times what the relay carries on 256 streams."""
    carried = (await load.generate(relay, 256, 24e3 / 256, round(24e3 / 256 * SECONDS))).delivered
    rate = 2.5 * carried / 256
    tokens = round(rate * 2 * SECONDS)
    mine, theirs = [], []
    for _ in range(TURNS):
        theirs.append(await load.generate(relay, 256, rate, tokens))
        mine.append(await load.generate(subject, 256, rate, tokens))
    return [
        report.row(
            "control",
            "generate: rate at 2.5x the relay's capacity, 256 streams",
            "tokens/s",
            [each.delivered for each in mine],
            floor=[each.delivered for each in theirs],
            floor_name="bare relay",
            at_least=1.6,
        ),
        report.row(
            "control",
            "generate: p95 latency at 2.5x the relay's capacity, 256 streams",
            "ms",
            [each.p95 * 1e3 for each in mine],
            floor=[each.p95 * 1e3 for each in theirs],
            floor_name="bare relay",
            at_most=0.1,
        ),
    ]


def run() -> list[report.Row]:
    """Rows of this part."""
    return uvloop.run(measure())
