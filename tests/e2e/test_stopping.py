"""``omnid up`` told to stop: once, and twice by somebody who does not want to wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil

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
