"""Random pictures of each kind, in batches on any device: what is on them, where, and which sentence names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.train_tiny.image import grammar as g

RECTANGLE = 5
"""Form of a primitive that fills its box; below it the grammar's shapes."""
DIGIT = 6
"""Forms from here on are the ten digits."""
_MARGIN = 0.02


@dataclass(slots=True)
class Draws:
    """`n` pictures of one kind. Indices are those of the grammar's tables; lengths are shares of the picture's side."""

    kind: int
    template: Tensor
    """[n]"""
    shape: Tensor
    """[n, 3]"""
    colour: Tensor
    """[n, 3]"""
    size: Tensor
    """[n, 3]"""
    relation: Tensor
    count: Tensor
    digit: Tensor
    thing: Tensor
    light: Tensor
    background: Tensor
    """[n], of BACKGROUNDS; scenes have none."""
    primitives: Tensor
    """[n, p, 6]: form, centre x, centre y, half width, half height, colour of the palette (-1: nothing)."""
    base: Tensor
    """[n], colour of the palette behind the primitives."""
    variant: int | None = None
    """Which of the words that mean the same; None: any."""

    def wanted(self, row: int) -> g.Wanted:
        """One of them as it is asked for."""
        objects = {g.ONE: 1, g.TWO: 2, g.THREE: 3}.get(self.kind, 1)

        def of(values: Tensor) -> tuple[int, ...]:
            return tuple(int(value) for value in values[row, :objects])

        return g.Wanted(
            self.kind,
            shapes=of(self.shape),
            colours=of(self.colour),
            sizes=of(self.size),
            relation=int(self.relation[row]),
            count=int(self.count[row]),
            digit=int(self.digit[row]),
            thing=int(self.thing[row]),
            light=int(self.light[row]),
            background=int(self.background[row]),
        )


