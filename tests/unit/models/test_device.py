"""A GPU that answers no more ends its process; what goes wrong otherwise fails its run."""

from __future__ import annotations

import pytest
import torch

from omni.rpc.errors import Reason
from stage_server import device
from stage_server.engines.errors import as_error
from tests.parity.driver import run_of


class EndedError(Exception):
    """In place of the process's end."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        assert status == 1
        raise EndedError

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(device.os, "_exit", end)


def test_a_failure_that_took_the_device_with_it_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(EndedError):
        as_error(RuntimeError("CUDA error"), "the run failed", run_of([1]))


def test_a_failure_that_left_the_device_well_fails_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    error = as_error(torch.OutOfMemoryError("out of memory"), "the run failed", run_of([1]))
    assert error.reason is Reason.STAGE_FAILED
