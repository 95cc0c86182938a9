"""Processes for the benchmarks: started for one, gone at its end.

python -m tools.bench.cluster DEPLOY        # a coordinator; prints its address
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from omnid.config import load_deploy, resolve
from omnid.daemon import Daemon

HERE = Path(__file__).parent
_READY_SECONDS = 60.0


@contextlib.asynccontextmanager
async def program(*arguments: str) -> AsyncIterator[str]:
    """``python -m arguments``, killed at the end; yields the line that it prints when it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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


async def coordinate(deploy: str) -> None:
    """Serves a coordinator; says where when every replica has joined."""
    daemon = Daemon(resolve(load_deploy(deploy)), listen="127.0.0.1:0")
    bound = await daemon.start()
    members = list(daemon.cluster.statuses())
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stage_server.server", "--coordinator", bound.grpc),
            *("--model", member.model, "--stage", member.stage, "--index", str(member.index)),
            *("--log-level", "ERROR"),
        )
        for member in members
    ]
    await daemon.cluster.wait_ready(_READY_SECONDS)
    print(bound.grpc, flush=True)
    await asyncio.gather(*(process.wait() for process in processes))


if __name__ == "__main__":
    uvloop.run(coordinate(sys.argv[1]))
