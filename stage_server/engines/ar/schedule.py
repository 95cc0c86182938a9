"""Which positions of which runs share the next step."""

from __future__ import annotations

from collections.abc import Iterable

from stage_server.engines.ar.decoder import DecodeState, Slice, StateT


def plan(states: Iterable[StateT], budget: int) -> list[Slice[StateT]]:
    """Slices for one step of at most `budget` positions, given the runs that may step, oldest first.

    Runs that decode go first, each with its one position, so that a long prompt never holds them up; prompts share
    what is left, in turn, and a prompt longer than that goes on in the next step. A run always gets its turn: of more
    decoding runs than `budget` all step.
    """
    decoding: list[StateT] = []
    prompts: list[StateT] = []
    for state in states:
        pending = pending_positions(state)
        if pending == 1:
            decoding.append(state)
        elif pending > 1:
            prompts.append(state)
    slices: list[Slice[StateT]] = []
    offset = 0
    for state in decoding:
        slices.append(Slice(state, state.position, state.position + 1, offset))
        offset += 1
    left = max(budget - offset, 1 if not slices else 0)
    for state in prompts:
        if not left:
            break
        length = min(left, pending_positions(state))
        slices.append(Slice(state, state.position, state.position + length, offset))
        offset += length
        left -= length
    return slices


def pending_positions(state: DecodeState) -> int:
    """Positions whose input is known and that have not been put through."""
    return state.ready - state.position


def draws(part: Slice[StateT]) -> bool:
    """Whether a token is drawn after this slice: it is the last of what is known, and the prompt is through."""
    state = part.state
    return part.stop == state.ready and state.prompt is not None and part.stop >= state.prompt
