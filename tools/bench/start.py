"""Part `start`: how long the processes take to serve, and how much memory they hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tools.bench import report

TURNS = 3
MB = 1e6
HEAVY = ("torch", "numpy", "transformers", "diffusers")
_READY_SECONDS = 120.0
_STOP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds until it served, and proportional memory of all of its processes then, in MB (1e6 bytes)."""

    seconds: float
    memory: float


def run() -> list[report.Row]:
    """Rows of this part."""
    serve = [_start(["serve", "synthetic", "--grpc", "127.0.0.1:0"], healthy=True) for _ in range(TURNS + 1)][1:]
    up = [
        _start(["up", "demo", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"], healthy=False)
        for _ in range(TURNS + 1)
    ][1:]
    return [
        _row("omnid serve: until its health check answers", "s", [each.seconds for each in serve], 1.0),
        _row("omnid serve: proportional memory", "MB", [each.memory for each in serve], 100.0),
        _row("omnid.cli: tensor libraries imported", "", [float(_heavy_imports())], 0.0),
        _row("omnid up demo: until all serve", "s", [each.seconds for each in up], 20.0),
        _row("omnid up demo: proportional memory of all processes", "MB", [each.memory for each in up], 3000.0),
    ]


def _row(case: str, unit: str, values: list[float], at_most: float) -> report.Row:
    return report.row("start", case, unit, values, at_most=at_most)


def _start(command: list[str], *, healthy: bool) -> Start:
    """Starts ``omnid command``, measures it, and stops it. With `healthy` it serves when a health check says so."""
    reading, writing = os.pipe()
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "omnid.cli", *command, "--ready-fd", str(writing), "--log-level", "ERROR"],
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            line = ready.readline()
        if not line:
            raise RuntimeError(f"omnid {' '.join(command)} ended with {process.wait()}")
        if healthy:
            with grpc.insecure_channel(json.loads(line)["grpc"]) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=_READY_SECONDS, wait_for_ready=True
                )
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise RuntimeError("the coordinator does not serve")
        return Start(time.perf_counter() - begun, _memory(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_SECONDS)


def _memory(pid: int) -> float:
    """Proportional set size of a process and all below it, MB: what is shared counts once."""
    processes = [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    kib = 0
    for each in processes:
        rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
        kib += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return kib * 1024 / MB


def _heavy_imports() -> int:
    """How many of the heavy libraries ``import omnid.cli`` loads."""
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import omnid.cli"], capture_output=True, text=True, check=True
    ).stderr
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.splitlines()}
    return len(imported.intersection(HEAVY))
