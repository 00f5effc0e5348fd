"""Pictures that show two renders: side by side, and what differs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .images import paired
from .rounding import ceiled

if TYPE_CHECKING:
    from PIL import ImageFont

MAX_GAIN = 256  # 8-bit pictures never need more; above it, float noise would look like a difference

_GAP = 8
_MARGIN = 6
_LINE_SPACING = 1.35
_BACKGROUND = 24
_FOREGROUND = 240


def side_by_side(a: Tensor, b: Tensor, label_a: str, label_b: str) -> Tensor:
    """`a` left of `b`, a small gap between, each under a strip with its label; the pictures' values are untouched.

    Takes [B, H, W, 3 or 4], drops alpha and returns float32 [B, strip + H, W + gap + W, 3] on the CPU. Labels wrap
    at the picture's width. Raises what `images.paired` raises.
    """
    a, b = (image[..., :3].float() for image in paired(a, b))
    width = a.shape[2]
    labels = [_label(text, width) for text in (label_a, label_b)]
    rows = max(label.shape[0] for label in labels)
    columns = [_under(_padded(label, rows), image) for label, image in zip(labels, (a, b), strict=True)]
    gap = _plain(a.shape[0], rows + a.shape[1], _GAP)
    return torch.cat([columns[0], gap, columns[1]], dim=2)


def difference(a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """|a - b| in RGB, amplified so that it can be seen, under a strip that states the gain; and the gain.

    The gain is the power of two that brings the batch's largest difference into (0.5, 1], at most 256, and 1 when the
    images are identical. Values that are not finite are shown as 1 (white). Takes [B, H, W, 3 or 4] and returns float32
    [B, strip + H, W, 3] on the CPU. Raises what `images.paired` raises.
    """
    a, b = (image[..., :3] for image in paired(a, b))
    distance = (a.float() - b.float()).abs()
    finite = distance.isfinite()
    largest = float(distance.where(finite, 0.0).max())
    if largest == 0.0 and bool(finite.all()) and bool((a != b).any()):
        largest = torch.finfo(torch.float32).tiny  # float64 pictures that float32 cannot tell apart
    gain = _gain(largest)
    picture = (distance * gain).where(finite, 1.0).clamp(max=1.0)
    caption = f"difference x {gain} (largest {ceiled(largest, 5)})" if largest else "identical"
    if not bool(finite.all()):
        caption = f"difference x {gain}, non-finite values white"
    return _under(_label(caption, picture.shape[2]), picture), gain


def _gain(largest: float) -> int:
    if largest == 0.0:
        return 1
    fraction, exponent = math.frexp(largest)  # largest = fraction * 2^exponent, fraction in [0.5, 1)
    doublings = 1 - exponent if fraction == 0.5 else -exponent
    return min(2 ** max(doublings, 0), MAX_GAIN)


def _under(strip: Tensor, images: Tensor) -> Tensor:
    return torch.cat([strip.expand(images.shape[0], -1, -1, -1), images], dim=1)


def _plain(batch: int, height: int, width: int) -> Tensor:
    return torch.full((batch, height, width, 3), _BACKGROUND / 255)


def _padded(strip: Tensor, rows: int) -> Tensor:
    return torch.cat([strip, _plain(1, rows - strip.shape[0], strip.shape[1])[0]])


def _label(text: str, width: int) -> Tensor:
    """`text` as a strip, float32 [rows, width, 3], its font scaled to the picture's width."""
    from PIL import Image, ImageDraw, ImageFont

    size = min(max(width // 36, 12), 40)
    font = ImageFont.load_default(size)
    lines = _wrapped(text, font, width - 2 * _MARGIN)
    line_height = round(size * _LINE_SPACING)
    strip = Image.new("RGB", (width, line_height * len(lines) + 2 * _MARGIN), (_BACKGROUND,) * 3)
    draw = ImageDraw.Draw(strip)
    for row, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + row * line_height), line, fill=(_FOREGROUND,) * 3, font=font)
    pixels = torch.frombuffer(bytearray(strip.tobytes()), dtype=torch.uint8)
    return pixels.view(strip.height, strip.width, 3).float() / 255


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
