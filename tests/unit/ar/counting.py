"""A decoder whose model is arithmetic: the next token is the last one plus one. It reads its cache, so that wrong
slots, positions or masks show in the tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Cache

from omni.rpc.errors import OmniError, Reason
from stage_server.engines.ar.cache import LayerView
from stage_server.engines.ar.decoder import Decoder, DecodeState, Geometry, Slice, last_rows
from stage_server.engines.ar.sampling import Sampling
from stage_server.engines.base import Feed, Run

VOCABULARY = 1000
END = 999


@dataclass(slots=True)
class CountState(DecodeState):
    ended_source: bool = False


class CountingDecoder(Decoder[CountState]):
    """Prompts are token ids; the prompt's ids and the sampled ones are written to the cache, and the token drawn is the
    sum of all ids in the run's slot modulo 900. A run without a prompt gets each input from a Feed's `token_ids`."""

    def __init__(self) -> None:
        self.forwards: list[list[tuple[int, int, int]]] = []
        self.fail_forward: set[int] = set()
        self.fail_sampled: set[int] = set()
        self.fail_ended: set[int] = set()
        self.spoil: set[int] = set()
        self.gate: threading.Event | None = None
        """When set, preparation waits for it."""
        self.preparing = threading.Semaphore(0)
        """Released as a preparation begins."""
        self.step_gate: threading.Event | None = None
        """When set, forwards wait for it."""
        self.stepping = threading.Event()
        self.inputs: dict[int, list[int]] = {}

    def load(self) -> Geometry:
        return Geometry(1, 1, 1, 64, torch.float32, torch.device("cpu"))

    def prepare(self, run: Run) -> CountState:
        self.preparing.release()
        if self.gate is not None:
            assert self.gate.wait(30)
        state = CountState(run, Sampling.of(run.params.sampling, run.params.sampling.__class__(), frozenset([END])))
        if run.prompt is None:
            self.inputs[run.id] = []
            return state
        ids = list(run.prompt.token_ids.ids)
        if ids[0] == 13:
            raise OmniError(Reason.BAD_REQUEST, "13 is not taken")
        if ids[0] == 14:
            raise ZeroDivisionError
        self.inputs[run.id] = ids
        state.prompt = state.ready = len(ids)
        return state

    def feed(self, state: CountState, feed: Feed) -> None:
        if feed.end:
            state.ended_source = True
            state.finished = not self.inputs[state.run.id]
        else:
            self.inputs[state.run.id].extend(feed.token_ids)
            state.ready = len(self.inputs[state.run.id])
            state.prompt = state.prompt or state.ready
        feed.release()

    def forward(self, step: Sequence[Slice[CountState]], cache: Cache) -> torch.Tensor:
        self.stepping.set()
        if self.step_gate is not None:
            assert self.step_gate.wait(30)
        self.forwards.append([(part.state.run.id, part.start, part.stop) for part in step])
        if self.fail_forward & {part.state.run.id for part in step}:
            raise RuntimeError("the model broke")
        ids = [i for part in step for i in self.inputs[part.state.run.id][part.start : part.stop]]
        rows = torch.tensor(ids, dtype=torch.float32).view(1, 1, -1, 1)
        view, _ = cache.update(rows, rows, 0)
        assert isinstance(view, LayerView)
        totals = self._totals(view, step)
        for part, total in zip(step, totals, strict=True):
            part.state.publish("totals", torch.tensor([total]))
        assert last_rows(step)[-1] == len(ids) - 1
        spoilt = [
            float("nan") if part.state.run.id in self.spoil else total for part, total in zip(step, totals, strict=True)
        ]
        return torch.tensor(spoilt).unsqueeze(1)

    def _totals(self, view: LayerView, step: Sequence[Slice[CountState]]) -> list[float]:
        """By the step's own layout: the slot of a decoding row is the one in `decode_slots`."""
        slots = iter(view.step.decode_slots.tolist())
        prompts = iter(view.step.prompts)
        return [
            float(view.keys[next(slots) if part.length == 1 else next(prompts).slot, 0, : part.stop].sum())
            for part in step
        ]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % 900, VOCABULARY).float() * 50

    def sampled(self, states: Sequence[CountState], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        for state, token in zip(states, tokens, strict=True):
            if state.run.id in self.fail_sampled:
                raise RuntimeError("the token was not taken")
            if state.run.prompt is not None:
                self.inputs[state.run.id].append(token)
                state.ready += 1
            elif state.ended_source:
                state.finished = True

    def ended(self, state: CountState) -> None:
        if state.run.id in self.fail_ended:
            raise RuntimeError("what was held back is lost")
        state.publish("last", torch.tensor([len(state.tokens)]))


def expected(ids: Sequence[int], tokens: int) -> list[int]:
    """What the decoder draws for a prompt."""
    known = list(ids)
    for _ in range(tokens):
        known.append(sum(known) % 900)
    return known[len(ids) :]
