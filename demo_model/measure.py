"""Measures what the demo's model has learnt, on captions that it has not seen: background, shapes, words.

    python -m ideogram4_fusion.demo_model.measure FOLDER [--preset INSTANT_8] [--pictures SHEET.png] [--output FILE]

FOLDER is a checkpoint; with --pictures its renders are read from the sheet that `train` wrote on a GPU. Words are read
by tesseract (Debian: tesseract-ocr), without its dictionary. The same is done to the drawn posters, which says how much
of a miss is the measure's own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from skimage.measure import label
from torch import Tensor
from torch.nn import functional

from ..benchmarks import record
from ..sampling.presets import PRESETS
from . import colours
from .drawing import as_rows, draw, inside, shape_rows
from .examples import held_out
from .posters import KINDS, REACH, SIDE, Box, Poster, Shape
from .sample import Sampler, read_sheet

MEASURED = {
    "background": "share of the pictures whose edges have the colours that the caption names",
    "shapes": "share of the pictures with every shape of the caption, of its kind and colour; place and size are free",
    "word": "share of the pictures whose word is read to the letter",
    "letters": "mean share of a word's letters that are read in their places",
    "drawn": "the same of the posters themselves: what the measure can reach",
}

_BAND = 6  # pixels along the edges, where there is only background
_LIKENESS = 0.7  # intersection over union of a shape and its best outline; less is no recognisable shape
_SMALLEST = 150  # pixels of a shape
_MARGIN = 8  # pixels around a word's box that it may reach into
_LARGER = 3  # how much a word is enlarged for reading


def background_is_right(picture: Tensor, poster: Poster) -> bool:
    """Whether the bands along two opposite edges are nearest, of all colours, to what the caption names there."""
    ground = poster.background
    along = picture.transpose(0, 1) if ground.sideways else picture
    for band, name in ((along[:_BAND], ground.first), (along[-_BAND:], ground.second)):
        colour = band.reshape(-1, 3).float().median(0).values
        if colours.NAMES[int(_distances(colour[None])[0].argmin())] != name:
            return False
    return True


def shape_is_right(picture: Tensor, poster: Poster, shape: Shape) -> bool:
    """Whether the picture shows a shape of that kind among the pixels that are nearest, of all colours, to its own.

    Place and size are free. Of two shapes of a kind each has a colour of its own.
    """
    pixels = picture.reshape(-1, 3).float()
    # The background itself is one more colour, since a gradient passes others on its way.
    ground = _ground(poster).reshape(-1, 3)
    distances = torch.cat([_distances(pixels), (pixels - ground).norm(dim=1)[:, None]], 1)
    mask = (distances.argmin(1) == colours.NAMES.index(shape.colour)).view(SIDE, SIDE)
    largest = _largest_part(mask)
    if largest.sum() < _SMALLEST:
        return False
    likeness = {kind: _likeness(largest, kind) for kind in KINDS}
    return max(likeness, key=lambda kind: likeness[kind]) == shape.kind and likeness[shape.kind] >= _LIKENESS


def read_word(picture: Tensor, poster: Poster) -> str:
    """What tesseract reads around the word's place, as black letters on white."""
    word = poster.word
    colour = torch.tensor(colours.RGB[word.colour], dtype=torch.float32)
    axis = colour - _ground(poster)
    # 1 on the letters' colour, 0 on the background's.
    ink = ((picture.float() - _ground(poster)) * axis).sum(-1) / axis.square().sum(-1)
    left, top, right, bottom = _clipped(word.box)
    ink = ink[top:bottom, left:right].clamp(0.0, 1.0)
    ink = functional.pad(ink, (_MARGIN,) * 4)
    large = functional.interpolate(ink[None, None], scale_factor=_LARGER, mode="bicubic", align_corners=False)[0, 0]
    grey = (255.0 * (1.0 - large.clamp(0.0, 1.0))).round().to(torch.uint8)
    # A PGM file needs no library to write.
    image = f"P5 {grey.shape[1]} {grey.shape[0]} 255\n".encode() + grey.numpy().tobytes()
    command = ["tesseract", "-", "-", "--psm", "7", "--dpi", "200", *_options(load_system_dawg="0", load_freq_dawg="0")]
    done = subprocess.run(command, input=image, capture_output=True, check=True)
    return "".join(done.stdout.decode().split())


