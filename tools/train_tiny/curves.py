"""The curves of a training run as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

_SKIPPED = ("step", "seconds")


def draw(curves: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """One panel a training; each of its values by seconds, on a logarithmic scale."""
    figure, panels = plt.subplots(1, len(curves), figsize=(7 * len(curves), 4.5), squeeze=False)
    for panel, (name, points) in zip(panels[0], curves.items(), strict=True):
        for key in dict.fromkeys(key for point in points for key in point if key not in _SKIPPED):
            seen = [(point["seconds"], point[key]) for point in points if point.get(key, 0) > 0]
            panel.plot(*zip(*seen, strict=True), label=key) if seen else None
        panel.set(title=f"{name}: {int(points[-1]['step'])} steps", xlabel="seconds", yscale="log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
