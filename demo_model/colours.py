"""The named colours of the posters, and which of them can be told apart from a background."""

from __future__ import annotations

from functools import cache

RGB: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (250, 215, 50),
    "green": (40, 160, 70),
    "cyan": (60, 200, 220),
    "blue": (40, 80, 210),
    "purple": (125, 55, 175),
    "pink": (245, 140, 185),
    "white": (250, 250, 250),
    "black": (20, 20, 20),
}
NAMES = tuple(RGB)

_BLENDS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a gradient, at which it is looked at
_SHAPE_DISTANCE = 100.0  # in RGB: less apart, a shape's outline is lost
_WORD_LUMA = 70.0  # of 255: less apart, thin strokes cannot be read


@cache
def shape_colours(first: str, second: str) -> tuple[str, ...]:
    """Colours of a shape that shows on a gradient from `first` to `second`, or on one colour where both are that."""
    return tuple(name for name in NAMES if _distance(name, first, second) >= _SHAPE_DISTANCE)


@cache
def word_colours(first: str, second: str) -> tuple[str, ...]:
    """Colours of a word that can be read on that background; a shape shows in each of them too."""
    blends = _blends(first, second)
    return tuple(
        name
        for name in shape_colours(first, second)
        if min(abs(_luma(RGB[name]) - _luma(blend)) for blend in blends) >= _WORD_LUMA
    )


@cache
def gradients() -> tuple[tuple[str, str], ...]:
    """Every pair of different colours on whose gradient there are two colours for words, and three for shapes."""
    return tuple(
        (first, second)
        for first in NAMES
        for second in NAMES
        if first != second and len(word_colours(first, second)) >= 2 and len(shape_colours(first, second)) >= 3
    )


def default_word_colour(first: str, second: str) -> str:
    """The colour of a word of which a caption names none: white where that can be read, else black."""
    return "white" if "white" in word_colours(first, second) else "black"


def _blends(first: str, second: str) -> list[tuple[float, ...]]:
    return [
        tuple(a + share * (b - a) for a, b in zip(RGB[first], RGB[second], strict=True))
        for share in (_BLENDS if first != second else (0.0,))
    ]


def _distance(name: str, first: str, second: str) -> float:
    """The least Euclidean distance in RGB between a colour and the colours of a background."""
    colour = RGB[name]
    return min(sum((a - b) ** 2 for a, b in zip(colour, blend, strict=True)) ** 0.5 for blend in _blends(first, second))


def _luma(colour: tuple[float, ...]) -> float:
    """Rec. 601 luma of an RGB colour, both in 0..255."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue
