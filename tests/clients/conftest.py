import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.cluster import Cluster, running

NODE = Path(__file__).parent / "node"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A coordinator with three scripted stages, "chain", each a process of its own."""
    async with running(tmp_path_factory.mktemp("cluster")) as started:
        yield started


async def execute(*command: str, stdin: str = "") -> tuple[int, str, str]:
    """Runs a program to its end, within 60 s; returns exit status, output, and error output."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(60):
            output, errors = await process.communicate(stdin.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def node(target: str, command: str, *requests: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Runs the Node.js client; returns its exit status and the objects that it printed."""
    assert (NODE / "node_modules").is_dir(), "the Node.js client's packages are missing; `make test` installs them"
    arguments = [json.dumps(request) for request in requests]
    status, output, errors = await execute("node", str(NODE / "client.mjs"), target, command, *arguments)
    assert not errors, errors
    return status, [json.loads(line) for line in output.splitlines()]


async def buf_curl(target: str, method: str, message: dict[str, Any]) -> tuple[int, list[dict[str, Any]], str]:
    """Calls a method with ``buf curl``, which asks the server itself for the contract."""
    status, output, errors = await execute(
        str(Path(sys.executable).parent / "buf"),
        *("curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", "@-"),
        f"http://{target}/{method}",
        stdin=json.dumps(message),
    )
    decoder, found, text = json.JSONDecoder(), [], output.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return status, found, errors
