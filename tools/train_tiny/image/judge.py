"""Judges pictures by program: background, colours, shapes, how many, where, which digit, which scene."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.train_tiny.image import grammar as g
from tools.train_tiny.image.drawing import digit_stencil, palette, stencil

_BACKGROUND_DISTANCE = 0.45
"""Of colours from -1 to 1: what is farther from the background than this is a thing."""
_SPECK = 0.004
"""Share of the picture below which a spot counts for nothing."""
_LIKENESS = 0.6
"""Overlap (intersection over union) at which a spot is a shape."""
_LARGE = 0.22
"""Radius, as a share of the side, above which a thing alone on a picture is large."""


@dataclass(frozen=True, slots=True)
class Thing:
    """A spot of the picture. Lengths are shares of its side."""

    shape: int | None
    """Of SHAPES; None: none that it is like."""
    colour: int
    """Of NAMES."""
    radius: float
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is right about a picture. `every` is all that was asked, and nothing more on it."""

    background: bool
    colour: bool
    shape: bool
    every: bool


def judge(picture: Tensor, wanted: g.Wanted) -> Verdict:
    """Compares a picture [3, n, n] from -1 to 1 with what was asked for."""
    picture = picture.detach().float().cpu()
    if wanted.kind == g.SCENE:
        return _scene(picture, wanted)
    background, near, spots = _spots(picture)
    right = background == len(g.COLOURS) + wanted.background
    if wanted.kind == g.DIGIT:
        return _digit(spots, near, wanted, right, background)
    things = [_thing(spot, near, background) for spot in spots]
    count = wanted.count + 2 if wanted.kind == g.COUNT else len(wanted.shapes)
    asked = list(zip(wanted.shapes, wanted.colours, strict=True)) * (count if wanted.kind == g.COUNT else 1)
    found = [(-1 if each.shape is None else each.shape, each.colour) for each in things]
    same = sorted(found) == sorted(asked)
    every = right and same
    if every and wanted.kind == g.ONE and wanted.sizes[0]:
        every = (things[0].radius > _LARGE) == (wanted.sizes[0] == 2)
    if every and wanted.kind == g.TWO:
        every = _related(things, wanted)
    return Verdict(
        right,
        sorted(colour for _, colour in found) == sorted(colour for _, colour in asked),
        sorted(shape for shape, _ in found) == sorted(shape for shape, _ in asked),
        every,
    )


def _spots(picture: Tensor) -> tuple[int, Tensor, list[Tensor]]:
    """The background's colour, each pixel's nearest colour, and the spots on it, largest first."""
    from scipy import ndimage

    side = picture.shape[-1]
    colours = palette(torch.device("cpu"))
    pixels = picture.permute(1, 2, 0).reshape(-1, 3)
    near = (pixels[:, None] - colours[: len(g.COLOURS) + 4]).norm(dim=-1).argmin(1).reshape(side, side)
    edge = torch.cat([near[0], near[-1], near[:, 0], near[:, -1]])
    background = int(torch.bincount(edge, minlength=12).argmax())
    thing = ((pixels - colours[background]).norm(dim=-1) > _BACKGROUND_DISTANCE).reshape(side, side)
    labels, count = ndimage.label(thing.numpy())
    sizes: NDArray[np.int64] = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    order = [int(i) for i in np.argsort(-sizes) if sizes[i] >= max(12, _SPECK * side * side)]
    return background, near, [torch.from_numpy(labels == i + 1) for i in order]


def _colour(spot: Tensor, near: Tensor, background: int) -> int:
    counts = torch.bincount(near[spot], minlength=12)
    counts[background] = 0
    return int(counts.argmax())


