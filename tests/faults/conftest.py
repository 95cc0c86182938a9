from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.cluster import Cluster, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One cluster a module: what a test breaks, it mends."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    async with running(folder) as started:
        yield started
