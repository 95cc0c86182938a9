"""What follows a forward: tokens are drawn, and each run's output of the step is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Generic

import torch

from omni.v1 import content_pb2
from stage_server.engines.ar.decoder import Decoder, DecodeState, Slice, StateT
from stage_server.engines.ar.sampling import draw, penalize
from stage_server.engines.base import Output

if TYPE_CHECKING:
    from stage_server.engines.ar.entry import Entry

Reason = content_pb2.FinishReason.ValueType


def collect(state: DecodeState) -> dict[str, torch.Tensor]:
    """Takes the tensors that a run's decoder has made since the last output."""
    if not state.tensors:
        return {}
    tensors, state.tensors = state.tensors, {}
    return {name: made[0] if len(made) == 1 else torch.cat(made) for name, made in tensors.items()}


class Step(Generic[StateT]):
    """One step's results. Row numbers are places in `slices`."""

    def __init__(
        self,
        decoder: Decoder[StateT],
        entries: Sequence[Entry[StateT]],
        slices: Sequence[Slice[StateT]],
        max_length: int,
    ) -> None:
        self._decoder = decoder
        self._entries = entries
        self._slices = slices
        self._max_length = max_length
        self._outputs = [Output(part.state.run.id) for part in slices]
        self._ended: dict[int, Reason] = {}

    def draw(self, hidden: torch.Tensor, rows: Sequence[int]) -> None:
        """Draws a token for each of `rows`, whose hidden states are [R, H]; the decoder takes those that go on."""
        states = [self._slices[row].state for row in rows]
        logits = self._decoder.logits(hidden)
        wanted = [place for place, state in enumerate(states) if state.sampling.logprobs is not None]
        logprobs = logits[wanted].float().log_softmax(-1) if wanted else None
        self._shape(logits, rows)
        tokens = draw(logits, [state.sampling for state in states])
        going: list[int] = []
        for place, (row, state, token) in enumerate(zip(rows, states, tokens, strict=True)):
            state.tokens.append(token)
            if (seen := self._entries[row].seen) is not None:
                seen.add(token)
            if reason := self._take(row, state, token):
                self._ended[row] = reason
            else:
                going.append(place)
        if logprobs is not None:
            self._report(logprobs, [(rows[place], states[place], tokens[place]) for place in wanted])
        if going:
            whole = len(going) == len(rows)
            self._decoder.sampled(
                states if whole else [states[place] for place in going],
                tokens if whole else [tokens[place] for place in going],
                hidden if whole else hidden[going],
            )

    def outputs(self) -> Iterator[Output]:
        """Outputs of the runs for which the step made something."""
        for row, (part, output) in enumerate(zip(self._slices, self._outputs, strict=True)):
            state = part.state
            if state.finished:
                self._ended.setdefault(row, content_pb2.FINISH_REASON_STOP)
            if row in self._ended:
                self._decoder.ended(state)
            output.tensors = collect(state)
            if output.token_ids or output.text or output.tensors:
                yield output

    def ended(self) -> Iterator[tuple[Entry[StateT], Reason]]:
        """Runs that this step ended, and why; known once `outputs` is through."""
        for row, reason in self._ended.items():
            yield self._entries[row], reason

    def _shape(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Applies what the runs ask for beyond temperature and filters."""
        penalized = []
        for place, row in enumerate(rows):
            state, seen = self._slices[row].state, self._entries[row].seen
            if seen is not None and len(seen):
                penalized.append((place, state.sampling, seen))
        penalize(logits, penalized)
        for place, row in enumerate(rows):
            state = self._slices[row].state
            if len(state.tokens) < state.sampling.min_tokens:
                known = [token for token in state.sampling.stop_ids if token < logits.shape[-1]]
                logits[place, known] = float("-inf")

    def _take(self, row: int, state: StateT, token: int) -> Reason | None:
        """Adds a token to its run's output; the reason when it ends the run."""
        sampling, output = state.sampling, self._outputs[row]
        stopped = token in sampling.stop_ids
        if state.text is not None:
            output.token_ids.append(token)
            if not stopped:
                output.text += state.text.push(token, may_stop=len(state.tokens) > sampling.min_tokens)
        reason: Reason | None = None
        if stopped or (state.text is not None and state.text.stopped):
            reason = content_pb2.FINISH_REASON_STOP
        elif len(state.tokens) >= sampling.max_tokens or state.position >= self._max_length:
            reason = content_pb2.FINISH_REASON_LENGTH
        if reason is not None and state.text is not None:
            output.text += state.text.finish()
        return reason

    def _report(self, logprobs: torch.Tensor, wanted: Sequence[tuple[int, StateT, int]]) -> None:
        """Adds the log probabilities [W, V] of the model itself, before penalties and temperature."""
        most = max(state.sampling.logprobs or 0 for _, state, _ in wanted)
        drawn = logprobs.gather(1, torch.tensor([[token] for _, _, token in wanted], device=logprobs.device))
        values, ids = logprobs.topk(most, dim=-1) if most else (drawn[:, :0], drawn[:, :0].long())
        for (row, state, token), own, likely, likely_ids in zip(
            wanted, drawn.squeeze(1).tolist(), values.tolist(), ids.tolist(), strict=True
        ):
            if state.text is None:
                continue
            count = state.sampling.logprobs or 0
            candidates = [(token, own), *zip(likely_ids[:count], likely[:count], strict=True)]
            sampled, *top = (
                content_pb2.TokenLogprobs.Candidate(token_id=at, text=state.text.piece(at), logprob=value)
                for at, value in candidates
            )
            self._outputs[row].logprobs.append(content_pb2.TokenLogprobs(sampled=sampled, top=top))
