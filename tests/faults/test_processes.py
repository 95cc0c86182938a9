"""``omnid up`` and its processes: whichever of them is killed, none is left behind, and those that can come back do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

DEPLOY = """
models:
  - name: chain
    pipeline: synthetic
    arena: 1MiB
    stages:
      a: {engine: %s}
"""
READY_SECONDS = 60


class Up:
    """A running ``omnid up``."""

    def __init__(self, folder: Path, engine: str = "{}", logs: int = subprocess.PIPE, level: str = "ERROR") -> None:
        path = folder / "deploy.yaml"
        path.write_text(DEPLOY % engine)
        reading, writing = os.pipe()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "omnid.cli", "up", str(path), "--grpc", "127.0.0.1:0"),
                *("--http", "127.0.0.1:0", "--ready-fd", str(writing), "--log-level", level),
            ],
            pass_fds=[writing],
            stderr=logs,
            text=True,
        )
        os.close(writing)
        with os.fdopen(reading) as ready:
            self.ready = ready.readline()

    @property
    def url(self) -> str:
        return f"http://{json.loads(self.ready)['http']}"

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        """The one child whose arguments hold `word`; copies of the nursery are told apart by their age."""
        return next(each for each in self.tree() if word in " ".join(each.cmdline()))

    def answers(self) -> bool:
        """Asks until there is an answer, for at most as long as starting again may take."""
        body = {"model": "chain", "modalities": ["text", "audio"], "messages": [{"role": "user", "content": "go"}]}
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            try:
                if httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=20).status_code == 200:
                    return True
            except httpx.HTTPError:
                pass  # The gateway itself is on its way back.
            time.sleep(0.2)
        return False

    def close(self) -> None:
        tree = self.tree() if self.process.poll() is None else []
        self.process.kill()
        self.process.communicate()
        for each in tree:
            if each.is_running():
                each.kill()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    started = Up(tmp_path)
    assert started.ready
    yield started
    started.close()


def nursery(up: Up) -> psutil.Process:
    return next(each for each in up.tree() if each.ppid() == up.process.pid)


def stages(up: Up) -> list[psutil.Process]:
    return [each for each in nursery(up).children() if "gateway" not in " ".join(each.cmdline())]


def test_a_killed_stage_server_is_started_again(up: Up) -> None:
    assert up.answers()
    victim = stages(up)[0]
    victim.kill()
    psutil.wait_procs([victim], timeout=5)
    assert up.answers()
    assert len(stages(up)) == 3


def test_a_killed_gateway_is_started_again_where_its_clients_know_it(up: Up) -> None:
    victim = up.child("gateway.server")
    victim.kill()
    psutil.wait_procs([victim], timeout=5)
    assert up.answers()
    assert up.child("gateway.server").pid != victim.pid


def test_a_killed_nursery_takes_its_children_with_it_and_all_are_started_again(up: Up) -> None:
    before = up.tree()
    nursery(up).kill()
    _, alive = psutil.wait_procs(before, timeout=5)
    assert not alive
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until and len(up.tree()) < len(before):
        time.sleep(0.1)
    assert len(up.tree()) == len(before)


def test_a_full_disk_under_the_logs_ends_nothing(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        started = Up(tmp_path, logs=full.fileno(), level="DEBUG")
    try:
        assert started.answers()
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(10) == 0
    finally:
        started.close()


def test_a_host_without_room_for_a_process_ends_nothing_that_serves(tmp_path: Path) -> None:
    started = Up(tmp_path, level="WARNING")
    try:
        omnid = psutil.Process(started.process.pid)
        before = omnid.rlimit(psutil.RLIMIT_NOFILE)
        victim = stages(started)[0]
        omnid.rlimit(psutil.RLIMIT_NOFILE, (0, before[1]))
        victim.kill()
        assert started.process.stderr is not None
        assert any("not started: " in line for line in started.process.stderr)
        omnid.rlimit(psutil.RLIMIT_NOFILE, before)
        assert started.answers()
        assert len(stages(started)) == 3
    finally:
        started.close()


def test_nothing_outlives_omnid_itself_when_it_is_killed(up: Up) -> None:
    tree = up.tree()
    assert len(tree) == 5
    up.process.kill()
    up.process.wait()
    _, alive = psutil.wait_procs(tree, timeout=5)
    assert not alive


def test_it_stops_within_ten_seconds_and_leaves_nothing(up: Up) -> None:
    tree = up.tree()
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(10) == 0
    _, alive = psutil.wait_procs(tree, timeout=1)
    assert not alive


def test_a_stage_that_cannot_start_ends_the_command_with_its_last_words(tmp_path: Path) -> None:
    started = Up(tmp_path, "{fail_start: true}")
    try:
        assert started.ready == ""
        _, said = started.process.communicate(timeout=READY_SECONDS)
        assert started.process.returncode == 1
        assert "chain/a/0" in said
        assert "the script says that this stage cannot start" in said
        assert "Traceback" not in said
    finally:
        started.close()
