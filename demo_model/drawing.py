"""Draws posters, many at once on any device, by the distance of each pixel to each shape's outline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from string import ascii_uppercase

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from . import colours
from .posters import KINDS, LONGEST_WORD, REACH, SIDE, Poster, Shape, cell_height

_SHAPES = 2  # at most
_STAR_NOTCH = 0.42  # where a star's edges meet inside, in radii
_CELL = 44  # columns of a letter in the atlas
_FINER = 4  # how much larger the letters are drawn before they are scaled into the atlas
_CAP_HEIGHT, _STROKE = 0.84, 0.045  # of a capital, of the cell's height; and what its strokes are thickened by
_ABSENT = -1.0
_WORD_WEIGHT, _SHAPE_WEIGHT = 3.0, 1.0  # of an error there, beyond that of the background

# Columns of a poster as a row of numbers; colours are indices into colours.NAMES.
_FIRST, _SECOND, _SIDEWAYS = 0, 1, 2
_SHAPE = 3  # kind, colour, x, y, radius of each
_WORD = _SHAPE + 5 * _SHAPES  # colour, x, y, cell
_LETTERS = _WORD + 4
_COLUMNS = _LETTERS + LONGEST_WORD


def as_rows(posters: Sequence[Poster]) -> Tensor:
    """Posters as numbers for `draw`: [N, columns] float32 on the CPU."""
    rows = [_row(poster) for poster in posters]
    return torch.tensor(rows, dtype=torch.float32).view(len(rows), _COLUMNS)


def draw(rows: Tensor) -> Tensor:
    """[N, columns] of `as_rows` -> pictures [N, 3, 256, 256] float32 in -1..1 on the same device."""
    palette = torch.tensor([colours.RGB[name] for name in colours.NAMES], device=rows.device) / 127.5 - 1.0
    y, x = _pixels(rows.device)
    share = torch.where(rows[:, _SIDEWAYS, None, None] > 0, x, y)[:, None] / SIDE
    first, second = (palette[rows[:, column].long()][:, :, None, None] for column in (_FIRST, _SECOND))
    picture = first + share * (second - first)
    for number in range(_SHAPES):
        kind, colour, *place = rows[:, _SHAPE + 5 * number : _SHAPE + 5 * number + 5].unbind(1)
        ink = (inside(kind, *place) + 0.5).clamp(0.0, 1.0) * (kind >= 0)[:, None, None]
        picture = _paint(picture, palette[colour.long().clamp(min=0)], ink)
    return _paint(picture, palette[rows[:, _WORD].long()], _word_ink(rows))


def inside(kind: Tensor, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """How far each pixel is inside a shape's outline, in pixels; negative outside: [N, 256, 256].

    Args:
        kind: [N], indices into KINDS.
        x, y, radius: [N], in pixels.
    """
    rows, columns = _pixels(kind.device)
    dx, dy = columns - x[:, None, None], rows - y[:, None, None]
    r = radius[:, None, None]
    outlines = torch.stack([_circle(dx, dy, r), _square(dx, dy, r), _triangle(dx, dy, r), _star(dx, dy, r)], 1)
    index = kind.long().clamp(min=0)[:, None, None, None].expand(-1, 1, SIDE, SIDE)
    return outlines.gather(1, index)[:, 0]


def error_weights(rows: Tensor) -> Tensor:
    """How much each pixel's error counts in training, [N, 256, 256]: more where there is more to learn."""
    word, shapes = _element_areas(rows)
    return 1.0 + _WORD_WEIGHT * word + _SHAPE_WEIGHT * shapes


