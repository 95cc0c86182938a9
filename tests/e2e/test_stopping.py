"""Commands told to stop: once, and twice by somebody who does not want to wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

BOUND_S = 30


def test_a_second_signal_ends_a_stop_that_takes_its_time_and_leaves_no_process() -> None:
    reading, writing = os.pipe()
    addresses = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--ready-fd", str(writing))
    process = subprocess.Popen(
        [sys.executable, "-m", "omnid.cli", "up", "synthetic", *addresses],
        pass_fds=[writing],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        os.close(writing)
        with os.fdopen(reading) as ready:
            assert json.loads(ready.readline())["http"]
        tree = psutil.Process(process.pid).children(recursive=True)
        for each in tree:
            # Stage servers will not hear that they are to stop; the nursery and the gateway will.
            if each.ppid() != process.pid and not any("gateway" in word for word in each.cmdline()):
                each.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("Shutting down" in line for line in process.stderr), "of the gateway, so the stop is on its way"
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND_S) == 128 + signal.SIGINT
        _, alive = psutil.wait_procs(tree, timeout=5)
        assert not alive
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_told_to_stop_ends_by_that_signal_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "omnid.cli", "demo", "--verbose", "--out", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stderr is not None
            assert any("replica_joined" in line for line in process.stderr), "so its processes run"
            tree = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            said = process.stderr.read()
            assert process.wait(BOUND_S) == 128 + number, said
            assert "Traceback" not in said
            _, alive = psutil.wait_procs(tree, timeout=5)
            assert not alive
            assert not (tmp_path / "out").exists()
        finally:
            process.kill()


STUBBORN = """
import asyncio
from omnid.ending import unless_stopped

async def stubborn():
    print("runs", flush=True)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        print("stops", flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(unless_stopped(stubborn()))
"""


def test_a_second_signal_ends_what_does_not_end_at_the_first() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for said in ("runs\n", "stops\n"):
                assert process.stdout.readline() == said
                process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