class _Dice:
    """Random numbers for `n` pictures."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.n = n
        self.device = device

    def below(self, most: int, *more: int) -> Tensor:
        return torch.randint(0, most, (self.n, *more), device=self.device)

    def between(self, low: float, high: float, *more: int) -> Tensor:
        return low + (high - low) * torch.rand(self.n, *more, device=self.device)


def sample(kind: int, n: int, device: torch.device, *, held_out: bool = False) -> Draws:
    """`n` pictures of a kind. Pairs of the hold-out are on none of them, or with `held_out`, on all of two things."""
    dice = _Dice(n, device)
    zero = torch.zeros(n, dtype=torch.long, device=device)
    draws = Draws(
        kind,
        template=dice.below(len(g.TEMPLATES[kind])),
        shape=dice.below(5, 3),
        colour=dice.below(8, 3),
        size=torch.zeros(n, 3, dtype=torch.long, device=device),
        relation=dice.below(4),
        count=dice.below(len(g.COUNTS)),
        digit=dice.below(10),
        thing=dice.below(len(g.THINGS)),
        light=dice.below(len(g.LIGHTS)),
        background=dice.below(len(g.BACKGROUNDS)),
        primitives=torch.empty(0),
        base=zero,
    )
    said = torch.tensor([g.names_background(text) for text in g.TEMPLATES[kind]], device=device)
    draws.background = torch.where(said[draws.template], draws.background, g.WHITE)
    draws.base = len(g.COLOURS) + draws.background
    _LAYOUTS[kind](draws, dice, held_out)
    return draws


def _primitive(form: Tensor | int, x: Tensor, y: Tensor, width: Tensor, height: Tensor, colour: Tensor | int) -> Tensor:
    parts = [form, x, y, width, height, colour]
    return torch.stack([torch.as_tensor(part, device=x.device).expand(x.shape).float() for part in parts], -1)


def _one(draws: Draws, dice: _Dice, _held_out: bool) -> None:
    big = dice.below(2)
    draws.size[:, 0] = dice.below(2) * (1 + big)
    radius = torch.where(big == 1, dice.between(0.26, 0.36), dice.between(0.12, 0.18))
    span = 1 - 2 * (radius + 0.01)
    x, y = (radius + 0.01 + span * dice.between(0, 1) for _ in range(2))
    draws.primitives = _primitive(draws.shape[:, 0], x, y, radius, radius, draws.colour[:, 0])[:, None]


def _held(draws: Draws, first: int, second: int) -> Tensor:
    """Which pictures have a pair of the hold-out in these two places: `grammar.held_out` for tensors."""
    codes = [draws.colour[:, place] * 5 + draws.shape[:, place] for place in (first, second)]
    low, high = torch.minimum(*codes), torch.maximum(*codes)
    return (7 * low + 3 * high + 1) % 10 == 0


def _choose_pairs(draws: Draws, dice: _Dice, places: list[tuple[int, int]], held_out: bool) -> None:
    """Draws the later colour and shape again until no pair is of the hold-out, or with `held_out` until all are.

    Where that does not come about, all three become equal: such pairs are never held out.
    """
    for _ in range(80 if held_out else 12):
        for first, second in places:
            again = _held(draws, first, second) != held_out
            draws.colour[:, second] = torch.where(again, dice.below(8), draws.colour[:, second])
            draws.shape[:, second] = torch.where(again, dice.below(5), draws.shape[:, second])
    if not held_out:
        left = torch.stack([_held(draws, *pair) for pair in places]).any(0)[:, None]
        draws.colour = torch.where(left, draws.colour[:, :1], draws.colour)
        draws.shape = torch.where(left, draws.shape[:, :1], draws.shape)


def _two(draws: Draws, dice: _Dice, held_out: bool) -> None:
    _choose_pairs(draws, dice, [(0, 1)], held_out)
    big = dice.below(2, 2)
    draws.size[:, :2] = dice.below(2, 2) * (1 + big)
    radius = torch.where(big == 1, dice.between(0.17, 0.21, 2), dice.between(0.11, 0.14, 2))
    r1, r2 = radius.unbind(1)
    first_before = (draws.relation == 0) | (draws.relation == 2)
    low, high = torch.where(first_before, r1, r2), torch.where(first_before, r2, r1)
    gap = dice.between(0.04, 0.08)
    slack = (1 - 2 * _MARGIN - 2 * (low + high) - gap).clamp(min=0)
    before = slack * dice.between(0, 1)
    at_low = _MARGIN + low + before
    at_high = at_low + low + high + gap + (slack - before) * dice.between(0, 1)
    along = torch.where(first_before, at_low, at_high), torch.where(first_before, at_high, at_low)
    widest = torch.maximum(r1, r2)
    line = widest + _MARGIN + (1 - 2 * _MARGIN - 2 * widest) * dice.between(0, 1)
    across = [
        torch.minimum(torch.maximum(line + dice.between(-0.08, 0.08), r + _MARGIN), 1 - _MARGIN - r) for r in (r1, r2)
    ]
    upright = draws.relation < 2
    draws.primitives = torch.stack(
        [
            _primitive(
                draws.shape[:, place],
                torch.where(upright, across[place], along[place]),
                torch.where(upright, along[place], across[place]),
                radius[:, place],
                radius[:, place],
                draws.colour[:, place],
            )
            for place in range(2)
        ],
        1,
    )


def _three(draws: Draws, dice: _Dice, _held_out: bool) -> None:
    """A row from left to right in the order that the caption says."""
    _choose_pairs(draws, dice, [(0, 1), (0, 2), (1, 2)], False)
    radius = dice.between(0.1, 0.14, 3)
    thirds = torch.tensor([1 / 6, 1 / 2, 5 / 6], device=dice.device)
    x = thirds + (1 / 6 - _MARGIN / 2 - radius) * dice.between(-1, 1, 3)
    y = dice.between(0.24, 0.76, 1) + dice.between(-0.06, 0.06, 3)
    draws.primitives = _primitive(draws.shape, x, y, radius, radius, draws.colour)


_DICE = (
    ((-1, 0), (1, 0)),
    ((-1.5, 0), (0, 0), (1.5, 0)),
    ((-1, -1), (1, -1), (-1, 1), (1, 1)),
    ((-1.5, -1.5), (1.5, -1.5), (0, 0), (-1.5, 1.5), (1.5, 1.5)),
)
"""Where two to five equal things stand: like dots on a die, but three in a row."""


def _count(draws: Draws, dice: _Dice, _held_out: bool) -> None:
    most = len(g.COUNTS) + 1
    places = torch.full((len(g.COUNTS), most, 2), torch.nan, device=dice.device)
    for index, dots in enumerate(_DICE[: len(g.COUNTS)]):
        places[index, : len(dots)] = torch.tensor(dots, device=dice.device)
    spots = places[draws.count]
    radius = dice.between(0.09, 0.115, 1)
    pitch = (2 * radius + 0.09) / 1.5  # So that two in a row, drawn to each other, are still apart.
    shift = dice.between(-1, 1, 2)[:, None] * (0.5 - _MARGIN - 0.02 - 1.5 * pitch - radius)[..., None]
    at = 0.5 + spots * pitch[..., None] + shift + dice.between(-0.02, 0.02, most, 2)
    there = ~spots[..., 0].isnan()
    x, y = at.nan_to_num(0.5).unbind(-1)
    colour = torch.where(there, draws.colour[:, :1], -1)
    size = radius.expand(-1, most)
    draws.primitives = _primitive(draws.shape[:, :1].expand(-1, most), x, y, size, size, colour)


def _digit(draws: Draws, dice: _Dice, _held_out: bool) -> None:
    height = dice.between(0.26, 0.4)
    span = 1 - 2 * (height + 0.01)
    x, y = (height + 0.01 + span * dice.between(0, 1) for _ in range(2))
    draws.primitives = _primitive(DIGIT + draws.digit, x, y, height, height, draws.colour[:, 0])[:, None]


def _scene(draws: Draws, dice: _Dice, _held_out: bool) -> None:
    house, boat = (draws.thing == g.THINGS.index(name) for name in ("house", "boat"))
    colour = draws.colour[:, 0]
    palette = {name: g.NAMES.index(name) for name in ("brown", "white", "green", "day", "night", "grass", "sea")}
    moon, cloud = (
        torch.tensor([each[1] == name for each in g.LIGHTS], device=dice.device)[draws.light]
        for name in ("moon", "cloud")
    )
    draws.base = torch.where(moon, palette["night"], palette["day"])
    horizon = dice.between(0.68, 0.8)
    ground = _primitive(
        RECTANGLE,
        torch.full_like(horizon, 0.5),
        (1 + horizon) / 2,
        torch.full_like(horizon, 0.5),
        (1 - horizon) / 2,
        torch.where(boat, palette["sea"], palette["grass"]),
    )
    size = dice.between(0.13, 0.18)
    x = dice.between(0.24, 0.76)
    foot = horizon + dice.between(0.02, 0.08)
    # A wall and a roof; a hull and a sail; a trunk and a crown.
    lower = _primitive(
        RECTANGLE,
        x,
        torch.where(boat, foot - 0.3 * size, foot - torch.where(house, size, 0.7 * size)),
        torch.where(boat, 1.3 * size, torch.where(house, size, 0.22 * size)),
        torch.where(boat, 0.35 * size, torch.where(house, size, 0.7 * size)),
        torch.where(house | boat, colour, palette["brown"]),
    )
    upper = _primitive(
        torch.where(house | boat, g.SHAPES.index(["triangle"] * 3), 0),
        x,
        torch.where(boat, foot - 1.6 * size, torch.where(house, foot - 2.45 * size, foot - 2 * size)),
        torch.where(house, 1.35 * size, size),
        torch.where(boat, 1.1 * size, torch.where(house, 0.6 * size, size)),
        torch.where(boat, palette["white"], torch.where(house, palette["brown"], palette["green"])),
    )
    door = _primitive(
        RECTANGLE, x, foot - 0.42 * size, 0.24 * size, 0.42 * size, torch.where(house, palette["brown"], -1)
    )
    sky_x = torch.where(dice.below(2) == 1, dice.between(0.14, 0.36), dice.between(0.64, 0.86))
    sky_y = dice.between(0.13, 0.2)
    radius = dice.between(0.08, 0.12)
    light = torch.tensor([g.NAMES.index(each[0]) for each in g.LIGHTS], device=dice.device)[draws.light]
    puffs = [
        _primitive(0, sky_x + shift * radius, sky_y + sink * radius, share * radius, share * radius,
                   light if shift == 0 else torch.where(cloud, light, -1))
        for shift, sink, share in ((0, 0, 1.0), (-0.9, 0.3, 0.65), (0.9, 0.3, 0.65))
    ]  # fmt: skip
    draws.primitives = torch.stack([ground, *puffs, lower, upper, door], 1)


_LAYOUTS: list[Callable[[Draws, _Dice, bool], None]] = [_one, _two, _three, _count, _digit, _scene]