def _thing(spot: Tensor, near: Tensor, background: int) -> Thing:
    """The shape that overlaps a spot best, over a few positions and radii."""
    side = spot.shape[-1]
    rows, columns = spot.nonzero(as_tuple=True)
    top, bottom, left, right = (int(value) for value in (rows.min(), rows.max(), columns.min(), columns.max()))
    half_width, half_height = (right - left + 1) / 2 / side, (bottom - top + 1) / 2 / side
    tried = []
    for shape in range(len(g.SHAPES)):
        radius = {
            0: (half_width + half_height) / 2,
            1: (half_width + half_height) / 2 / 0.88,
            2: (half_width / 0.894 + half_height / 0.9) / 2,
            3: (half_width + half_height) / 2,
            4: (half_width / 0.951 + half_height / 0.905) / 2,
        }[shape]
        sink = {2: 0.1, 4: 0.095}.get(shape, 0.0) * radius
        x, y = (left + right + 1) / 2 / side, (top + bottom + 1) / 2 / side + sink
        tried += [
            (shape, x + across / side, y + down / side, radius * scale)
            for scale in (0.94, 1.0, 1.06)
            for across in (-0.6, 0.0, 0.6)
            for down in (-0.6, 0.0, 0.6)
        ]
    form, x_, y_, radius_ = (torch.tensor(values) for values in zip(*tried, strict=True))
    cover = stencil(form, x_, y_, radius_, radius_, side) > 0.5
    overlap = (cover & spot).sum((1, 2)) / ((cover | spot).sum((1, 2)) + 1e-6)
    best = int(overlap.argmax())
    shape, x, y, radius = tried[best]
    return Thing(shape if overlap[best] > _LIKENESS else None, _colour(spot, near, background), radius, x, y)


def _related(things: list[Thing], wanted: g.Wanted) -> bool:
    """Whether the first thing stands to the second as asked, whichever of the two is which."""
    asked = list(zip(wanted.shapes, wanted.colours, strict=True))
    for first, second in (things, things[::-1]):
        if [(first.shape, first.colour), (second.shape, second.colour)] != asked:
            continue
        across, down = first.x - second.x, first.y - second.y
        upright = abs(down) > abs(across)
        if (0 if down < 0 else 1) == wanted.relation if upright else (2 if across < 0 else 3) == wanted.relation:
            return True
    return False


def _digit(spots: list[Tensor], near: Tensor, wanted: g.Wanted, right: bool, background: int) -> Verdict:
    if not spots:
        return Verdict(right, False, False, False)
    inked = torch.stack(spots).any(0)
    side = inked.shape[-1]
    rows, columns = inked.nonzero(as_tuple=True)
    top, bottom, left, last = (int(value) for value in (rows.min(), rows.max(), columns.min(), columns.max()))
    half = (bottom - top + 1) / 2 / side
    tried = [(digit, half * scale) for digit in range(10) for scale in (0.95, 1.0, 1.05)]
    digits, halves = (torch.tensor(values) for values in zip(*tried, strict=True))
    x = torch.full((len(tried),), (left + last + 1) / 2 / side)
    y = torch.full((len(tried),), (top + bottom + 1) / 2 / side)
    cover = digit_stencil(digits, x, y, halves, side) > 0.5
    overlap = (cover & inked).sum((1, 2)) / ((cover | inked).sum((1, 2)) + 1e-6)
    best = int(overlap.argmax())
    shape = tried[best][0] == wanted.digit and bool(overlap[best] > _LIKENESS)
    colour = _colour(inked, near, background) == wanted.colours[0]
    return Verdict(right, colour, shape, right and shape and colour and len(spots) == 1)


def _scene(picture: Tensor, wanted: g.Wanted) -> Verdict:
    """A scene has its sky above, its ground below, enough of its light up there and of its thing in the middle."""
    side = picture.shape[-1]
    pixels = picture.permute(1, 2, 0).reshape(-1, 3)
    near = (pixels[:, None] - palette(torch.device("cpu"))).norm(dim=-1).argmin(1).reshape(side, side)
    thing, (tint, light) = g.THINGS[wanted.thing], g.LIGHTS[wanted.light]

    def share(region: Tensor, colour: str) -> float:
        return float((region == g.NAMES.index(colour)).float().mean())

    upper, middle = near[: side * 2 // 5], near[side // 4 : side * 9 // 10]
    sky = share(near[:2], "night" if light == "moon" else "day") > 0.6
    ground = share(near[-2:], "sea" if thing == "boat" else "grass") > 0.6
    colour = {"tree": "green"}.get(thing, g.COLOURS[wanted.colours[0]])
    roof = {"tree": "brown", "house": "brown", "boat": "white"}[thing]
    body = share(middle, colour) > 0.01 and share(middle, roof) > 0.002
    lit = share(upper, tint) > 0.02
    return Verdict(sky and ground, lit and body, body, sky and ground and lit and body)
