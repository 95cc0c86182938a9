"""Processes for the benchmarks: started for one, gone at its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

HERE = Path(__file__).parent
_READY_SECONDS = 60.0
_STOP_SECONDS = 15.0


@contextlib.asynccontextmanager
async def program(*arguments: str) -> AsyncIterator[str]:
    """``python -m arguments``, killed at the end; yields the line that it prints when it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments), stdout=asyncio.subprocess.PIPE, env=_environment()
    )
    try:
        if process.stdout is None:
            raise AssertionError("its output is piped")
        ready = await asyncio.wait_for(process.stdout.readline(), _READY_SECONDS)
        yield ready.decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def omnid(deploy: Path) -> AsyncIterator[str]:
    """``omnid up`` of a deployment, stopped at the end; yields the coordinator's address."""
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omnid.cli", "up", str(deploy), "--grpc", "127.0.0.1:0"),
        *("--log-level", "ERROR", "--ready-fd", str(writing)),
        pass_fds=[writing],
        env=_environment(),
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            line = await asyncio.wait_for(asyncio.to_thread(ready.readline), _READY_SECONDS)
        yield json.loads(line)["grpc"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
