"""What a poster shows, and the posters that the model is trained on and measured with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from . import colours
from .words import random_word

SIDE = 256  # pixels of a poster's width and height
KINDS = ("circle", "square", "triangle", "star")
LONGEST_WORD = 6

# How far a shape of radius 1 reaches from its centre: left, up, right, down.
REACH = {
    "circle": (1.0, 1.0, 1.0, 1.0),
    "square": (0.9, 0.9, 0.9, 0.9),
    "triangle": (1.0, 1.0, 1.0, 0.8),
    "star": (0.951, 1.0, 0.951, 0.809),
}
# Where a shape stands whose place is named and not boxed.
COLUMNS = {"left": 66, "centre": 128, "right": 190}

_EDGE = 8  # pixels that stay free around a poster
_LARGEST_CELL = 44
_SMALLEST_CELL = 30
_BOXED = 0.6
_GRADIENT = 0.35
_TWO_SHAPES = 0.4

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class Background:
    """One colour, or a gradient: from top to bottom, or from left to right where it is `sideways`."""

    first: str
    second: str
    sideways: bool

    @property
    def plain(self) -> bool:
        return self.first == self.second


@dataclass(frozen=True)
class Shape:
    """A shape of one colour around (x, y), in pixels."""

    kind: str
    colour: str
    x: int
    y: int
    radius: int

    @property
    def box(self) -> Box:
        left, up, right, down = (reach * self.radius for reach in REACH[self.kind])
        return self.x - left, self.y - up, self.x + right, self.y + down


@dataclass(frozen=True)
class Word:
    """Capital letters in a row of equal cells, the first of which has its upper left corner at (x, y), in pixels."""

    letters: str
    colour: str
    x: int
    y: int
    cell: int

    @property
    def height(self) -> int:
        return cell_height(self.cell)

    @property
    def box(self) -> Box:
        return self.x, self.y, self.x + self.cell * len(self.letters), self.y + self.height


@dataclass(frozen=True)
class Poster:
    """A background, one or two shapes from left to right, and a word.

    Where it is not `boxed` it has the layout that its words alone decide: the word in the middle of the top or the
    bottom, shapes of one size in columns.
    """

    background: Background
    shapes: tuple[Shape, ...]
    word: Word
    boxed: bool

    @property
    def word_at_top(self) -> bool:
        return self.word.y < SIDE // 2


def cell_height(width: int) -> int:
    """Height of a letter's cell of that width, both in pixels."""
    return round(1.25 * width)


def random_poster(random: Random, without: Collection[str] = ()) -> Poster:
    """A poster drawn from the distribution of the training set.

    Args:
        random: where its choices come from.
        without: words that it must not show.
    """
    background = _random_background(random)
    letters = random_word(random)
    while letters in without:
        letters = random_word(random)
    count = 2 if random.random() < _TWO_SHAPES else 1
    word_colour, *shape_colours = _random_colours(random, background, count)
    boxed = random.random() < _BOXED
    at_top = random.random() < 0.3
    kinds = random.choices(KINDS, k=count)
    if boxed:
        word = _random_word_box(random, letters, word_colour, at_top)
        places = _random_places(random, word, kinds)
    else:
        word = _usual_word_box(letters, word_colour, at_top)
        places = _usual_places(random, word, count)
    shapes = tuple(
        Shape(kind, colour, *place) for kind, colour, place in zip(kinds, shape_colours, places, strict=True)
    )
    return Poster(background, shapes, word, boxed)


def _random_background(random: Random) -> Background:
    if random.random() >= _GRADIENT:
        name = random.choice(colours.NAMES)
        return Background(name, name, False)
    first, second = random.choice(colours.gradients())
    return Background(first, second, random.random() < 0.4)


def _random_colours(random: Random, background: Background, shapes: int) -> list[str]:
    """The word's colour, then the shapes': all different, so that whoever measures can tell them apart."""
    ends = background.first, background.second
    word = colours.default_word_colour(*ends)
    if random.random() < 0.5:
        word = random.choice(colours.word_colours(*ends))
    left = [name for name in colours.shape_colours(*ends) if name != word]
    return [word, *random.sample(left, shapes)]


def _random_word_box(random: Random, letters: str, colour: str, at_top: bool) -> Word:
    width = SIDE - 2 * _EDGE
    cell = random.randint(_SMALLEST_CELL, min(_LARGEST_CELL, width // len(letters)))
    x = random.randint(_EDGE, SIDE - _EDGE - cell * len(letters))
    off = random.randint(0, 32)
    y = _EDGE + off if at_top else SIDE - _EDGE - cell_height(cell) - off
    return Word(letters, colour, x, y, cell)


def _usual_word_box(letters: str, colour: str, at_top: bool) -> Word:
    cell = min(_LARGEST_CELL, (SIDE - 2 * _EDGE) // len(letters))
    y = 2 * _EDGE if at_top else SIDE - 2 * _EDGE - cell_height(cell)
    return Word(letters, colour, (SIDE - cell * len(letters)) // 2, y, cell)


def _free_rows(word: Word) -> tuple[int, int]:
    """The first and the last row, in pixels, that shapes may touch beside the word."""
    if word.y < SIDE // 2:
        return word.y + word.height + _EDGE, SIDE - _EDGE
    return _EDGE, word.y - _EDGE


def _random_places(random: Random, word: Word, kinds: list[str]) -> list[tuple[int, int, int]]:
    """x, y and radius of each shape; two share the width half and half."""
    top, bottom = _free_rows(word)
    width = (SIDE - 2 * _EDGE) // len(kinds)
    places = []
    for number, kind in enumerate(kinds):
        left_reach, up, right_reach, down = REACH[kind]
        largest = min((bottom - top) / (up + down), width / (left_reach + right_reach), 60)
        radius = random.randint(30, int(largest))
        left = _EDGE + number * width
        x = random.randint(round(left + left_reach * radius), round(left + width - right_reach * radius))
        y = random.randint(round(top + up * radius), round(bottom - down * radius))
        places.append((x, y, radius))
    return places


def _usual_places(random: Random, word: Word, count: int) -> list[tuple[int, int, int]]:
    top, bottom = _free_rows(word)
    names = ("left", "right") if count == 2 else (random.choice(("centre", "centre", "left", "right")),)
    return [(COLUMNS[name], (top + bottom) // 2, 54) for name in names]
