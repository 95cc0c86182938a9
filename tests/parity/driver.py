"""Drives an engine as a session does, and collects what it delivers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omni.v1 import config_pb2, content_pb2
from stage_server.engines.base import Engine, Event, Failed, Finished, Output, Run

PATIENCE = 60.0
_numbers = itertools.count(1)


@dataclass
class Seen:
    """All events of one run."""

    outputs: list[Output] = field(default_factory=list)
    end: Finished | Failed | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def logprobs(self) -> list[content_pb2.TokenLogprobs]:
        return [entry for output in self.outputs for entry in output.logprobs]

    def tensor(self, name: str) -> torch.Tensor:
        return torch.cat([output.tensors[name] for output in self.outputs if name in output.tensors])

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end

    @property
    def failed(self) -> Failed:
        assert isinstance(self.end, Failed), self.end
        return self.end


class Driver:
    """An engine that runs, and its events by run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runs: dict[int, Seen] = {}
        self.steps: list[list[Event]] = []
        self._changed = threading.Condition()
        engine.start(self._deliver)

    def _deliver(self, events: Sequence[Event]) -> None:
        with self._changed:
            self.steps.append(list(events))
            for event in events:
                seen = self.runs[event.run]
                assert seen.end is None, "an event after the end"
                if isinstance(event, Output):
                    seen.outputs.append(event)
                else:
                    seen.end = event
            self._changed.notify_all()

    def submit(self, run: Run) -> int:
        with self._changed:
            self.runs[run.id] = Seen()
        self.engine.submit(run)
        return run.id

    def submit_together(self, runs: Sequence[Run]) -> list[int]:
        """Submits all before the engine can get further with any of them than to its first event."""
        with self._changed:
            return [self.submit(run) for run in runs]

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), "the engine did not get there in time"

    def result(self, run: int) -> Seen:
        self.wait(lambda: self.runs[run].end is not None)
        return self.runs[run]

    def results(self, runs: Iterable[int]) -> list[Seen]:
        return [self.result(run) for run in runs]

    def close(self) -> None:
        self.engine.stop()


def run_of(
    prompt: content_pb2.Prompt | str | Sequence[int] | None, *, tensors: Iterable[str] = (), **sampling: Any
) -> Run:
    """A run with these sampling parameters; a list of numbers is taken as token ids, a string as plain text."""
    if isinstance(prompt, str):
        prompt = content_pb2.Prompt(text=prompt)
    elif prompt is not None and not isinstance(prompt, content_pb2.Prompt):
        prompt = content_pb2.Prompt(token_ids=content_pb2.TokenIds(ids=prompt))
    number = next(_numbers)
    return Run(
        id=number,
        request_id=f"req-{number}",
        role="",
        prompt=prompt,
        params=config_pb2.StageParams(sampling=config_pb2.SamplingParams(**sampling)),
        tensors=frozenset(tensors),
    )
