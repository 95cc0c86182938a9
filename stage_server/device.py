"""Where this process computes."""

from __future__ import annotations

import torch


def device() -> torch.device:
    """The first visible GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
