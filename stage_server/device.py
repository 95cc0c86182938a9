"""Where this process computes."""

from __future__ import annotations

import os

import torch

from omni.rpc import logs

_log = logs.get(__name__)


def device() -> torch.device:
    """The first visible GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def limit_threads() -> None:
    """One thread for each operation on the CPU, unless `OMP_NUM_THREADS` says otherwise: more of them wait for each
    other where stages share the cores, whichever device the model is on."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def end_without_device() -> None:
    """Ends this process, exit status 1, when its GPU answers no more. After an illegal access every call fails until
    the process is a new one; a replica that fails whatever it is given would be the least loaded and get all the work.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        _log.critical("the device is lost, and this process with it", error=str(error).partition("\n")[0])
        os._exit(1)