def _element_areas(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where the word's box and the shapes' insides are: two of [N, 256, 256] float32, 0 or 1."""
    y, x = _pixels(rows.device)
    left, top, cell = (rows[:, _WORD + column, None, None] for column in (1, 2, 3))
    letters = (rows[:, _LETTERS:] >= 0).sum(1)[:, None, None]
    word = (x > left) & (x < left + cell * letters) & (y > top) & (y < top + 1.25 * cell)
    shapes = torch.zeros_like(word)
    for number in range(_SHAPES):
        kind, _, *place = rows[:, _SHAPE + 5 * number : _SHAPE + 5 * number + 5].unbind(1)
        shapes |= (inside(kind, *place) > 0) & (kind >= 0)[:, None, None]
    return word.float(), shapes.float()


def _row(poster: Poster) -> list[float]:
    colour = colours.NAMES.index
    ground, word = poster.background, poster.word
    row: list[float] = [colour(ground.first), colour(ground.second), ground.sideways]
    for shape in poster.shapes:
        row += [KINDS.index(shape.kind), colour(shape.colour), shape.x, shape.y, shape.radius]
    row += [_ABSENT] * (_WORD - len(row))
    row += [colour(word.colour), word.x, word.y, word.cell]
    row += [ascii_uppercase.index(letter) for letter in word.letters]
    return row + [_ABSENT] * (_COLUMNS - len(row))


def _pixels(device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the pixels' centres, two of [256, 256] float32."""
    centres = torch.arange(SIDE, device=device) + 0.5
    rows, columns = torch.meshgrid(centres, centres, indexing="ij")
    return rows, columns


def _paint(picture: Tensor, colour: Tensor, ink: Tensor) -> Tensor:
    """[N, 3, H, W] under `ink` [N, H, W] of one colour [N, 3] each."""
    return picture + ink[:, None] * (colour[:, :, None, None] - picture)


def _circle(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    return r - torch.hypot(dx, dy)


def _square(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    return REACH["square"][0] * r - torch.maximum(dx.abs(), dy.abs())


def _triangle(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    """Its tip is up at -r, its base as wide as twice what the shape reaches sideways."""
    half, _, _, down = REACH["triangle"]
    slope = half / (1.0 + down)
    sides = ((dy + r) * slope - dx.abs()) / math.hypot(1.0, slope)
    return torch.minimum(sides, down * r - dy)


def _star(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    """Five tips, one of them up: the ten edges fall onto one when the plane is folded around the tips."""
    fifth = 2.0 * math.pi / 5.0
    turn = torch.atan2(dx, -dy) / fifth
    angle = (turn - turn.round()).abs() * fifth  # to the nearest tip, 0 to 36 degrees
    distance = torch.hypot(dx, dy)
    along, across = distance * angle.cos(), distance * angle.sin()
    # The edge runs from the tip (1, 0) to the notch; its normal points outwards.
    edge = _STAR_NOTCH * math.cos(fifth / 2) - 1.0, _STAR_NOTCH * math.sin(fifth / 2)
    return ((r - along) * edge[1] + across * edge[0]) / math.hypot(*edge)


def _word_ink(rows: Tensor) -> Tensor:
    """How much each pixel is covered by letters, [N, 256, 256] in 0..1."""
    atlas = _atlas().to(rows.device)
    letters = rows[:, _LETTERS:].long()
    blank = len(ascii_uppercase)
    line = atlas[torch.where(letters < 0, blank, letters)]  # [N, letters, cell's height, cell's width]
    line = line.transpose(1, 2).flatten(2)[:, None]
    left, top, cell = (rows[:, _WORD + column, None, None] for column in (1, 2, 3))
    y, x = _pixels(rows.device)
    height = (1.25 * cell).round()
    grid = torch.stack([2.0 * (x - left) / (LONGEST_WORD * cell) - 1.0, 2.0 * (y - top) / height - 1.0], -1)
    return functional.grid_sample(line, grid, align_corners=False)[:, 0]


@cache
def _atlas() -> Tensor:
    """The capitals A to Z and a blank, in equal cells: [27, rows, columns] float32 in 0..1.

    The font is the one that Pillow brings with it, Aileron (CC0), in bold strokes; a letter wider than its cell is made
    narrower.
    """
    width, height = _FINER * _CELL, _FINER * cell_height(_CELL)
    stroke = round(_STROKE * height / 2)
    size = _font_size(round(_CAP_HEIGHT * height) - 2 * stroke)
    cells = []
    for letter in ascii_uppercase:
        glyph = _glyph(letter, size, stroke)
        if glyph.width > width - 2 * _FINER:
            glyph = glyph.resize((width - 2 * _FINER, glyph.height), Image.Resampling.LANCZOS)
        cell = Image.new("L", (width, height))
        cell.paste(glyph, ((width - glyph.width) // 2, (height - glyph.height) // 2))
        cells.append(cell.resize((_CELL, cell_height(_CELL)), Image.Resampling.BOX))
    cells.append(Image.new("L", (_CELL, cell_height(_CELL))))
    values = torch.tensor([list(cell.tobytes()) for cell in cells], dtype=torch.float32) / 255.0
    return values.view(len(cells), cell_height(_CELL), _CELL)


def _font_size(cap_height: int) -> float:
    """The size in points at which a flat capital is `cap_height` pixels high."""
    probe = 400
    _, top, _, bottom = ImageFont.load_default(probe).getbbox("H")
    return probe * cap_height / (bottom - top)


def _glyph(letter: str, size: float, stroke: int) -> Image.Image:
    font = ImageFont.load_default(size)
    left, top, right, bottom = (round(side) for side in font.getbbox(letter, stroke_width=stroke))
    glyph = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(glyph).text((-left, -top), letter, fill=255, font=font, stroke_width=stroke)
    return glyph


def shape_rows(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One shape as arguments of `inside`."""
    values = (KINDS.index(shape.kind), shape.x, shape.y, shape.radius)
    kind, x, y, radius = (torch.tensor([float(value)]) for value in values)
    return kind, x, y, radius
