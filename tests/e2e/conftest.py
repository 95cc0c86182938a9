"""The demo deployment as a person starts it: ``omnid up demo``, all of its processes, on free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

READY_SECONDS = 90
STOP_SECONDS = 10
SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Running:
    """Where the cluster is reached."""

    process: subprocess.Popen[bytes]
    http: str
    """URL of the gateway."""
    grpc: str
    """Target of the coordinator."""


@pytest.fixture(scope="session")
def demo() -> Iterator[Running]:
    """One cluster for all tests; it must stop in time and leave nothing behind."""
    shared_before = set(SHARED.iterdir())
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "omnid.cli", "up", "demo", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            *("--ready-fd", str(writing), "--ready-timeout", str(READY_SECONDS), "--log-level", "WARNING"),
        ],
        pass_fds=[writing],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(writing)
    with os.fdopen(reading) as ready:
        line = ready.readline()  # Ends too when the process does.
    assert line, f"omnid up ended with {process.wait()}"
    bound = json.loads(line)
    tree = psutil.Process(process.pid).children(recursive=True)
    yield Running(process, f"http://{bound['http']}", bound["grpc"])
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(STOP_SECONDS) == 0
    finally:
        process.kill()
    _, alive = psutil.wait_procs(tree, timeout=1)
    assert not alive
    assert set(SHARED.iterdir()) <= shared_before
