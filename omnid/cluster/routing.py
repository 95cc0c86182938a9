"""Which replica takes the next run: the one with the least to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from omnid.cluster.member import Member

M = TypeVar("M", bound=Member)


def least_loaded(members: Iterable[M]) -> M | None:
    """The member with the fewest runs, this coordinator's own and those that others gave it; among equals the one
    that was chosen longest ago. None: no member can take one more."""
    best: M | None = None
    for member in members:
        if member.takes_work() and (best is None or (member.runs, member.chosen) < (best.runs, best.chosen)):
            best = member
    return best
