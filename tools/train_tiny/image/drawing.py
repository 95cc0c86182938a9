"""Draws batches of pictures from primitives, on any device, with smooth edges."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools.train_tiny.image import grammar as g
from tools.train_tiny.image.sampling import DIGIT, RECTANGLE, Draws

_GLYPH = 192
"""Pixels a side of a digit's stencil."""


@functools.cache
def palette(device: torch.device) -> Tensor:
    """Colours from -1 to 1, [16, 3]."""
    return torch.tensor(list(g.PALETTE.values()), dtype=torch.float32, device=device) / 127.5 - 1


@functools.cache
def glyphs(device: torch.device) -> Tensor:
    """The ten digits in DejaVu Sans Bold, each as high as its stencil, [10, 1, _GLYPH, _GLYPH] from 0 to 1."""
    import matplotlib as mpl
    from PIL import Image, ImageDraw, ImageFont

    path = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"
    font = ImageFont.truetype(str(path), 2 * _GLYPH)
    stencils = []
    for digit in "0123456789":
        sheet = Image.new("L", (4 * _GLYPH, 4 * _GLYPH))
        ImageDraw.Draw(sheet).text((_GLYPH, _GLYPH // 2), digit, font=font, fill=255)
        box = sheet.getbbox()
        assert box is not None
        left, top, right, bottom = box
        scale = _GLYPH / (bottom - top)
        inked = sheet.crop(box).resize((max(1, round((right - left) * scale)), _GLYPH), Image.Resampling.LANCZOS)
        stencil = Image.new("L", (_GLYPH, _GLYPH))
        stencil.paste(inked, ((_GLYPH - inked.width) // 2, 0))
        stencils.append(np.asarray(stencil, dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(stencils))[:, None].to(device)


def distance(form: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Signed distance to the unit shapes, negative inside; their tips point up, y grows downward.

    The star is the five-pointed one of Inigo Quilez' collection of distance functions.
    """
    circle = (x * x + y * y).sqrt() - 1
    square = torch.maximum(x.abs(), y.abs()) - 0.88
    triangle = torch.maximum((x.abs() * 0.894 + y * -0.447) - 0.447, y - 0.8)
    cross = torch.minimum(
        torch.maximum(x.abs() - 1, y.abs() - 0.34),
        torch.maximum(y.abs() - 1, x.abs() - 0.34),
    )
    kx, ky, inner = 0.809017, -0.587785, 0.45
    px, py = x.abs(), -y
    fold = 2 * (kx * px + ky * py).clamp(min=0)
    px, py = px - fold * kx, py - fold * ky
    fold = 2 * (-kx * px + ky * py).clamp(min=0)
    px, py = px + fold * kx, py - fold * ky
    px, py = px.abs(), py - 1
    bx, by = -inner * ky, inner * kx - 1
    along = ((px * bx + py * by) / (bx * bx + by * by)).clamp(0, 1)
    star = ((px - bx * along) ** 2 + (py - by * along) ** 2).clamp(min=1e-12).sqrt()
    star = star * torch.where(py * bx - px * by > 0, 1.0, -1.0)
    box = torch.maximum(x.abs(), y.abs()) - 1
    found = box
    for index, shape in enumerate((circle, square, triangle, cross, star)):
        found = torch.where(form == index, shape, found)
    return found


def stencil(form: Tensor, x: Tensor, y: Tensor, width: Tensor, height: Tensor, side: int) -> Tensor:
    """How much of each pixel shapes cover, all arguments [n]: [n, side, side] from 0 to 1."""
    grid = (torch.arange(side, device=x.device) + 0.5) / side

    def wide(values: Tensor) -> Tensor:
        return values[:, None, None]

    u, v = (grid[None, None, :] - wide(x)) / wide(width), (grid[None, :, None] - wide(y)) / wide(height)
    far = distance(wide(form), u, v) * torch.minimum(wide(width), wide(height)) * side
    return (0.5 - far).clamp(0, 1)


def digit_stencil(digit: Tensor, x: Tensor, y: Tensor, half: Tensor, side: int) -> Tensor:
    """The same for digits of half height `half`."""
    scale = 0.5 / half
    turn = torch.zeros(len(x), 2, 3, device=x.device)
    turn[:, 0, 0] = turn[:, 1, 1] = scale
    turn[:, 0, 2], turn[:, 1, 2] = (1 - 2 * x) * scale, (1 - 2 * y) * scale
    fine = functional.affine_grid(turn, [len(x), 1, 2 * side, 2 * side], align_corners=False)
    inked = functional.grid_sample(glyphs(x.device)[digit], fine, align_corners=False)
    return functional.avg_pool2d(inked, 2)[:, 0]


def _paint(picture: Tensor, cover: Tensor, colour: Tensor, colours: Tensor) -> Tensor:
    cover = (cover * (colour >= 0)[:, None, None])[:, None]
    return picture * (1 - cover) + colours[colour.long().clamp(min=0)][:, :, None, None] * cover


def _paint_shape(picture: Tensor, primitive: Tensor, colours: Tensor) -> Tensor:
    form, x, y, width, height, colour = primitive.unbind(-1)
    return _paint(picture, stencil(form, x, y, width, height, picture.shape[-1]), colour, colours)


@functools.cache
def _painter(device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compiled for a GPU, where a shape's many small kernels cost more than the training step that they feed."""
    return torch.compile(_paint_shape, dynamic=True) if device == "cuda" else _paint_shape


def draw(draws: Draws, side: int) -> Tensor:
    """Pictures [n, 3, side, side] from -1 to 1."""
    device = draws.primitives.device
    colours = palette(device)
    picture = colours[draws.base][:, :, None, None].repeat(1, 1, side, side)
    for primitive in draws.primitives.unbind(1):
        if draws.kind == g.DIGIT:
            form, x, y, _, height, colour = primitive.unbind(-1)
            picture = _paint(picture, digit_stencil(form.long() - DIGIT, x, y, height, side), colour, colours)
        else:
            picture = _painter(device.type)(picture, primitive.contiguous(), colours)
    return picture


__all__ = ["RECTANGLE", "digit_stencil", "draw", "palette", "stencil"]
