"""Where this process computes."""

from __future__ import annotations

import os

import torch


def device() -> torch.device:
    """The first visible GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def limit_threads() -> None:
    """One thread for each operation on the CPU, unless `OMP_NUM_THREADS` says otherwise: more of them wait for each
    other where stages share the cores, whichever device the model is on."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
