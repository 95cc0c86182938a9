"""What both trainings share: a schedule by time, AdamW, averaged weights, and a state that can be taken up again."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

console = Console(width=140, highlight=False)

Losses = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], tuple[Tensor, Losses]]
"""Gives the loss of a batch, and its parts by name."""
Check = Callable[[nn.Module], dict[str, float]]


class Training:
    """Trains a module for a number of seconds.

    The learning rate follows the share of the seconds that is over, so that training ends annealed however fast the
    machine is. Averaged weights are kept beside the trained ones and are the result.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        rate: float,
        decay: float = 0.05,
        average: float = 0.999,
        warm_up: int = 200,
    ) -> None:
        """`rate` is the highest learning rate, reached after `warm_up` steps."""
        self.name = name
        self.module = module.train()
        self.average = copy.deepcopy(module).requires_grad_(False).eval()
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self._rate, self._keep, self._warm_up = rate, average, warm_up
        self._begun = 0
        matrices = [weights for weights in module.parameters() if weights.requires_grad and weights.ndim > 1]
        vectors = [weights for weights in module.parameters() if weights.requires_grad and weights.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self._weights = [*matrices, *vectors]
        self._device = self._weights[0].device
        fused = self._device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-8, fused=fused)

    def run(
        self,
        batches: Iterator[Any],
        loss: Loss,
        *,
        until: float,
        most_steps: int | None = None,
        whole: float | None = None,
        report: float = 10.0,
        check: Check | None = None,
    ) -> None:
        """Trains until a time of `time.monotonic`; `check` measures the averaged weights at each report.

        `whole` is the seconds of all calls together, over which the learning rate falls; None: this is the last call.
        """
        begin = reported = time.monotonic()
        spent = self.seconds
        whole = whole or spent + max(until - begin, 1e-3)
        first = self.step
        while time.monotonic() < until and (most_steps is None or self.step - first < most_steps):
            done = (self.step - first) / most_steps if most_steps else self.seconds / whole
            self._set_rate(min(1.0, done))
            parts = self._advance(next(batches), loss)
            if self.step % 20 == 0:
                float(parts["gradient"])  # waits, so that the clock counts work done and not work asked for
            now = time.monotonic()
            self.seconds = spent + now - begin
            if now - reported > report or self.step == first + 1:
                self._note(parts, check)
                reported = time.monotonic()
        self._note({}, check)

    def attempt(self, batch: Any, loss: Loss) -> None:
        """Forward and backward of one batch, which change nothing."""
        with self._precision():
            total, _ = loss(self.module, batch)
        total.backward()
        self._optimizer.zero_grad(set_to_none=True)

    def _advance(self, batch: Any, loss: Loss) -> Losses:
        with self._precision():
            total, parts = loss(self.module, batch)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._follow()
        self.step += 1
        return {**parts, "gradient": norm}

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda")

    def _set_rate(self, done: float) -> None:
        rate = self._rate * min(1.0, (self.step - self._begun + 1) / self._warm_up)
        rate *= 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def _follow(self) -> None:
        keep = min(self._keep, (self.step + 1) / (self.step + 10))
        ours, theirs = list(self.average.parameters()), list(self.module.parameters())
        torch._foreach_lerp_([*ours], [weights.detach() for weights in theirs], 1 - keep)

    def _note(self, parts: Losses, check: Check | None) -> None:
        point = {"step": float(self.step), "seconds": self.seconds}
        point |= {name: float(value.detach()) for name, value in parts.items()}
        if check is not None:
            point |= check(self.average)
        self.curve.append(point)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in point.items() if name not in ("step", "seconds"))
        console.print(f"{self.name}: {self.seconds:5.0f} s, step {self.step:6d}  {shown}")

    def save(self, folder: Path) -> None:
        """Writes what `resume` needs, small enough to be carried about: rounded to bfloat16, as the model will be.

        The optimizer's moments are not kept: they are back within the warm-up.
        """
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "weights": [weights.detach().bfloat16().cpu() for weights in self._weights],
            "average": [weights.bfloat16().cpu() for weights in self._averages()],
        }
        torch.save(state, folder / f"{self.name}.pt")

    def resume(self, folder: Path) -> bool:
        """Takes up what `save` wrote; False when there is nothing."""
        path = folder / f"{self.name}.pt"
        if not path.is_file():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        self._begun = self.step
        with torch.no_grad():
            for mine, saved in zip(self._weights, state["weights"], strict=True):
                mine.copy_(saved)
            for mine, saved in zip(self._averages(), state["average"], strict=True):
                mine.copy_(saved)
        return True

    def _averages(self) -> list[Tensor]:
        """The averaged counterparts of the trained weights, in their order."""
        own = {
            id(mine): theirs for mine, theirs in zip(self.module.parameters(), self.average.parameters(), strict=True)
        }
        return [own[id(weights)] for weights in self._weights]