def figures(pictures: Tensor, posters: Sequence[Poster]) -> dict[str, Any]:
    """Shares of the pictures with the right background, all the right shapes, and the word read to the letter.

    Beside them the share of letters read in their places, and the words that were misread.

    Args:
        pictures: [N, 256, 256, 3] uint8.
        posters: what they should show.
    """
    pairs = list(zip(pictures, posters, strict=True))
    read = [read_word(picture, poster) for picture, poster in pairs]
    words = [poster.word.letters for poster in posters]
    return {
        "background": _share(background_is_right(*pair) for pair in pairs),
        "shapes": _share(
            all(shape_is_right(picture, poster, shape) for shape in poster.shapes) for picture, poster in pairs
        ),
        "word": _share(found == word for found, word in zip(read, words, strict=True)),
        "letters": _share(_common_letters(found, word) for found, word in zip(read, words, strict=True)),
        "misread": [f"{word} {found}" for found, word in zip(read, words, strict=True) if found != word],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", choices=("INSTANT_8", "FAST_20"), default="INSTANT_8")
    parser.add_argument("--pictures", type=Path, help="a sheet of the first captions, rendered already")
    parser.add_argument("--count", type=int, default=200, help="captions; default: %(default)s")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    if shutil.which("tesseract") is None:
        sys.exit("measure: there is no tesseract; on Debian, `apt-get install tesseract-ocr`")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    captioned = held_out()[: options.count]
    posters = [each.poster for each in captioned]
    if options.pictures is None:
        pictures = Sampler(options.folder, device).render([each.caption for each in captioned], PRESETS[options.preset])
    else:
        pictures = read_sheet(options.pictures, len(captioned))
    drawn = ((draw(as_rows(posters)) + 1.0) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    result: dict[str, Any] = {
        "preset": options.preset,
        "captions": f"{len(captioned)}, held out",
        "measured": MEASURED,
        "rendered_in": "this run" if options.pictures is None else f"the run that wrote {options.pictures.name}",
        "origin": record.origin(device),
        "rendered": figures(pictures, posters),
        "drawn": figures(drawn, posters),
    }
    for name in ("rendered", "drawn"):
        shown = ", ".join(f"{key} {value:.1%}" for key, value in result[name].items() if isinstance(value, float))
        print(f"{name}: {shown}")
    if options.output:
        record.write(options.output, result)


def _distances(pixels: Tensor) -> Tensor:
    """[N, 3] in 0..255 -> distances to the named colours, [N, colours]."""
    palette = torch.tensor([colours.RGB[name] for name in colours.NAMES], dtype=torch.float32)
    return torch.cdist(pixels, palette)


def _ground(poster: Poster) -> Tensor:
    """The background alone, as the caption describes it: [256, 256, 3] float32 in 0..255."""
    first, second = (
        torch.tensor(colours.RGB[name], dtype=torch.float32)
        for name in (poster.background.first, poster.background.second)
    )
    share = ((torch.arange(SIDE) + 0.5) / SIDE)[:, None]
    ramp = first + share * (second - first)
    return (ramp[None] if poster.background.sideways else ramp[:, None]).expand(SIDE, SIDE, 3)


def _largest_part(mask: Tensor) -> Tensor:
    """The largest connected part of a mask [H, W], as a mask."""
    parts = torch.from_numpy(label(mask.numpy()))
    sizes = parts.flatten().bincount()
    sizes[0] = 0
    return (parts == int(sizes.argmax())) & mask


def _likeness(mask: Tensor, kind: str) -> float:
    """Intersection over union of a mask and the shape of that kind that fits into its bounding box."""
    rows, columns = mask.nonzero().unbind(1)
    top, bottom = float(rows.min()), float(rows.max()) + 1.0
    left, right = float(columns.min()), float(columns.max()) + 1.0
    reach_left, up, reach_right, down = REACH[kind]
    radius = ((bottom - top) / (up + down) + (right - left) / (reach_left + reach_right)) / 2.0
    shape = Shape(
        kind, "white", round((left + right) / 2.0), round(top + up * (bottom - top) / (up + down)), round(radius)
    )
    outline = inside(*shape_rows(shape))[0] > 0
    return float((mask & outline).sum() / (mask | outline).sum())


def _clipped(box: Box) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    return (
        max(0, int(left) - _MARGIN),
        max(0, int(top) - _MARGIN),
        min(SIDE, int(right) + _MARGIN),
        min(SIDE, int(bottom) + _MARGIN),
    )


def _options(**values: str) -> list[str]:
    given = {"tessedit_char_whitelist": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", **values}
    return [part for name, value in given.items() for part in ("-c", f"{name}={value}")]


def _share(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _common_letters(read: str, letters: str) -> float:
    """Share of the letters that were read in their places."""
    return sum(a == b for a, b in zip(read, letters, strict=False)) / len(letters)


if __name__ == "__main__":
    main()
