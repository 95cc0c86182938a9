"""A deployment with `tls`: coordinator, stage servers and gateway speak mutual TLS, and plain callers get nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import trustme

from omni.rpc.errors import OmniError, UnavailableError
from omnid.client import AsyncOmni
from omnid.config import load_deploy, resolve
from omnid.launcher.local import LocalCluster, local_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEPLOY = """
models:
  - {name: synthetic, pipeline: synthetic, arena: 1MiB}
tls: {ca: ca.pem, cert: own.pem, key: own.key}
"""


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    own.cert_chain_pems[0].write_to_path(folder / "own.pem")
    own.private_key_pem.write_to_path(folder / "own.key")
    (folder / "deploy.yaml").write_text(DEPLOY)
    return folder / "deploy.yaml"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(deploy: Path) -> AsyncIterator[LocalCluster]:
    config = load_deploy(str(deploy))
    async with local_cluster(
        resolve(config), grpc="127.0.0.1:0", http="127.0.0.1:0", tls=config.tls_files(), echo=lambda _line: None
    ) as running:
        await running.ready(60)
        yield running


async def test_a_request_goes_through_every_stage(cluster: LocalCluster, deploy: Path) -> None:
    files = load_deploy(str(deploy)).tls_files()
    assert files is not None
    async with AsyncOmni(cluster.grpc, tls=files.client()) as omni:
        answer = await omni.generate("synthetic", "go", outputs=["text", "audio"])
    assert answer.text
    assert answer.artifacts[0].data


async def test_the_gateway_reaches_the_coordinator(cluster: LocalCluster) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.http}", timeout=20) as http:
        body = {"model": "synthetic", "modalities": ["text"], "messages": [{"role": "user", "content": "go"}]}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_caller_without_a_certificate_is_refused(cluster: LocalCluster) -> None:
    async with AsyncOmni(cluster.grpc) as omni:
        with pytest.raises(OmniError) as refused:
            await omni.generate("synthetic", "go")
    assert isinstance(refused.value, UnavailableError)


async def test_the_command_line_uses_the_deployments_files(cluster: LocalCluster, deploy: Path) -> None:
    command = [sys.executable, "-m", "omnid.cli", "ps", "--target", cluster.grpc, "--tls-from", str(deploy)]
    # The coordinator lives in this loop, which the command must not block.
    shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
    assert shown.returncode == 0, shown.stderr
    assert "synthetic/b/0" in shown.stdout
    assert "ready" in shown.stdout
