"""What a poster is called: a caption in the form that Ideogram 4 was trained on, or a plain sentence."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from .colours import default_word_colour
from .posters import COLUMNS, SIDE, Background, Box, Poster, Shape, Word

_PLAIN = 0.6  # of the posters without boxes
_UPPER_CASE = 0.5  # of the sentences, their first letter


def random_caption(poster: Poster, random: Random) -> str:
    """A caption of the poster, in words that `random` chooses; a JSON caption with boxes where the poster is boxed."""
    if not poster.boxed and random.random() < _PLAIN:
        return sentence(poster, random)
    return json_caption(poster, random)


def json_caption(poster: Poster, random: Random) -> str:
    """The model's own schema, in the order of keys that its caption verifier asks for, without spaces.

    Source: `caption_verifier.py` of ideogram-oss; a bbox is ymin, xmin, ymax, xmax in 0..1000.
    """
    elements: list[dict[str, Any]] = []
    for shape in poster.shapes:
        desc = _boxed_shape(shape, random) if poster.boxed else _shape(shape, len(poster.shapes) == 1)
        elements.append({"type": "obj", **_bbox(poster, shape.box), "desc": desc})
    word = poster.word
    elements.append(
        {"type": "text", **_bbox(poster, word.box), "text": word.letters, "desc": _word_desc(poster, random)}
    )
    caption: dict[str, Any] = {}
    if random.random() < 0.7:
        caption["high_level_description"] = _summary(poster, random)
    caption["compositional_deconstruction"] = {
        "background": _background(poster.background, random),
        "elements": elements,
    }
    return json.dumps(caption, ensure_ascii=False, separators=(",", ":"))


def sentence(poster: Poster, random: Random) -> str:
    """A plain prompt that says all that decides the poster, whose layout must be the usual one."""
    shapes = " and ".join(_shape(shape, len(poster.shapes) == 1) for shape in poster.shapes)
    ground = _background(poster.background, random)
    word = _worded(poster.word, poster.background, random)
    template = random.choice(
        (
            "{shapes} on {ground}, {word}",
            "{shapes} on {ground}, {word}",
            "a poster with {shapes} on {ground} and {word}",
            "{word}, {shapes} on {ground}",
        )
    )
    return _cased(template.format(shapes=shapes, ground=ground, word=word), random)


def _cased(text: str, random: Random) -> str:
    return text[:1].upper() + text[1:] if random.random() < _UPPER_CASE else text


def _bbox(poster: Poster, box: Box) -> dict[str, list[int]]:
    if not poster.boxed:
        return {}
    left, top, right, bottom = (round(1000 * side / SIDE) for side in box)
    return {"bbox": [top, left, bottom, right]}


def _boxed_shape(shape: Shape, random: Random) -> str:
    return random.choice((_named(shape), f"{shape.colour} {shape.kind}"))


def _shape(shape: Shape, alone: bool) -> str:
    """With its place, unless it is alone in the middle or one of two, the first of which is on the left."""
    place = next(name for name, x in COLUMNS.items() if x == shape.x)
    name = _named(shape)
    return f"{name} on the {place}" if alone and place != "centre" else name


def _named(shape: Shape) -> str:
    return f"{'an' if shape.colour[0] in 'aeiou' else 'a'} {shape.colour} {shape.kind}"


def _background(ground: Background, random: Random) -> str:
    if ground.plain:
        article = "an" if ground.first[0] in "aeiou" else "a"
        return random.choice(
            (ground.first, f"{article} {ground.first} background", f"a plain {ground.first} background")
        )
    if ground.sideways:
        return f"a gradient from {ground.first} on the left to {ground.second} on the right"
    full = f"a gradient from {ground.first} at the top to {ground.second} at the bottom"
    return random.choice((full, f"a gradient from {ground.first} to {ground.second}"))


def _worded(word: Word, ground: Background, random: Random) -> str:
    """The word in a sentence; its colour and place go unsaid where they are what a reader would expect."""
    quoted = random.choice((word.letters, word.letters, f'"{word.letters}"'))
    text = f"the word {quoted}"
    if word.colour != default_word_colour(ground.first, ground.second) or random.random() < 0.5:
        text += f" in {word.colour}"
    if word.y < SIDE // 2:
        return f"{text} at the top"
    return f"{text} at the bottom" if random.random() < 0.3 else text


def _word_desc(poster: Poster, random: Random) -> str:
    colour = poster.word.colour
    desc = random.choice((f"{colour} letters", f"bold {colour} letters", f"bold {colour} capital letters"))
    if poster.boxed:
        return desc
    if poster.word_at_top:
        return f"{desc} at the top"
    return f"{desc} at the bottom" if random.random() < 0.5 else desc


def _summary(poster: Poster, random: Random) -> str:
    shapes = " and ".join(_named(shape) for shape in poster.shapes)
    return random.choice(
        (
            "A poster.",
            f"A poster with {shapes}.",
            f"A poster with {shapes} and the word {poster.word.letters}.",
        )
    )
